"""What tests of pages do in a browser: scripts that sort every table and measure contrast."""

import math

CLICK_THROUGH = """
(() => {
  const read = (t, i) => [...t.tBodies[0].rows].map(r => r.cells[i].dataset.v ?? r.cells[i].textContent.trim());
  const all = (t) => [...t.tBodies[0].rows].map(r => r.textContent).join('|');
  const found = [];
  for (const table of document.querySelectorAll('table:has(thead button)')) {
    const before = all(table);
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      const button = head.querySelector('button');
      if (!button) return;
      const turns = [];
      for (let turn = 0; turn < 3; turn++) {
        button.click();
        turns.push([head.getAttribute('aria-sort'), read(table, i)]);
      }
      found.push({turns, restored: all(table) === before && !table.querySelector('[aria-sort]')});
    });
  }
  return found;
})()
"""

SHOW_ALL = """
(() => {
  for (const d of document.querySelectorAll('details')) d.open = true;
  for (const f of document.querySelectorAll('.cells figure')) f.style.display = 'block';
})()
"""

OVERFLOWING = """
[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, pre, svg, nav')
  && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 90))
"""

CONTRAST = """
(() => {
  const part = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => {
    const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(part);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(c)) return c;
    }
    return 'rgb(255, 255, 255)';
  };
  const seen = new Set();
  const text = 'main :is(p, td, th, li, small, a, dd, summary, figcaption, .t, .save), nav a, .facts';
  // the numbers of the matrix of wins stand on coloured squares of their own
  const drawn = 'figure:not([id$="-wins"]) svg text, .choice span, button, nav a, h1, h2, h3, h4, dt, dd, .says';
  const shown = (e) => e.getClientRects().length && e.textContent.trim();
  for (const e of [...document.querySelectorAll(`${text}, ${drawn}`)].filter(shown)) {
    const style = getComputedStyle(e);
    const ink = e.tagName === 'text' ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    const what = `${e.tagName}.${e.className.baseVal ?? e.className} ${ink}`;
    if ((a + 0.05) / (b + 0.05) < 4.5) seen.add(`${what} ${e.textContent.trim().slice(0, 30)}`);
  }
  return [...seen];
})()
"""


def assert_sorted(keys: list[str], *, falling: bool) -> None:
    """Check that a column is in order; undefined values stand last."""
    missing = [key in ("", "n/a") for key in keys]
    assert missing == sorted(missing), "undefined values stand last"
    numbers = [as_number(key) for key, none in zip(keys, missing, strict=True) if not none]
    if all(not math.isnan(n) for n in numbers):
        assert numbers == sorted(numbers, reverse=falling)


def as_number(text: str) -> float:
    try:
        return float(text.replace(",", "").replace("−", "-"))
    except ValueError:
        return math.nan
