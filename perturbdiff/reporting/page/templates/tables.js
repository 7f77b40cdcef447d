// Tables: sort, search, download. A long one holds only the rows that were scrolled to. The page is complete without it.
const AT_ONCE = 60, LONG = 120;

const fieldOf = (row, column) => {
  const cell = row.cells[column];
  const raw = cell.dataset.v ?? cell.textContent.trim();
  if (raw === "" || raw === "n/a" || raw === "nan") return null;
  const number = Number(raw.replace(/,/g, "").replace("−", "-"));
  return Number.isNaN(number) ? raw : number;
};
const inOrder = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
};
const wordsOf = (cell) => (cell.querySelector(".t") ?? cell).textContent.trim();

// as perturbdiff.runtime.tabular: no spreadsheet is to take a text for a formula
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const neutral = (text) => (/^'*[=+\-@\t\r\n]/.test(text) && !NUMBER.test(text) ? `'${text}` : text);
const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
const csvLines = (lines) => lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";

const save = (name, blob) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
const download = (name, type, ...parts) => save(name, new Blob(parts, { type: `${type};charset=utf-8` }));
const button = (text, label, act) => {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "save";
  made.textContent = text;
  made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
};

const tableCsv = (table, rows) => {
  const lines = rows.map(() => []);
  const heads = [];
  [...table.tHead.rows[0].cells].forEach((head, i) => {
    const name = head.textContent.replace(/[↑↓]|→ 1/g, "").replace(/\s+/g, " ").trim();
    const cells = rows.map((row) => row.cells[i]);
    const put = (title, fields) => { heads.push(title); fields.forEach((f, r) => lines[r].push(f)); };
    put(name, cells.map((c) => (c.dataset.v === undefined ? wordsOf(c) : c.dataset.v)));
    if (cells.some((c) => c.dataset.v !== undefined && i && Number.isNaN(Number(wordsOf(c).replace(/[−,%\s]/g, ""))) && !["", "n/a"].includes(wordsOf(c)))) {
      put(`${name}, in words`, cells.map(wordsOf));
    }
    if (cells.some((c) => c.dataset.low !== undefined)) {
      put(`${name} low`, cells.map((c) => c.dataset.low ?? ""));
      put(`${name} high`, cells.map((c) => c.dataset.high ?? ""));
    }
    if (cells.some((c) => c.querySelector(".count"))) {
      put(`${name} defined`, cells.map((c) => c.querySelector(".count")?.textContent ?? ""));
    }
  });
  return csvLines([heads, ...lines].map((line) => line.map(neutral)));
};

/** Give a table its sorting, its download and, if it is long, rows on demand and a search. Return what opens its cards. */
const startTable = (box) => {
  const table = box.querySelector("table");
  const first = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  const scroll = box.querySelector(".scroll");
  const searched = box.classList.contains("perturbations");
  const texts = new Map();
  let sorted = first, listed = first, there = 0, status = null;
  const step = first.length > LONG ? AT_ONCE : first.length;
  const more = () => {
    const next = listed.slice(there, there + step);
    for (const row of next) openable(box, row, first);
    table.tBodies[0].append(...next);
    there += next.length;
  };
  const list = (query = "") => {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => {
      if (!texts.has(row)) texts.set(row, [...row.cells].filter((c) => !c.classList.contains("num")).map(wordsOf).join(" ").toLowerCase());
      return texts.get(row);
    };
    listed = words.length ? sorted.filter((row) => words.every((word) => text(row).includes(word))) : sorted;
    table.tBodies[0].replaceChildren();
    there = 0;
    more();
    scroll.scrollTop = 0;
    if (status) status.textContent = listed.length < first.length ? `${listed.length.toLocaleString("en")} of ${first.length.toLocaleString("en")} rows` : `${first.length.toLocaleString("en")} rows`;
  };
  scroll.addEventListener("scroll", () => {
    if (there < listed.length && scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 400) more();
  });
  let field = null;
  if (searched) {
    field = document.createElement("input");
    field.type = "search";
    field.placeholder = "Search";
    field.setAttribute("aria-label", "Search the rows of this table");
    status = document.createElement("span");
    status.setAttribute("role", "status");
    const bar = document.createElement("p");
    bar.className = "search";
    bar.append(field, status);
    box.prepend(bar);
    field.addEventListener("input", () => list(field.value));
  }
  if (searched || first.length > LONG) list();
  if (first.length > 1) {
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const sorter = document.createElement("button");
      sorter.type = "button";
      sorter.append(...head.childNodes);
      head.append(sorter);
      sorter.addEventListener("click", () => {
        const turns = { none: "ascending", ascending: "descending", descending: "none" };
        const direction = turns[head.getAttribute("aria-sort") ?? "none"];
        for (const other of heads) other.removeAttribute("aria-sort");
        if (direction !== "none") head.setAttribute("aria-sort", direction);
        const sign = direction === "ascending" ? 1 : -1;
        const keyed = first.map((row) => [row, fieldOf(row, column)]);
        if (direction !== "none") {
          keyed.sort(([, a], [, b]) => (a === null || b === null ? (a === null) - (b === null) : sign * inOrder(a, b)));
        }
        sorted = keyed.map(([row]) => row);
        list(field?.value);
      });
    });
  }
  const name = box.dataset.name;
  box.append(button("CSV", `Download the table ${name} as CSV`, () => download(`${name}.csv`, "text/csv", "\ufeff", tableCsv(table, listed))));
  return () => { for (const row of listed.slice(0, there)) openable(box, row, first); };
};
