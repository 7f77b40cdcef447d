// Search without a server: a browser starts no worker for a page of the file system, so a hidden frame is one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = this.onerror = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.hear = (event) => {
        if (event.source !== inside) return;
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        if (this.onmessage) this.onmessage(event);
      };
      window.addEventListener("message", this.hear);
      const setUp = `
        postMessage = (data) => parent.dispatchEvent(new MessageEvent("message", { data, source: window }));
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
          const script = document.createElement("script");
          Object.assign(script, { src: url, onload: resolve, onerror: reject });
          document.body.appendChild(script);
        })), Promise.resolve());`;
      inside.document.open();
      inside.document.write(`<html><body><script>${setUp}</` + `script><script src="${url}"></` + "script></body></html>");
      inside.document.close();
      this.ready = new Promise((resolve) => { this.frame.onload = resolve; });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
      window.removeEventListener("message", this.hear);
    }
  };
}
