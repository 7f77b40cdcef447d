// Buttons of the page, folding, and printing. The page is complete without it.
const root = document.documentElement;
const addButton = (text, act) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => act(button));
  document.querySelector(".buttons").append(button);
  return button;
};
// light, dark, or as the machine has it
const THEMES = ["auto", "light", "dark"];
const remember = (theme) => {
  try { localStorage.setItem("perturbdiff-theme", theme); } catch { /* a page opened from a mail may not store anything */ }
};
const remembered = () => {
  try { return localStorage.getItem("perturbdiff-theme"); } catch { return null; }
};
const setTheme = (theme) => {
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
};
let theme = THEMES.includes(remembered()) ? remembered() : "auto";
setTheme(theme);
const summaryText = document.querySelector("#as-text pre");
addButton("Copy summary", async (button) => {
  const text = summaryText.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    document.querySelector("#as-text").open = true;
    getSelection().selectAllChildren(summaryText);
    button.textContent = document.execCommand("copy") ? "Copied" : "Select and copy below";
  }
  setTimeout(() => { button.textContent = "Copy summary"; }, 2500);
});
addButton(`Theme: ${theme}`, (button) => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  setTheme(theme);
  remember(theme);
  button.textContent = `Theme: ${theme}`;
});
// a link to something folded opens it, and so does a link to the picture of a perturbation's cells
const unfold = () => {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let e = target; e; e = e.parentElement) {
    if (e.tagName === "DETAILS") e.open = true;
    const cells = e.tagName === "FIGURE" && e.closest(".cells");
    if (cells) cells.querySelectorAll("input")[[...cells.querySelectorAll("figure")].indexOf(e)].checked = true;
  }
};
addEventListener("hashchange", unfold);
unfold();
// on paper what is short is open, and the page is light
let unfolded = [];
addEventListener("beforeprint", () => {
  setTheme("auto");
  unfolded = [...document.querySelectorAll("details.short:not([open])")];
  for (const d of unfolded) d.open = true;
});
addEventListener("afterprint", () => {
  setTheme(theme);
  for (const d of unfolded) d.open = false;
});
