// Sorting and downloading of tables; the page is complete without it.
"use strict";
(() => {
  const value = (row, column) => {
    const cell = row.cells[column];
    const raw = cell.dataset.v ?? cell.textContent.trim();
    if (raw === "" || raw === "n/a" || raw === "nan") return null;
    const number = Number(raw.replace(/,/g, "").replace("−", "-"));
    return Number.isNaN(number) ? raw : number;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };
  const sort = (table, column, direction, first) => {
    const body = table.tBodies[0];
    const rows = [...first];
    if (direction !== "none") {
      const sign = direction === "ascending" ? 1 : -1;
      rows.sort((r, s) => {
        const [a, b] = [value(r, column), value(s, column)];
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * compare(a, b);
      });
    }
    body.append(...rows);
  };
  const words = (cell) => (cell.querySelector(".t") ?? cell).textContent.trim();
  const csv = (table) => {
    const rows = [...table.tBodies[0].rows];
    const lines = rows.map(() => []);
    const heads = [];
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      const name = head.textContent.replace(/[↑↓]|→ 1/g, "").replace(/\s+/g, " ").trim();
      const cells = rows.map((row) => row.cells[i]);
      const put = (title, fields) => { heads.push(title); fields.forEach((f, r) => lines[r].push(f)); };
      put(name, cells.map((c) => (c.dataset.v === undefined ? words(c) : c.dataset.v)));
      if (cells.some((c) => c.dataset.v !== undefined && i && Number.isNaN(Number(words(c).replace(/[−,%\s]/g, ""))) && !["", "n/a"].includes(words(c)))) {
        put(`${name}, in words`, cells.map(words));
      }
      if (cells.some((c) => c.dataset.low !== undefined)) {
        put(`${name} low`, cells.map((c) => c.dataset.low ?? ""));
        put(`${name} high`, cells.map((c) => c.dataset.high ?? ""));
      }
      if (cells.some((c) => c.querySelector(".count"))) {
        put(`${name} defined`, cells.map((c) => c.querySelector(".count")?.textContent ?? ""));
      }
    });
    // as perturbdiff.runtime.tabular: no spreadsheet is to take a text for a formula
    const number = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
    const neutral = (text) => (/^'*[=+\-@\t\r\n]/.test(text) && !number.test(text) ? `'${text}` : text);
    const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    return [heads, ...lines].map((line) => line.map((field) => quoted(neutral(field))).join(",")).join("\r\n") + "\r\n";
  };
  const download = (name, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv;charset=utf-8" }));
    link.download = `${name}.csv`;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  for (const box of document.querySelectorAll(".table")) {
    const table = box.querySelector("table");
    const first = [...table.tBodies[0].rows];
    const heads = [...table.tHead.rows[0].cells];
    if (first.length > 1) {
      heads.forEach((head, column) => {
        if (!head.textContent.trim()) return;
        const button = document.createElement("button");
        button.type = "button";
        button.append(...head.childNodes);
        head.append(button);
        button.addEventListener("click", () => {
          const turns = { none: "ascending", ascending: "descending", descending: "none" };
          const direction = turns[head.getAttribute("aria-sort") ?? "none"];
          for (const other of heads) other.removeAttribute("aria-sort");
          if (direction !== "none") head.setAttribute("aria-sort", direction);
          sort(table, column, direction, first);
        });
      });
    }
    const button = document.createElement("button");
    button.type = "button";
    button.className = "save";
    button.textContent = "CSV";
    button.setAttribute("aria-label", `Download the table ${box.dataset.name} as CSV`);
    button.addEventListener("click", () => download(box.dataset.name, csv(table)));
    box.append(button);
  }
  // a link to something folded opens it; on paper everything is open
  const unfold = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const d of closed) d.open = true;
  });
  addEventListener("afterprint", () => { for (const d of closed) d.open = false; });
})();
