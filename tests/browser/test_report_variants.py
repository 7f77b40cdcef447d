"""Pages of many methods, of one alone and of a failed run in Chromium: short, quiet, and whole on paper."""

import re
from pathlib import Path

import pandas as pd
import pytest
from browser_checks import CONTRAST, OVERFLOWING, SHOW_ALL
from report_runs import make_run

from perturbdiff.reporting.page.page import write_report

EXTERNAL = ("cellflow", "state", "cpa", "squidiff")
BASELINES = ("nearest-context", "linear", "mean-perturbation", "resample", "control")
SCREEN = 900


def run(folder: Path, method: str, **changes) -> Path:
    """Write the scores of a method, with intervals, made by itself, a tool or a built-in baseline."""
    made_by = {"baseline": method, "baseline_kind": "tool"} if method in EXTERNAL else {"baseline": method}
    kinds = {"perturbdiff": {"recipe": "x", "recipe_key": "k"}, "ceiling": {}}
    made = make_run(folder / method, method, made_by=kinds.get(method, made_by), cells=12, **changes)
    means = pd.read_csv(made / "aggregate.csv")
    means.assign(low=means["nanmean"] - 0.05, high=means["nanmean"] + 0.05).to_csv(
        made / "aggregate.csv", index=False
    )
    return made


@pytest.fixture(scope="module")
def pages(tmp_path_factory, without_pictures) -> dict[str, Path]:
    """Pages by what is odd about them."""
    folder = tmp_path_factory.mktemp("variants")
    methods = ("perturbdiff", *EXTERNAL, *BASELINES, "ceiling")
    many = [run(folder / "many", method, perturbations=8, shown=8) for method in methods]
    alone = run(folder / "alone", "perturbdiff", perturbations=2, shown=1)
    bare = [run(folder / "bare", method, perturbations=6) for method in ("perturbdiff", "linear", "ceiling")]
    for one in bare:
        for name in ("embedding", "de_real", "de_pred"):
            (one / f"{name}.parquet").unlink()
    expected = folder / "expected.csv"
    expected.write_text("dataset,method,kind,log\ntoy,gears,tool,gears.log\n")
    (folder / "gears.log").write_text("error: out of memory\n")
    return {
        "many": write_report(many, folder / "many.html", title="Ten methods"),
        "alone": write_report([alone], folder / "alone.html"),
        "bare": write_report(bare, folder / "bare.html", expected=expected, logs=[folder]),
    }


@pytest.mark.parametrize("name", ["many", "alone", "bare"])
def test_it_is_short_quiet_and_fits(open_page, pages, name, keep_screenshot):
    opened = open_page(1400, height=SCREEN, path=pages[name])
    page = opened.page
    page.wait_for_load_state("networkidle")
    keep_screenshot(page, f"{name}-desk", full=True)
    assert opened.requests == [pages[name].as_uri()]
    assert opened.console == []
    assert page.evaluate("document.documentElement.scrollHeight") <= 8 * SCREEN
    assert page.locator(".verdict .says").inner_text()
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": SCREEN})
        page.evaluate(SHOW_ALL)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("name", ["many", "alone", "bare"])
def test_it_prints_on_four_pages(open_page, pages, name, screenshots):
    paper = open_page(1400, path=pages[name]).page.pdf(
        path=screenshots / f"{name}.pdf", prefer_css_page_size=True
    )
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 4


def test_the_first_screen_of_ten_methods_holds_verdict_cells_and_numbers(open_page, pages):
    page = open_page(1400, height=SCREEN, path=pages["many"]).page
    for part in (".verdict", ".cells figure:visible", ".against", ".key"):
        box = page.locator(part).first.bounding_box()
        assert box is not None, part
        assert box["y"] + box["height"] <= SCREEN, f"{part} is in sight"
    assert page.locator(".against tbody tr").count() == len(EXTERNAL) + len(BASELINES)
    assert page.evaluate("document.querySelector('.key .scroll').scrollWidth") <= page.evaluate(
        "document.querySelector('.key .scroll').clientWidth"
    )


def test_what_is_missing_is_told(open_page, pages):
    page = open_page(1400, path=pages["bare"]).page
    assert "hold no cells to draw" in page.locator(".cells.note").inner_text()
    assert "gears: out of memory" in page.locator(".warning").first.inner_text()
    alone = open_page(1400, path=pages["alone"]).page
    assert "Cannot be judged" in alone.locator(".verdict .says").inner_text()
    assert "No baseline" in alone.locator(".warning").first.inner_text()
