// Figures: names of points, switches for methods, downloads; and the cards of the table of perturbations.
let data = { texts: [], methods: {}, figures: {}, cards: {} };
const unpack = async (packed) => {
  const bytes = Uint8Array.from(atob(packed.trim()), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};
const off = new Set();
const SVG = "http://www.w3.org/2000/svg";

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const drawnElement = (tag, attributes) => {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const colorOf = (method) => data.methods[method]?.[0] ?? "";

// ---- names of points
const tip = element("div", { class: "tip", role: "status", hidden: "" });

const startNames = (figure, svg, record) => {
  svg.querySelector(".named")?.remove();
  if (!record.x) return;
  const ring = drawnElement("circle", { class: "ring", r: 5.5 });
  const box = svg.viewBox.baseVal;
  let at = -1;
  const seen = (i) => !off.has(data.texts[record.m[i]]);
  const hide = () => { at = -1; tip.hidden = true; ring.remove(); };
  const show = (i) => {
    at = i;
    const method = data.texts[record.m[i]], name = data.texts[record.n[i]];
    tip.replaceChildren();
    if (method) {
      const dot = element("i", { class: "dot" });
      dot.style.background = colorOf(method) || "transparent";
      tip.append(element("b", {}, dot, method));
    }
    for (const line of [name, ...record.v[i].split("\n")]) if (line) tip.append(element("span", {}, line));
    ring.setAttribute("cx", record.x[i]);
    ring.setAttribute("cy", record.y[i]);
    svg.append(ring);
    tip.hidden = false;
    const place = svg.getBoundingClientRect(), scale = place.width / box.width;
    const x = place.left + record.x[i] * scale, y = place.top + record.y[i] * scale;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 12, document.documentElement.clientWidth - width - 6))}px`;
    tip.style.top = `${y - height - 12 > 4 ? y - height - 12 : y + 14}px`;
  };
  const nearest = (event) => {
    const place = svg.getBoundingClientRect(), scale = box.width / place.width;
    const x = (event.clientX - place.left) * scale, y = (event.clientY - place.top) * scale;
    let best = -1, least = (16 * scale) ** 2;
    for (let i = 0; i < record.x.length; i++) {
      const away = (record.x[i] - x) ** 2 + (record.y[i] - y) ** 2;
      if (away < least && seen(i)) { best = i; least = away; }
    }
    return best;
  };
  const point = (event) => {
    const i = nearest(event);
    if (i < 0) hide(); else if (i !== at) show(i);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && document.activeElement !== svg) hide(); });
  svg.addEventListener("blur", hide);
  svg.tabIndex = 0;
  svg.setAttribute("aria-description", `${record.x.length} named points: arrow keys go through them`);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") { hide(); return; }
    if (!(event.key in moves)) return;
    event.preventDefault();
    const shown = record.x.map((_, i) => i).filter(seen);
    if (!shown.length) return;
    const next = (at < 0 ? (moves[event.key] > 0 ? -1 : shown.length) : shown.indexOf(at)) + moves[event.key];
    show(shown[Math.max(0, Math.min(shown.length - 1, next))]);
  });
};

// ---- downloads: as the figure is seen, on light ground
const onPaper = (svg, ground) => {
  const probe = element("i", { class: "on-paper", hidden: "" });
  document.body.append(probe);
  const style = getComputedStyle(probe);
  const plain = (text) => text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim()).replace(/currentcolor/gi, style.color);
  const copy = svg.cloneNode(true);
  for (const gone of copy.querySelectorAll(".ring, .off")) gone.remove();
  for (const one of [copy, ...copy.querySelectorAll("*")]) {
    for (const key of ["style", "fill", "stroke"]) {
      if (one.hasAttribute(key)) one.setAttribute(key, plain(one.getAttribute(key)));
    }
  }
  const { width, height } = svg.viewBox.baseVal;
  const shape = { xmlns: SVG, width, height, color: style.color, "stroke-linejoin": "round" };
  for (const [key, value] of Object.entries(shape)) copy.setAttribute(key, value);
  for (const key of ["tabindex", "aria-description"]) copy.removeAttribute(key);
  if (ground) copy.prepend(drawnElement("rect", { width, height, fill: style.getPropertyValue("--paper").trim() }));
  probe.remove();
  return new XMLSerializer().serializeToString(copy);
};
const savePng = (name, svg) => {
  const picture = new Image(), sharp = 3;
  const { width, height } = svg.viewBox.baseVal;
  picture.onload = () => {
    const canvas = element("canvas", { width: Math.round(width * sharp), height: Math.round(height * sharp) });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(`${name}.png`, blob), "image/png");
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(onPaper(svg, true))}`;
};
const figureCsv = (columns) => {
  const fields = columns.map(([, texts, values]) => values.map((v) => (texts ? neutral(data.texts[v]) : v === null ? "" : String(v))));
  const rows = (fields[0] ?? []).map((_, r) => fields.map((column) => column[r]));
  return csvLines([columns.map(([name]) => neutral(name)), ...rows]);
};
const startTools = (figure, svg, record) => {
  const name = figure.dataset.name, title = data.texts[record.title];
  const part = record.rows ? `, the first ${record.columns[0][2].length} of ${record.rows} rows` : "";
  figure.append(element("div", { class: "tools" },
    button("SVG", `Download the figure ${title} as SVG`, () => download(`${name}.svg`, "image/svg+xml", onPaper(svg, false))),
    button("PNG", `Download the figure ${title} as PNG`, () => savePng(name, svg)),
    button("CSV", `Download the numbers of ${title} as CSV${part}`, () => download(`${name}.csv`, "text/csv", "\ufeff", figureCsv(record.columns)))));
};

// ---- switches for methods
const SHAPES = {
  o: "M6 2a4 4 0 1 0 .01 0z", s: "M2.5 2.5h7v7h-7z", "^": "M6 1.8 10.2 9.6H1.8z", D: "M6 1.2 10.8 6 6 10.8 1.2 6z",
  v: "M6 10.2 1.8 2.4h8.4z", P: "M4.4 1.6h3.2v2.8h2.8v3.2H7.6v2.8H4.4V7.6H1.6V4.4h2.8z",
};
const startSwitches = () => {
  const parts = new Map();
  for (const part of document.querySelectorAll("figure [data-method]")) {
    const method = part.dataset.method;
    if (Object.hasOwn(data.methods, method)) parts.set(method, [...(parts.get(method) ?? []), part]);
  }
  const methods = Object.keys(data.methods).filter((method) => parts.has(method));
  if (methods.length < 2) return;
  const switches = new Map();
  const turn = (method, on) => {
    if (on) off.delete(method); else off.add(method);
    switches.get(method).setAttribute("aria-pressed", String(on));
    for (const part of parts.get(method)) part.classList.toggle("off", !on);
    count();
  };
  const summary = element("summary");
  const count = () => { summary.textContent = off.size ? `Methods: ${methods.length - off.size} of ${methods.length}` : "Methods"; };
  const panel = element("div", { role: "group", "aria-label": "Methods in the figures" });
  for (const method of methods) {
    const glyph = drawnElement("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" });
    glyph.append(drawnElement("path", { d: SHAPES[data.methods[method][1]] ?? SHAPES.o, style: `fill:${colorOf(method)}` }));
    const made = element("button", { type: "button", "aria-pressed": "true" }, glyph, method);
    made.addEventListener("click", () => turn(method, off.has(method)));
    switches.set(method, made);
    panel.append(made);
  }
  const all = element("button", { type: "button", class: "all" }, "Show all");
  all.addEventListener("click", () => methods.forEach((method) => turn(method, true)));
  panel.append(all);
  count();
  document.querySelector("nav > div").append(element("details", { class: "methods" }, summary, panel));
};

// ---- cards
const shownNumber = (v) => (v === null || v === undefined ? "n/a" : Number(v).toLocaleString("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 }).replace("-", "−"));
const cell = (tag, text, kind = "") => element(tag, { ...(kind && { class: kind }), ...(tag === "th" && { scope: "col" }) }, text);
const grid = (heads, rows) => {
  const body = element("tbody");
  for (const row of rows) body.append(element("tr", {}, ...row));
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((h, i) => cell("th", h, i ? "num" : "")))), body));
};
const named = (method) => {
  const dot = element("i", { class: "dot" });
  dot.style.background = colorOf(method) || "transparent";
  const head = element("th", { scope: "row" }, dot, method);
  return head;
};
const goodness = (value, direction) => (value === null || direction === "none" ? -Infinity : direction === "lower" ? -value : direction === "one" ? -Math.abs(value - 1) : value);
const scoreGrid = (card, i) => {
  const value = (m, k) => card.scores[m][k][i];
  const places = card.methods.map((_, k) => k);
  const ranked = (k) => (card.ceilings.includes(card.methods[k]) ? -Infinity : goodness(value(0, k), card.metrics[0][1]));
  places.sort((a, b) => (ranked(b) > ranked(a) ? 1 : ranked(b) < ranked(a) ? -1 : a - b));
  const competing = places.filter((k) => !card.ceilings.includes(card.methods[k]));
  const best = card.metrics.map(([, direction], m) => Math.max(...competing.map((k) => goodness(value(m, k), direction))));
  const rows = places.map((k) => [named(card.methods[k]), ...card.metrics.map(([, direction], m) => {
    const v = value(m, k), top = competing.includes(k) && competing.length > 1 && best[m] > -Infinity && goodness(v, direction) === best[m];
    return cell("td", shownNumber(v), v === null ? "num na" : top ? "num best" : "num");
  })]);
  return grid(["Method", ...card.metrics.map(([heading]) => heading)], rows);
};
const geneGrid = (card, [count, genes, ...folds]) => {
  const most = Math.max(...folds.flat().map((f) => Math.abs(Number(f ?? 0))).filter(Number.isFinite), 1e-9);
  const bar = (v) => {
    const made = element("td", { class: "num" });
    if (v !== null) {
      const part = element("i", { class: v >= 0 ? "up" : "down" });
      part.style.width = `${Math.min(50, (50 * Math.abs(Number(v))) / most)}%`;
      made.append(element("span", { class: "bar" }, part));
    }
    made.append(shownNumber(v));
    return made;
  };
  const who = ["real", card.ours, card.other].slice(0, folds.length);
  return [
    element("h3", {}, `Strongest of ${count.toLocaleString("en")} changed genes`),
    grid(["Gene", ...who.map((w) => `log₂ fold change, ${w}`)], genes.map((g, r) => [element("th", { scope: "row" }, card.names[g]), ...folds.map((f) => bar(f[r]))])),
  ];
};
const dialog = element("dialog", { class: "card", "aria-labelledby": "card-title" });
const openCard = (card, i) => {
  const [cellType, batch, perturbation] = card.labels[i];
  const close = element("button", { type: "button", class: "close" }, "Close");
  close.addEventListener("click", () => dialog.close());
  const where = [cellType, batch].filter(Boolean).join(" · ");
  const counts = [[card.cells[i], "real cells"], [card.predicted[i], "predicted"]].filter(([n]) => n !== null).map(([n, what]) => `${n.toLocaleString("en")} ${what}`);
  dialog.replaceChildren(
    element("header", {}, element("h2", { id: "card-title" }, perturbation), close),
    element("p", { class: "facts" }, [where, counts.join(", ")].filter(Boolean).join(" · ")),
    scoreGrid(card, i));
  const genes = Object.hasOwn(card.genes, perturbation) ? card.genes[perturbation] : null;
  if (genes) dialog.append(...geneGrid(card, genes));
  else dialog.append(element("p", { class: "note" }, "No gene that is truly changed is known here."));
  if (Object.hasOwn(card.pictures, i)) {
    const link = element("a", { href: `#${card.pictures[i]}` }, "See its cells");
    link.addEventListener("click", () => dialog.close());
    dialog.append(element("p", {}, link));
  }
  dialog.showModal();
};
/** Make the name of a row of the table of perturbations a button that opens its card. */
function openable(box, row, rows) {
  const card = data.cards[box.dataset.name];
  const head = row.cells[0];
  if (!card || head.querySelector("button")) return;
  const opener = element("button", { type: "button", class: "name", "aria-haspopup": "dialog" });
  opener.append(...head.childNodes);
  head.append(opener);
  opener.addEventListener("click", () => openCard(card, rows.indexOf(row)));
}

document.body.append(tip, dialog);
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
const openers = [...document.querySelectorAll(".table")].map(startTable);
const start = (record) => {
  data = record;
  for (const open of openers) open();
  for (const figure of document.querySelectorAll("figure[data-name]")) {
    const svg = figure.querySelector(":scope > svg"), record = data.figures[figure.dataset.name];
    if (!svg || !record) continue;
    startNames(figure, svg, record);
    startTools(figure, svg, record);
  }
  startSwitches();
  document.documentElement.dataset.figures = "ready";
};
// a browser without it shows the page as one without scripts does
if ("DecompressionStream" in window) unpack(document.getElementById("page-data").textContent).then(start);
