"""Figures and the table of perturbations as a reader uses them: names of points, switches, downloads, search, cards."""

import csv
import io
import xml.etree.ElementTree as ET

import pandas as pd
import pytest
from browser_checks import CONTRAST
from PIL import Image
from report_runs import make_run

from perturbdiff.reporting.page.page import write_report

ODD = '=<b>&"x"</script>'
METHODS = ("perturbdiff", "linear", "nearest-context", "control", "ceiling")
CENTRE = """
async (figure, method) => {
  const bytes = Uint8Array.from(atob(document.getElementById('page-data').textContent), (c) => c.charCodeAt(0));
  const data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).json();
  const record = data.figures[figure], svg = document.querySelector(`#fig-${figure} > svg`);
  svg.scrollIntoView({block: 'center', behavior: 'instant'});
  const i = method === null ? 0 : record.m.findIndex((code) => data.texts[code] === method);
  const place = svg.getBoundingClientRect(), scale = place.width / svg.viewBox.baseVal.width;
  return {x: place.left + record.x[i] * scale, y: place.top + record.y[i] * scale,
          name: data.texts[record.n[i]], method: data.texts[record.m[i]], value: record.v[i], points: record.x.length};
}
"""


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    """A page of five methods and 90 perturbations in two cell types, of which one has a hostile name."""
    folder = tmp_path_factory.mktemp("synthetic")
    names = (ODD, *(f"drug {i}" for i in range(1, 90)))
    runs = [make_run(folder / m, m, names=names, cells=4) for m in METHODS]
    for run in runs:  # what evaluate says of conditions
        metrics = pd.read_parquet(run / "metrics.parquet")
        rows = metrics[(metrics["scope_kind"] == "condition") & (metrics["metric"] == "energy_distance")]
        keys = rows["scope"].str.split("|", expand=True)
        table = pd.DataFrame({"cell_type": keys[0], "batch": keys[1], "perturbation": rows["perturbation"]})
        cells = pd.read_parquet(run / "embedding.parquet")
        cells["condition"] = cells["condition"].str.replace("CD4 T cell", "B cell")
        cells.to_parquet(run / "embedding.parquet")
        means = pd.read_csv(run / "aggregate.csv")
        ends = {"low": means["nanmean"] - 0.02, "high": means["nanmean"] + 0.02}
        means.assign(**ends).to_csv(run / "aggregate.csv", index=False)
        table.assign(n_cells=range(20, 20 + len(rows)), n_predicted=50).to_csv(
            run / "conditions.csv", index=False
        )
    return write_report(runs, folder / "report.html", title="Synthetic")


def opened(open_page, width=1280, **settings):
    found = open_page(width, **settings)
    found.page.wait_for_selector("html[data-figures=ready]")
    found.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    return found


def at(page, figure, method=None):
    return page.evaluate(f"([f, m]) => ({CENTRE})(f, m)", [figure, method])


def test_pointing_names_a_point_and_leaving_forgets_it(open_page):
    found = opened(open_page)
    page = found.page
    for figure, method in (("d1-forest", "linear"), ("d1-energy", "control"), ("d1-pdcorr-duel", None)):
        place = at(page, figure, method)
        page.mouse.move(place["x"], place["y"])
        tip = page.locator(".tip")
        assert tip.is_visible()
        words = tip.inner_text()
        assert place["points"] >= 3
        if figure == "d1-forest":
            assert "linear" in words
            assert "(" in words  # the interval
        else:
            assert " · " in words  # perturbation, cell type, batch
        box = tip.bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= 1280 - box["width"]
        page.mouse.move(2, 2)
        assert not tip.is_visible()
    assert found.console == []


def test_arrow_keys_go_through_the_points(open_page):
    page = opened(open_page).page
    figure = page.locator("#fig-d1-forest > svg")
    figure.focus()
    page.keyboard.press("ArrowRight")
    first = page.locator(".tip").inner_text()
    page.keyboard.press("ArrowRight")
    second = page.locator(".tip").inner_text()
    assert first
    assert first != second
    page.keyboard.press("Home")
    assert page.locator(".tip").inner_text() == first
    page.keyboard.press("Escape")
    assert not page.locator(".tip").is_visible()


def test_a_touch_names_a_point_on_a_phone(open_page):
    page = opened(open_page, 390, has_touch=True).page
    place = at(page, "d1-forest", "linear")
    page.touchscreen.tap(place["x"], place["y"])
    assert "linear" in page.locator(".tip").inner_text()
    box = page.locator(".tip").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


def test_a_method_is_switched_off_in_all_figures_at_once(open_page):
    page = opened(open_page).page
    count = "m => [...document.querySelectorAll('figure [data-method]')].filter(e => e.dataset.method === m && e.getClientRects().length).map(e => e.closest('figure').id)"  # noqa: E501
    before = page.evaluate(count, "linear")
    assert len(set(before)) >= 4
    others = len(page.evaluate(count, "control"))
    place = at(page, "d1-forest", "linear")
    one = page.locator(".methods button", has_text="linear")
    assert one.get_attribute("aria-pressed") == "true"
    one.focus()
    page.keyboard.press("Enter")
    assert one.get_attribute("aria-pressed") == "false"
    assert page.evaluate(count, "linear") == []
    assert len(page.evaluate(count, "control")) == others
    page.mouse.move(place["x"], place["y"])
    assert "linear" not in page.locator(".tip").text_content()
    page.locator(".methods .all").click()
    assert page.evaluate(count, "linear") == before


def downloaded(page, figure, kind):
    with page.expect_download() as waited:
        page.locator(f"#fig-{figure} .tools button", has_text=kind).click()
    assert waited.value.suggested_filename == f"{figure}.{kind.lower()}"
    return waited.value.path().read_bytes()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_figure_downloads_as_vector_and_as_image_on_light_ground(open_page, scheme):
    page = opened(open_page, accept_downloads=True, color_scheme=scheme).page
    text = downloaded(page, "d1-forest", "SVG").decode()
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    assert "var(" not in text
    assert "currentcolor" not in text.lower()
    assert "#d55e00" in text.lower()
    image = Image.open(io.BytesIO(downloaded(page, "d1-forest", "PNG"))).convert("RGB")
    assert image.width > 900
    assert image.getpixel((2, 2)) == (253, 253, 252)
    assert len(image.getcolors(1 << 24) or []) > 20


def test_a_figure_downloads_the_numbers_that_it_draws(open_page, report_file):
    page = opened(open_page, accept_downloads=True).page
    for figure in ("d1-forest", "d1-energy", "d1-pdcorr-duel", "d1-separation"):
        text = downloaded(page, figure, "CSV").decode("utf-8-sig")
        beside = report_file.parent / "report_figures" / f"{figure}.csv"
        mine, theirs = pd.read_csv(io.StringIO(text)), pd.read_csv(beside)
        assert list(mine) == list(theirs)
        pd.testing.assert_frame_equal(mine, theirs, rtol=1e-6, check_dtype=False)
    rows = list(csv.reader(io.StringIO(downloaded(page, "d1-energy", "CSV").decode("utf-8-sig"))))
    assert f"'{ODD}" in {field for row in rows for field in row}  # no formula for a spreadsheet


def rows_of(page):
    return page.locator(".perturbations tbody tr")


def test_the_table_of_perturbations_sorts_searches_and_grows(open_page):
    page = opened(open_page).page
    assert rows_of(page).count() == 60  # of 180
    page.locator(".perturbations .scroll").evaluate("e => { e.scrollTop = e.scrollHeight; }")
    rows_of(page).nth(60).wait_for()
    head = page.locator(".perturbations thead th", has_text="cells").last
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    cells = (
        "es => es.slice(0, 5).map(e => Number([...e.cells].find(c => c.classList.contains('num')).dataset.v))"
    )
    assert rows_of(page).evaluate_all(cells) == [20, 21, 22, 23, 24]
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert rows_of(page).evaluate_all(cells) == [199, 198, 197, 196, 195]
    field = page.locator(".perturbations input[type=search]")
    field.fill("drug 7 monocyte")
    assert rows_of(page).count() == 18  # 7, 17, …, 87 and 70 to 79
    assert "of 180" in page.locator(".perturbations .search [role=status]").inner_text()
    field.fill("no such thing")
    assert rows_of(page).count() == 0
    field.fill("")
    assert rows_of(page).count() == 60


def test_a_row_opens_a_card_with_scores_and_genes(open_page):
    found = opened(open_page)
    page = found.page
    page.locator(".perturbations input[type=search]").fill(f"{ODD[:5]} B cell")
    opener = rows_of(page).first.locator("button.name")
    opener.focus()
    page.keyboard.press("Enter")
    card = page.locator("dialog.card")
    assert card.is_visible()
    assert card.locator("h2").inner_text() == ODD
    methods = card.locator("table").first.locator("tbody th").all_inner_texts()
    assert sorted(methods) == sorted(METHODS)
    assert methods[-1] == "ceiling"
    assert "real cells" in card.inner_text()
    genes = card.locator("table").nth(1)
    assert genes.locator("tbody tr").count() >= 3
    assert genes.locator("thead th").all_inner_texts() == [
        "Gene", "log₂ fold change, real", "log₂ fold change, perturbdiff", "log₂ fold change, nearest-context",
    ]  # fmt: skip
    link = card.locator("a")
    assert link.count() == 1  # this condition is pictured
    page.keyboard.press("Escape")
    assert not card.is_visible()
    assert opener.evaluate("e => e === document.activeElement")
    opener.click()
    link.click()
    assert not card.is_visible()
    assert page.evaluate("location.hash").startswith("#fig-d1-cells")
    assert found.console == []


def test_the_table_downloads_all_rows_without_formulas(open_page):
    page = opened(open_page, accept_downloads=True).page
    with page.expect_download() as waited:
        page.locator(".perturbations button.save").click()
    text = waited.value.path().read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 180
    assert f"'{ODD}" in {row["Perturbation"] for row in rows}


def test_without_scripts_points_have_titles_and_the_table_is_whole(open_page):
    page = open_page(java_script_enabled=False).page
    titles = page.locator("#fig-d1-forest svg .named title").all_text_contents()
    assert any("linear" in title and "(" in title for title in titles)
    assert rows_of(page).count() == 180
    assert page.locator("dialog, .methods, .tools").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_figures_add_fits_a_phone_and_is_legible(open_page, scheme):
    page = opened(open_page, 390, color_scheme=scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CONTRAST) == []
    rows_of(page).first.locator("button.name").click()
    assert page.locator("dialog.card").evaluate("e => e.scrollWidth <= e.clientWidth + 1")
