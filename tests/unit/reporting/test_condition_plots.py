"""Comparisons behind the figures, and the figures as SVG."""

import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest

from perturbdiff.reporting.figures import condition_plots, score_plots
from perturbdiff.reporting.figures.number_texts import decimals_for, number, small
from perturbdiff.reporting.figures.svg import PALETTE, looks, shorten, slug
from perturbdiff.reporting.loading.comparison import compare, paired, ranks, scaled
from perturbdiff.reporting.loading.metric_columns import Column

UP, DOWN = Column("PDCorr", "PDCorr", "higher"), Column("energy_distance", "Energy distance", "lower")
LOOK = looks(["ours", "theirs"], ["ceiling"])


def pairs(a, b):
    return pd.DataFrame({"a": a, "b": b}, index=pd.RangeIndex(len(a), name="condition"))


def test_win_rate_follows_the_metrics_direction():
    table = pairs([3.0, 2.0, 1.0, 5.0], [1.0, 1.0, 1.0, 6.0])
    up, down = compare(table, higher=True), compare(table, higher=False)
    assert (up.n, up.wins, up.ties, up.rate) == (4, 2, 1, 0.625)
    assert (down.wins, down.rate) == (1, 0.375)
    assert up.gain == pytest.approx(0.5)
    assert down.gain == pytest.approx(-0.5)


def test_bootstrap_interval_covers_and_narrows():
    rng = np.random.default_rng(1)
    spans = []
    for n in (20, 2000):
        table = pairs(0.3 + rng.standard_normal(n), np.zeros(n))
        low, high = compare(table, higher=True).gain_interval
        assert low < 0.3 < high
        spans.append(high - low)
    assert spans[0] / spans[1] == pytest.approx(10, rel=0.5)  # √100 times as many conditions
    assert compare(table, higher=True) == compare(table, higher=True)


def test_only_conditions_of_both_are_compared():
    a = pd.Series([1.0, 2.0, np.nan], index=["x", "y", "z"])
    b = pd.Series([5.0, 6.0, 7.0], index=["y", "z", "w"])
    assert paired(a, b).to_dict("index") == {"y": {"a": 2.0, "b": 5.0}}


def test_scaled_scores_run_from_worst_to_best():
    scores = pd.DataFrame(
        {"up": [0.1, 0.3, 0.2], "down": [1.0, 3.0, 2.0], "even": [2.0, 2.0, np.nan]}, index=["a", "b", "c"]
    )
    found = scaled(scores, {"up": True, "down": False, "even": True})
    np.testing.assert_allclose(found["up"], [0, 1, 0.5])
    np.testing.assert_allclose(found["down"], [1, 0, 0.5])
    np.testing.assert_allclose(found["even"], [1, 1, np.nan])


@pytest.mark.parametrize(
    ("direction", "expected"),
    [("higher", [3, 1, 2]), ("lower", [1, 3, 2]), ("one", [3, 2, 1]), ("none", None)],
)
def test_ranks_know_the_direction(direction, expected):
    found = ranks(pd.Series([0.2, 1.5, 0.9, np.nan]), direction)
    assert math.isnan(found[3])
    assert found[:3].isna().all() if expected is None else found[:3].to_list() == expected


def well_formed(plot):
    ET.fromstring(plot.file)
    ET.fromstring(re.sub(r"xlink:", "", plot.svg))
    assert "http" not in plot.svg
    assert all(i.startswith(f"{plot.name}-") for i in re.findall(r'\bid="([^"]*)"', plot.svg))
    return plot


def test_every_figure_is_well_formed_with_any_label():
    rng = np.random.default_rng(0)
    odd = "<a & b> \"q\" 'r' $\\frac{x}$ _x"
    look = looks([odd, "theirs"])
    share = pd.DataFrame(
        rng.random((2, 3)), index=[odd, "theirs"], columns=["PDCorr", "energy_distance", "c"]
    )
    columns = [UP, DOWN, Column("c", odd, "higher")]
    index = pd.MultiIndex.from_product([[odd], ["p", "q", "r"]], names=["scope", "perturbation"])
    values = pd.Series(rng.random(3), index=index)
    table = pd.DataFrame({"step": [0, 1, 2], "split": odd, odd: [3.0, 2.0, 1.0]})
    cells = pd.DataFrame({"source": ["real", "predicted", "control"], "x": [1, 2, 3], "y": [1, 0, 1]})
    found = [
        score_plots.radar("r", odd, share, columns, look),
        condition_plots.scatter("s", pairs([1.0, 2.0], [2.0, 1.0]), DOWN, (odd, "theirs"), look),
        condition_plots.strips("t", odd, {odd: values, "theirs": values.iloc[:0]}, DOWN, look),
        condition_plots.curves("c", odd, table, odd),
        condition_plots.embedding("e", f"{odd}|b|c", cells, condition_plots.shared_limits(cells), PALETTE[0]),
        condition_plots.alike(
            "a", odd, pd.DataFrame({"first": odd, "second": "b", "real": [0.1], "predicted": [0.9]}), look
        ),
    ]
    for plot in found:
        well_formed(plot)


def test_figures_are_equal_for_equal_data_and_carry_the_numbers():
    a, b = np.linspace(0.1, 1, 30), np.linspace(1, 0.2, 30)
    one, two = (condition_plots.scatter("s", pairs(a, b), UP, ("ours", "theirs"), LOOK) for _ in range(2))
    assert one.svg == two.svg
    np.testing.assert_array_equal(one.data["ours"], a)
    np.testing.assert_array_equal(one.data["theirs"], b)


def test_ties_belong_to_neither():
    plot = condition_plots.scatter(
        "s", pairs([1.0, 2.0, 3.0, 3.0], [1.0, 2.0, 3.0, 1.0]), UP, ("ours", "theirs"), LOOK
    )
    assert "wins 1 · ties 3 · losses 0" in plot.svg
    assert plot.file.lower().count(f"fill: {LOOK['theirs'].color.lower()}") == 0


def test_wide_ranges_get_a_logarithmic_axis_with_plain_numbers():
    a, b = np.geomspace(0.01, 100, 9), np.geomspace(0.02, 50, 9)
    plot = well_formed(condition_plots.scatter("s", pairs(a, b), DOWN, ("ours", "theirs"), LOOK))
    assert ">100<" in plot.svg
    assert "math" not in plot.svg


def test_dense_scatters_stay_small_and_keep_all_numbers():
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 20_000))
    plot = well_formed(condition_plots.scatter("s", pairs(a, b), UP, ("ours", "theirs"), LOOK))
    assert len(plot.svg) < 150_000
    assert len(plot.data) == 20_000
    assert "<image" not in plot.svg  # it keeps to the page's colours
    assert plot.svg.count("h0") == 6000  # an even draw of either colour


def test_twenty_methods_look_different():
    found = looks([f"m{i}" for i in range(20)])
    assert len(set(found.values())) == 20


def test_labels_and_names():
    assert shorten("short") == "short"
    long = shorten("4-hydroxytamoxifen at 12.5 micromolar for 24 hours", 26)
    assert (len(long), long[:5], long[-5:]) == (26, "4-hyd", "hours")
    assert slug("Total loss", "β/γ", "a  b") == "total-loss-a-b"


def test_numbers_read_well():
    assert [number(v) for v in (0.5, -0.0004, -1.25, math.nan, -math.inf, 12345.0)] == [
        "0.500",
        "0.000",
        "−1.250",
        "n/a",
        "−∞",
        "12,345.000",
    ]
    assert [decimals_for([v]) for v in (0.71, 0.0012, 52.3, math.nan)] == [3, 5, 1, 3]
    assert [small(q) for q in (0.04, 3e-12, 0.0)] == ["0.040", "3e−12", "< 10⁻³⁰"]
