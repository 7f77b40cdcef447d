"""The site needs nothing from outside, its links lead to places that are there, and one can find things in it."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import notebooks
import pytest
from browser_checks import CONTRAST

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}
OUTSIDE = re.compile(r"^(https?:)?//")
MOST_BYTES = 12 * 1024
"""Of a page that users read: what is longer is split."""


@dataclass
class Page(HTMLParser):
    """What a page loads, where it links to, and the anchors in it."""

    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self):
        super().__init__()

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if target := given.get(LOADED.get(tag, "")):
            self.loads.append(target)


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        found[path] = Page()
        found[path].feed(path.read_text())
    return found


def test_nothing_is_loaded_from_outside(site, pages):
    assert len(pages) > 30
    outside = {
        str(path.relative_to(site)): [x for x in page.loads if OUTSIDE.match(x)]
        for path, page in pages.items()
    }
    assert {path: found for path, found in outside.items() if found} == {}
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", path.read_text()) == [], path


def test_what_pages_load_and_link_to_is_there(site, pages):
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are from the root of a server
        for link in [*page.loads, *page.links]:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", link) or OUTSIDE.match(link):
                continue
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            there = file.is_file() and (not anchor or file not in pages or anchor in pages[file].anchors)
            if not there:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.parametrize("source", notebooks.sources(), ids=lambda source: source.stem)
def test_the_site_shows_what_the_notebook_drew(site, source):
    page = (site / "tutorials" / f"{source.stem}.html").read_text()
    kept = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    drawn = sum(
        any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
        for cell in kept.cells
    )
    assert len(re.findall(r'<img[^>]* alt="[^"]{30,}"[^>]* src="data:image/png', page)) == drawn
    assert '.ipynb"' not in page.partition("<article")[2].partition("</article>")[0]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_is_short_enough_to_read(page):
    assert len(page.read_bytes()) <= MOST_BYTES, "split it by what its readers want"


def test_the_readme_fits_two_screens():
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) < 6_000
    assert len(text.splitlines()) <= 90


def test_search_works_from_the_folder_and_asks_for_nothing_else(site, browser):
    page = browser.new_page()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("energy distance")
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    assert "energy distance" in page.locator(".md-search-result__list").inner_text().lower()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert said == []
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(site, browser, width):
    page = browser.new_page(viewport={"width": width, "height": 844})
    wide = []
    for path in sorted(site.glob("*.html")):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wide.append(path.name)
    page.close()
    assert wide == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(site, browser, scheme):
    page = browser.new_page(color_scheme=scheme)
    for name in ("index.html", "results.html", "splits.html"):
        page.goto((site / name).as_uri())
        faint = set(page.evaluate(CONTRAST)) - {"A.headerlink"}  # a sign that appears beside a heading
        assert faint == set(), name
    page.close()
