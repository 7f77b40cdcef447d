// Folding: a link to something folded opens it, and on paper everything is open.
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
