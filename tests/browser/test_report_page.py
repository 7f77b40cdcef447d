"""The report as a reader meets it: in Chromium, on a desk and on a phone, with scripts and without, on paper."""

import csv
import io
import itertools
import re

import pytest
from browser_checks import CLICK_THROUGH, CONTRAST, OVERFLOWING, SHOW_ALL, assert_sorted

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
    page.evaluate(SHOW_ALL)
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


def test_the_first_screen_answers(open_page, keep_screenshot):
    page = open_page(1400, height=900).page
    assert page.locator(".verdict .says").inner_text()
    heads = page.locator(".verdict dt").all_inner_texts()
    assert heads == ["Better than a baseline?", "Near a replicate?", "Can this data set tell?"]
    heads = page.locator(".key thead th").all_inner_texts()
    assert heads == ["Metric", "ours", "Best baseline", "Difference", "Chance", "Chance → ceiling", "Ceiling"]
    assert page.locator(".key tbody tr").count() >= 6
    assert page.locator(".key svg.scale").count() >= 3
    assert page.locator(".verdict .care a").inner_text()
    assert page.locator(".warning li").count() >= 1
    for part in (".verdict", ".cells figure:visible", ".against", ".key"):
        box = page.locator(part).first.bounding_box()
        assert box is not None, part
        assert box["y"] + box["height"] <= 900, f"{part} is in sight"
    keep_screenshot(page, "desk-light")


def test_the_page_is_short_while_it_is_folded(open_page):
    page = open_page(1400, height=900).page
    assert page.evaluate("document.documentElement.scrollHeight") <= 8 * 900
    folded = ("radars", "training", "data", "metrics", "provenance")
    closed = page.evaluate("[...document.querySelectorAll('details:not([open])')].map(d => d.id)")
    assert all(any(name.endswith(what) for name in closed) for what in folded)


@pytest.mark.parametrize("scripts", [True, False])
def test_one_perturbation_is_chosen_for_the_picture_of_cells(open_page, scripts):
    page = open_page(1400, java_script_enabled=scripts).page
    choices = page.locator(".cells input")
    assert choices.count() >= 4
    first = page.locator(".cells figure:visible")
    assert first.count() == 1
    before = first.get_attribute("id")
    choices.first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".cells figure:visible").count() == 1
    assert page.locator(".cells figure:visible").get_attribute("id") != before
    page.locator(".cells label").last.click()
    assert page.locator(".cells figure").last.is_visible()


def test_the_summary_is_copied_as_text(open_page):
    page = open_page(permissions=["clipboard-read", "clipboard-write"]).page
    page.get_by_role("button", name="Copy summary").click()
    page.get_by_role("button", name="Copied").wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text == page.evaluate("document.querySelector('#as-text pre').textContent")
    assert text.startswith("ours on screen: ")
    for word in (
        "Better than a baseline? ",
        "Near a replicate? ",
        "Can this data set tell? ",
        "Energy distance ↓",
        "best baseline",
    ):
        assert word in text


def test_the_theme_can_be_switched(open_page):
    page = open_page(color_scheme="light").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.get_by_role("button", name=re.compile("Theme"))
    button.click()
    assert page.evaluate(ground) == light
    button.click()
    assert "dark" in button.inner_text()
    dark = page.evaluate(ground)
    assert dark != light
    assert page.evaluate(CONTRAST) == []
    page.reload()
    assert page.evaluate(ground) == dark


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
def test_a_phone_scrolls_tables_but_not_the_page(open_page, scheme, keep_screenshot):
    page = open_page(390, color_scheme=scheme).page
    keep_screenshot(page, f"phone-{scheme}", full=True)
    page.evaluate(SHOW_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(OVERFLOWING) == []
    inner = page.locator(".scores .scroll").first
    assert inner.evaluate("e => e.scrollWidth > e.clientWidth")


def test_without_scripts_everything_is_there(open_page, figures, keep_screenshot):
    opened = open_page(1400, java_script_enabled=False)
    page = opened.page
    keep_screenshot(page, "no-scripts", full=True)
    assert page.locator("figure").count() == len(figures)
    assert page.locator("thead button").count() == 0
    assert page.locator("button").count() == 0
    assert page.locator(".verdict .says").inner_text()
    summary = page.locator("main details summary").first
    summary.click()
    assert page.locator("main details").first.get_attribute("open") is not None
    assert opened.console == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light_are_legible(open_page, scheme, keep_screenshot):
    page = open_page(1400, color_scheme=scheme).page
    keep_screenshot(page, f"desk-{scheme}-whole", full=True)
    page.evaluate(SHOW_ALL)
    assert page.evaluate(CONTRAST) == []


def test_every_control_is_reached_by_keyboard_and_shows_it(open_page):
    page = open_page(1400).page
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        where, outlined = page.evaluate(
            """(() => {
              const e = document.activeElement, mark = e.type === 'radio' ? e.nextElementSibling : e;
              return [`${e.tagName}.${e.type ?? ''}`, getComputedStyle(mark).outlineStyle !== 'none'];
            })()"""
        )
        assert outlined, where
        seen.add(where)
    assert seen >= {"A.", "BUTTON.button", "INPUT.radio"}
    skip = open_page(1400).page
    skip.keyboard.press("Tab")
    skip.keyboard.press("Enter")
    assert skip.evaluate("location.hash") == "#main"


def test_it_prints_on_four_pages(open_page, screenshots):
    page = open_page(1400, color_scheme="dark").page
    paper = page.pdf(path=screenshots / "report.pdf", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) <= 4
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert page.locator(".key").is_visible()
    assert page.locator(".cells figure:visible").count() == 1


def test_on_paper_only_what_is_short_is_unfolded(open_page):
    page = open_page().page
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#runs").get_attribute("open") is not None
    assert page.locator("#provenance").get_attribute("open") is None
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("#runs").get_attribute("open") is None
