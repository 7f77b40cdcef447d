"""Names of points, colours of methods, plain ticks, ranked rows, and the record that the page's scripts read."""

import base64
import gzip
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest

from perturbdiff.reporting.figures import condition_plots, gene_plots, score_plots, separation_plot
from perturbdiff.reporting.figures.axes import plain, reading, round_ticks
from perturbdiff.reporting.figures.hover import MOST_TITLES, name_points
from perturbdiff.reporting.figures.score_plots import Forest
from perturbdiff.reporting.figures.svg import PALETTE, canvas, draw, looks, page_color
from perturbdiff.reporting.loading.de_tables import Split
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.page.page_data import page_data

UP, DOWN = Column("PDCorr", "PDCorr", "higher"), Column("energy_distance", "Energy distance", "lower")
RATIO = Column("gene_sd_ratio", "SD of genes", "one")
METHODS = [f"method {i}" for i in range(14)]
LOOK = looks(METHODS)
TEXT = "{http://www.w3.org/2000/svg}text"


def words(plot):
    return [t.text or "" for t in ET.fromstring(plot.file).iter(TEXT)]


def rows(values, names=METHODS):
    return pd.DataFrame({"method": names[: len(values)], "value": values, "low": np.nan, "high": np.nan})


def order_of(plot):
    """Methods from top to bottom, as far as a point of theirs is drawn."""
    places = sorted(zip(plot.points.y, plot.points.methods, strict=True))
    return list(dict.fromkeys(method for _, method in places))


def named(*places):
    return [METHODS[i] for i in places]


def test_fourteen_methods_have_colours_of_their_own_on_either_ground():
    assert len({look.color for look in LOOK.values()}) == 14
    css = (
        pytest.importorskip("importlib.resources").files("perturbdiff.reporting.page")
        / "templates/figures.css"
    ).read_text()
    for i, color in enumerate(PALETTE, start=1):
        light, dark, forced = re.findall(rf"--m{i}: (#[0-9a-f]{{6}});", css)
        assert light == color.lower()
        assert dark == forced
        assert page_color(color) == f"var(--m{i})"
        assert contrast(light, "#fdfdfc") >= 3  # graphical objects, WCAG 1.4.11
        assert contrast(dark, "#15181c") >= 3
    assert len(set(re.findall(r"--m\d+: (#[0-9a-f]{6})", css))) == 28


def contrast(one, other):
    def light(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_more_methods_and_seeds_of_one_method_differ_in_their_markers():
    many = looks([f"m{i}" for i in range(40)])
    assert len({(look.color, look.marker) for look in many.values()}) == 40
    seeds = looks(["a-1", "a-2", "b", "a-3"], families={"a-1": "a", "a-2": "a", "a-3": "a"})
    assert seeds["a-1"].color == seeds["a-2"].color == seeds["a-3"].color != seeds["b"].color
    assert len({seeds[n].marker for n in ("a-1", "a-2", "a-3")}) == 3


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1e-5, 6, "0.00001"), (0.96001, 6, "0.96001"), (0.1 + 0.2, 6, "0.3"), (1_234_567, 6, "1,234,567"),
        (-2.5, 6, "−2.5"),
        (0.0, 6, "0"), (float("nan"), 3, "n/a"), (float("-inf"), 3, "−∞"), (0.123456, 3, "0.123"), (1e-15, 3, "0"),
    ],
)  # fmt: skip
def test_numbers_are_written_in_full(value, digits, text):
    assert plain(value, digits) == text


@pytest.mark.parametrize("ends", [(0.96001, 0.96004), (1e-5, 9e-5), (2e6, 9e6), (-3.0, 4.0)])
def test_ticks_are_round_and_without_an_offset(ends):
    with canvas() as (figure, axes):
        axes.plot(ends, ends)
        round_ticks(axes.xaxis, 4)
        plot = draw(figure, "t", "t", pd.DataFrame())
    numbers = [w.replace(",", "").replace("−", "-") for w in words(plot)]
    assert len(numbers) >= 6
    assert not [
        w for w in numbers if "e" in w or "×" in w or "+" in w
    ]  # the other axis has matplotlib's own ticks
    assert all(np.isfinite(float(w)) for w in numbers)


def test_an_interval_is_read_with_its_value():
    assert reading(0.51234, 0.4, 0.6) == "0.512 (0.4 to 0.6)"
    assert reading(0.5, float("nan"), 0.6) == "0.5"


def test_points_are_named_where_they_are_drawn():
    with canvas(4.0, 3.0) as (figure, axes):
        axes.set(xlim=(0, 10), ylim=(0, 1))
        name_points(axes, [5.0, np.nan, 99.0], [0.5, 0.5, 0.5], "ours", ["a", "b", "c"], ["1", "2", "3"])
        plot = draw(figure, "t", "t", pd.DataFrame())
        box = axes.get_position()  # in shares of the figure of 288 × 216 points
    assert plot.points.names == ("a",)  # the others are nowhere, or outside the axes
    assert plot.points.x[0] == pytest.approx(288 * (box.x0 + box.width / 2), abs=0.1)
    assert plot.points.y[0] == pytest.approx(216 * (1 - box.y0 - box.height / 2), abs=0.1)
    assert "<title>ours\na\n1</title>" in plot.svg
    assert "<title>" not in plot.file


def test_a_figure_of_many_points_has_no_titles_but_all_names():
    n = MOST_TITLES + 1
    index = pd.MultiIndex.from_tuples([("T|d1", f"p{i}") for i in range(n)], names=["scope", "perturbation"])
    values = pd.Series(np.arange(1.0, n + 1), index=index)
    plot = condition_plots.strips("t", "t", {"method 0": values}, DOWN, LOOK)
    assert len(plot.points.x) == n
    assert set(plot.points.names) == {f"p{i} · T · d1" for i in range(n)}
    assert "<title>" not in plot.svg


def test_rows_are_ranked_by_value():
    values = [0.2, 0.9, 0.5, float("nan")]
    assert order_of(score_plots.forest("f", "t", [Forest(UP, rows(values))], LOOK)) == named(1, 2, 0)
    assert order_of(score_plots.forest("f", "t", [Forest(DOWN, rows(values))], LOOK)) == named(0, 2, 1)
    ratios = pd.DataFrame({"method": METHODS[:3], "median": [0.5, 3.0, 1.1], "low": np.nan, "high": np.nan})
    assert order_of(score_plots.realism("r", "t", [(RATIO, ratios)], LOOK)) == named(2, 0, 1)


def test_rows_of_tests_are_ranked_below_the_truth():
    good, bad = (
        Split(np.array([0, 0, 9]), np.array([9, 0, 0])),
        Split(np.array([9, 0, 0]), np.array([0, 0, 9])),
    )
    groups = {"truth": bad, "method 0": bad, "method 1": good}
    plot = separation_plot.separations("s", "t", groups, 0.05)
    assert order_of(plot) == ["truth", "method 1", "method 0"]


def test_elements_belong_to_their_method():
    odd = '<a & "b">'
    look = looks([odd])
    plot = score_plots.forest("f", "t", [Forest(UP, rows([0.5], [odd]))], look)
    owners = {
        e.get("data-method")
        for e in ET.fromstring(plot.svg.replace("xlink:", "")).iter()
        if e.get("data-method")
    }
    assert owners == {odd}
    dense = pd.DataFrame(
        {"perturbation": [f"p{i}" for i in range(300)], "size_real": 1.0, "size_predicted": 2.0}
    )
    sizes = gene_plots.sizes(
        "z", "t", {odd: dense}, ("size_real", "size_predicted"), ("real", "predicted"), look
    )
    assert sizes.svg.count("data-method=") == 1
    assert sizes.svg.count("h0") == 300


def test_rows_of_one_arm_are_switched_off_together():
    table = rows([0.5, 0.7], ["a, 1", "a, 2"]).assign(arm="a")
    look = dict.fromkeys(("a, 1", "a, 2"), looks(["a"])["a"])
    plot = score_plots.forest("f", "t", [Forest(UP, table)], look)
    assert set(plot.points.methods) == {"a"}
    assert set(plot.points.names) == {"a, 1", "a, 2"}
    assert set(re.findall(r'data-method="([^"]*)"', plot.svg)) == {"a"}


def read(text):
    return json.loads(gzip.decompress(base64.b64decode(text, validate=True)))


def test_the_page_holds_the_numbers_of_each_figure():
    odd, unseen = "</script><b>&", "a\u202eb"
    methods = pd.Categorical([odd, "b", odd])
    data = pd.DataFrame({"method": methods, "value": [0.123456789012, np.nan, np.inf], "n": [1, 2, 3]})
    data["=x"] = [unseen, "c", "d"]
    with canvas() as (figure, axes):
        axes.set(xlim=(0, 1), ylim=(0, 1))
        name_points(axes, [0.5], [0.5], odd, odd, ["1\n2"])
        plot = draw(figure, "one", odd, data)
    record = read(page_data([plot], looks([odd])))
    shown = record["figures"]["one"]
    texts = record["texts"]
    assert texts[shown["title"]] == odd
    assert [texts[i] for i in shown["m"]] == [odd]
    assert shown["v"] == ["1\n2"]
    assert record["methods"] == {odd: ["var(--m1)", "o"]}
    (_, coded, methods), (_, _, values), counts, (name, flagged, flags) = shown["columns"]
    assert (coded, [texts[i] for i in methods]) == (1, [odd, "b", odd])
    assert values == [0.1234568, None, "inf"]
    assert counts == ["n", 0, [1, 2, 3]]
    assert (name, flagged, [texts[i] for i in flags]) == ("=x", 1, ["a\\u202eb", "c", "d"])


def test_a_table_too_large_for_the_page_is_cut_and_says_so():
    data = pd.DataFrame({"a": np.arange(300_000), "b": 0.5})
    with canvas() as (figure, _):
        plot = draw(figure, "one", "one", data)
    shown = read(page_data([plot], {}))["figures"]["one"]
    assert shown["rows"] == 300_000
    assert len(shown["columns"][0][2]) == 200_000
