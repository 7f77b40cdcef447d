"""The report as a reader meets it: in Chromium, on a desk and on a phone, with scripts and without."""

import csv
import io
import itertools

import pytest
from browser_checks import CLICK_THROUGH, CONTRAST, assert_sorted

SORTABLE = "table:has(thead button)"


def rows_of(table) -> list[list[dict]]:
    """Fields of a table from top to bottom: what they are sorted by, and their text."""
    return table.evaluate(
        "t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => ({v: c.dataset.v, text: c.textContent.trim()})))"
    )


def test_nothing_is_asked_for_but_the_file_and_nothing_complains(open_page, report_file):
    opened = open_page()
    opened.page.wait_for_load_state("networkidle")
    assert opened.requests == [report_file.as_uri()]
    assert opened.console == []
    assert opened.page.title() == "A small screen"
    assert report_file.stat().st_size < 10_000_000


def test_every_figure_is_there_and_holds_something(open_page, figures):
    page = open_page().page
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    shown = page.evaluate(
        """[...document.querySelectorAll('figure')].map(f => {
          const svg = f.querySelector('svg'), box = svg.getBoundingClientRect();
          const marks = svg.querySelectorAll('path, use, image, rect, text').length;
          return [f.id.slice(4), box.width > 100 && box.height > 50 && marks > 10 && !!svg.getAttribute('aria-label')];
        })"""
    )
    assert sorted(name for name, _ in shown) == figures
    assert [name for name, good in shown if not good] == []
    assert len(figures) > 12


def test_the_first_screen_answers(open_page):
    page = open_page().page
    verdict = page.locator(".verdict .says")
    assert verdict.inner_text()
    box = verdict.bounding_box()
    assert box is not None
    assert box["y"] < 400
    heads = page.locator(".key thead th").all_inner_texts()
    assert heads == ["Metric", "ours", "Best baseline", "Difference", "Chance → ceiling", "Chance", "Ceiling"]
    assert page.locator(".key tbody tr").count() >= 6
    assert page.locator(".key svg.scale").count() >= 3
    assert page.locator("nav").is_visible()
    assert page.locator(".verdict .care a").inner_text()
    assert page.locator(".warning li").count() >= 1


def test_links_lead_somewhere_and_ids_are_unique(open_page):
    page = open_page().page
    lost = page.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.hash.slice(1)).filter(h => !document.getElementById(h))"  # noqa: E501
    )
    assert lost == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_table_sorts_both_ways_and_back(open_page):
    page = open_page().page
    columns = page.evaluate(CLICK_THROUGH)
    assert len(columns) > 40
    for column in columns:
        (up, rising), (down, falling), (none, _) = column["turns"]
        assert (up, down, none) == ("ascending", "descending", None)
        assert_sorted(rising, falling=False)
        assert_sorted(falling, falling=True)
        assert column["restored"]
    button = page.locator(f".scores {SORTABLE} thead button").nth(1)
    button.click()
    first = page.locator(f".scores {SORTABLE}").first
    assert_sorted([row[1]["v"] for row in rows_of(first)], falling=False)


def test_sorting_by_keyboard(open_page):
    page = open_page().page
    head = page.locator(f".scores {SORTABLE}").first.locator("thead th").nth(1)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"


def test_a_table_downloads_as_csv_with_full_numbers_and_intervals(open_page):
    page = open_page(accept_downloads=True).page
    box = page.locator(".table.scores").first
    with page.expect_download() as waited:
        box.locator("button.save").click()
    download = waited.value
    assert download.suggested_filename == "scores-screen-pooled-pooled-populations-and-mean-expression.csv"
    text = download.path().read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [r["Method"] for r in rows] == ["ours", "mean-perturbation", "nearest-context", "ceiling"] or len(
        rows
    ) == 4
    for row in rows:
        assert float(row["PDCorr low"]) <= float(row["PDCorr"]) <= float(row["PDCorr high"])
        assert len(row["PDCorr"]) > 6
    assert rows_of(box.locator("table"))[0][0]["v"] == rows[0]["Method"]


def test_every_table_has_a_download_of_its_own_name(open_page):
    page = open_page().page
    assert page.locator(".table").count() == page.locator(".table button.save").count()
    names = page.evaluate("[...document.querySelectorAll('.table')].map(t => t.dataset.name)")
    assert len(names) == len(set(names))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_tables_but_not_the_page(open_page, scheme):
    page = open_page(390, color_scheme=scheme).page
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.evaluate(
        """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, pre, svg, nav')
          && e.getBoundingClientRect().right > 391).map(e => e.outerHTML.slice(0, 90))"""
    )
    assert wide == []
    inner = page.locator(".scores .scroll").first
    assert inner.evaluate("e => e.scrollWidth > e.clientWidth")


def test_without_scripts_everything_is_there(open_page, figures):
    opened = open_page(java_script_enabled=False)
    page = opened.page
    assert page.locator("figure").count() == len(figures)
    assert page.locator("thead button").count() == 0
    assert page.locator("button").count() == 0
    assert page.locator(".verdict .says").inner_text()
    summary = page.locator("main details summary").first
    summary.click()
    assert page.locator("main details").first.get_attribute("open") is not None
    assert opened.console == []


def test_dark_and_light_are_legible(open_page):
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme).page
        low = page.evaluate(CONTRAST)
        assert low == []


def test_on_paper_everything_is_open(open_page):
    page = open_page().page
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 0
