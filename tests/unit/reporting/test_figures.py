"""The numbers behind the figures of scores, genes and ranks, and what bounds their size."""

import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from perturbdiff.reporting.figures import condition_plots, gene_plots, score_plots, separation_plot
from perturbdiff.reporting.figures.score_plots import Forest
from perturbdiff.reporting.figures.svg import PNG_DPI, export, image, looks
from perturbdiff.reporting.loading.comparison import win_rates
from perturbdiff.reporting.loading.de_tables import STEP, Split
from perturbdiff.reporting.loading.metric_columns import Column

UP, DOWN = Column("PDCorr", "PDCorr", "higher"), Column("energy_distance", "Energy distance", "lower")
RATIO = Column("gene_sd_ratio", "SD of genes", "one")
METHODS = [f"method {i}" for i in range(20)]
LOOK = looks(METHODS, ["ceiling"])
LIMIT = 150_000


@pytest.fixture(autouse=True)
def _with_pictures(monkeypatch):
    monkeypatch.setattr("perturbdiff.reporting.figures.svg.image", image)


def words(plot):
    return [t.text or "" for t in ET.fromstring(plot.file).iter("{http://www.w3.org/2000/svg}text")]


def rows(values, spread=0.1):
    return pd.DataFrame(
        {"method": METHODS[: len(values)], "value": values, "low": np.array(values) - spread, "high": np.nan}
    )


def test_forest_holds_every_interval_and_line():
    panels = [Forest(UP, rows([0.5, np.nan, 0.7]), 0.1, 0.9), Forest(DOWN, rows([3.0, 2.0]))]
    plot = score_plots.forest("f", "t", panels, LOOK)
    table = plot.data.set_index(["metric", "method"])
    assert len(table) == 5
    assert table.loc[("PDCorr", "method 0"), ["value", "low", "chance", "ceiling"]].to_list() == [
        0.5,
        0.4,
        0.1,
        0.9,
    ]
    assert np.isnan(table.loc[("energy_distance", "method 1"), "chance"])
    assert {"PDCorr ↑", "chance", "ceiling", "method 2"} <= set(words(plot))
    quiet = score_plots.forest("f", "t", [Forest(DOWN, rows([3.0, 2.0]))], LOOK)
    assert "chance" not in words(quiet)


def test_forest_of_nothing_and_of_many():
    empty = score_plots.forest("f", "t", [Forest(UP, rows([np.nan, np.nan]))], LOOK)
    assert empty.data["value"].isna().all()
    many = score_plots.forest("f", "t", [Forest(UP, rows(np.linspace(0, 1, 20)))] * 9, LOOK)
    assert len(many.data) == 180  # all, though 16 have a row
    assert "method 15" in words(many)
    assert "method 16" not in words(many)
    assert len(many.svg) < LIMIT


def test_raw_radar_keeps_numbers_and_draws_them_within_its_rim():
    scores = pd.DataFrame({"a": [2.0, -1.0], "b": [0.5, np.nan], "c": [np.nan, np.nan]}, index=METHODS[:2])
    lines = pd.DataFrame({"a": [1.0], "b": [0.9], "c": [1.0]}, index=["chance"])
    columns = [Column(n, n.upper(), "higher") for n in "abc"]
    plot = score_plots.radar("r", "t", scores, columns, LOOK, lines=lines)
    assert plot.data["method"].to_list() == [*METHODS[:2], "chance"]
    assert plot.data["a"].to_list() == [2.0, -1.0, 1.0]
    assert "c" not in plot.data
    assert "C" not in words(plot)
    rim = score_plots._ring(pd.Series([2.0, -1.0, np.nan, 0.5]))
    assert rim.tolist() == [1.0, 0.0, 0.0, 0.5, 1.0]


def series(values, names=None):
    names = names or [f"p{i}" for i in range(len(values))]
    return pd.Series(
        values, index=pd.MultiIndex.from_product([["c"], names], names=["scope", "perturbation"])
    )


def test_win_rates_of_all_pairs():
    values = {
        "a": series([1.0, 2.0, 3.0, np.nan]),
        "b": series([0.0, 2.0, 4.0, 9.0]),
        "c": series([5.0], ["other"]),
        "d": series([]),
    }
    found = win_rates(values, higher=True).set_index(["method", "against"])
    assert found.loc[("a", "b")].to_dict() == {"rate": 0.5, "n": 3.0}
    assert set(found.index) == {("a", "b"), ("b", "a")}  # the others share no condition
    values["b"] = series([0.0, 2.0, 2.5, 9.0])
    up = win_rates(values, higher=True).set_index(["method", "against"])["rate"]
    down = win_rates(values, higher=False).set_index(["method", "against"])["rate"]
    assert up["a", "b"] == pytest.approx(2.5 / 3)
    assert up["a", "b"] + up["b", "a"] == 1.0
    assert down["a", "b"] == up["b", "a"]
    assert win_rates({}, higher=True).empty


def test_win_matrix_says_per_cent_and_leaves_gaps():
    rates = pd.DataFrame([[0.5, 0.875], [np.nan, 0.5]], index=METHODS[:2], columns=METHODS[:2])
    plot = score_plots.win_matrix("w", "t", rates, pd.DataFrame({"x": [1]}))
    assert [w for w in words(plot) if w.isdigit()] == ["88"]


def test_realism_bounds_its_axis():
    table = pd.DataFrame(
        {"method": METHODS[:3], "median": [0.0, 1.0, 900.0], "low": 0.0, "high": [0.0, 1.1, 1e4]}
    )
    plot = score_plots.realism("r", "t", [(RATIO, table)], LOOK)
    assert plot.data["median"].to_list() == [0.0, 1.0, 900.0]
    assert plot.data["metric"].eq("gene_sd_ratio").all()


def test_ranks_are_binned_against_chance():
    ranks = {"method 0": np.array([0, 0, 0, 1]), "method 1": np.array([3, 2, 1, 0])}
    table = gene_plots.rank_histograms("k", "t", ranks, 4, LOOK).data.set_index("method")
    assert table.loc["method 0", "share"].to_list() == [0.75, 0.25, 0, 0]
    assert table.loc["method 1", "share"].to_list() == [0.25] * 4
    assert table["chance"].to_list() == [0.25] * 8
    many = {m: np.arange(1000) for m in METHODS}
    plot = gene_plots.rank_histograms("k", "t", many, 1000, LOOK)
    assert plot.data.groupby("method")["share"].sum().to_numpy() == pytest.approx(1.0)
    np.testing.assert_allclose(plot.data["share"], 0.05)
    assert len(plot.svg) < LIMIT
    none = gene_plots.rank_histograms("k", "t", {"method 0": np.array([], int)}, 4, LOOK)
    assert none.data["share"].to_list() == [0.0] * 4


def split(true, other):
    counts = np.zeros((2, 4601), np.int64)
    for group, values in zip(counts, (true, other), strict=True):
        np.add.at(group, (np.array(values) / STEP).astype(int), 1)
    return Split(*counts)


def test_separation_figure_counts_every_gene():
    groups = {"real": split([2.0, 5.0, 30.0], [0.1, 0.2]), "method 0": split([0.5, 46.0], [0.0])}
    plot = separation_plot.separations("s", "t", groups, 0.05)
    counts = plot.data.groupby(["method", "genes"])["count"].sum()
    assert counts["real", "true DE"] == 3
    assert counts["method 0", "other"] == 1
    last = plot.data[np.isinf(plot.data["upper"]) & (plot.data["method"] == "method 0")]
    assert last["count"].sum() == 1  # beyond the axis, in the last bin
    assert plot.data.loc[plot.data["method"] == "real", "separation"].iloc[0] == 1.0
    assert {"1.00", "0.50"} & set(words(plot)) == {"1.00"}
    many = separation_plot.separations(
        "s", "t", dict.fromkeys([f"m{i}" for i in range(40)], groups["real"]), 0.05
    )
    assert len(many.svg) < LIMIT
    nothing = separation_plot.separations("s", "t", {"real": split([], [])}, 0.05)
    assert "n/a" in words(nothing)


def gene_table(n=3):
    columns = {
        "perturbation": "drug",
        "de_genes": 40,
        "gene": [f"g{i}" for i in range(n)],
        "real": np.arange(n) - 1.0,
    }
    return pd.DataFrame(
        {**columns, "method 0": np.nan, "method 0 q": 1.0, "method 1": 2.0, "method 1 q": 0.0}
    )


@pytest.mark.parametrize("methods", [[], METHODS[:1], METHODS[:2]])
def test_paired_dots_show_each_gene(methods):
    plot = gene_plots.paired_dots("g", gene_table(), methods, 0.05, LOOK)
    assert {"g0", "g1", "g2", "real", "drug · 40 DE genes"} <= set(words(plot))
    assert plot.data.equals(gene_table())


@pytest.mark.parametrize("n", [1, 1000])
@pytest.mark.parametrize("columns", [("de_real", "de_predicted"), ("size_real", "size_predicted")])
def test_sizes_of_effects_stay_small(n, columns):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"perturbation": [f"p{i}" for i in range(n)]})
    for column in columns:
        table[column] = rng.integers(0, 900, n).astype(float)
    plot = gene_plots.sizes("z", "t", dict.fromkeys(METHODS, table), columns, ("real", "predicted"), LOOK)
    assert len(plot.data) == 20 * n
    assert len(plot.svg) < LIMIT
    zero = table.assign(**{columns[0]: 0.0, columns[1]: 0.0})
    gene_plots.sizes("z", "t", {"method 0": zero}, columns, ("real", "predicted"), LOOK)


def test_strips_of_many_methods_and_conditions_stay_small():
    values = {m: series(np.random.default_rng(0).random(2000).tolist()) for m in METHODS}
    plot = condition_plots.strips("e", "t", values, DOWN, LOOK)
    assert len(plot.data) == 40_000
    assert len(plot.svg) < LIMIT


def test_cells_beyond_the_bound_are_an_even_draw():
    rng = np.random.default_rng(0)
    cells = pd.DataFrame({"source": np.repeat(["control", "real", "predicted"], 5000), "x": 0.0, "y": 0.0})
    cells[["x", "y"]] = rng.standard_normal((15_000, 2))
    plot = condition_plots.embedding("e", "a|b|c", cells, condition_plots.shared_limits(cells), "#D55E00")
    assert len(plot.svg) < LIMIT
    assert plot.svg.count("h0") == 4500
    assert "currentColor" in plot.svg  # real cells follow the page, dark or light
    assert len(plot.data) == 15_000


def test_any_label_is_drawn_as_it_is():
    odd = '_<a & b> $\\frac{x}$ "q"'
    look = looks([odd])
    table = pd.DataFrame({"perturbation": [odd], "de_real": [3.0], "de_predicted": [0.0]})
    genes = gene_table().rename(columns={METHODS[0]: odd, f"{METHODS[0]} q": f"{odd} q"})
    genes = genes.assign(perturbation=odd, gene=[odd, "$", "_"])
    found = [
        score_plots.forest("a", odd, [Forest(UP, rows([0.5]).assign(method=odd))], look),
        score_plots.realism(
            "b",
            odd,
            [(RATIO, pd.DataFrame({"method": [odd], **dict.fromkeys(("median", "low", "high"), 1.2)}))],
            look,
        ),
        score_plots.win_matrix("c", odd, pd.DataFrame([[0.5]], index=[odd], columns=[odd]), table),
        separation_plot.separations("d", odd, {odd: split([2.0], [0.1])}, 0.05),
        gene_plots.paired_dots("e", genes, [odd], 0.05, look),
        gene_plots.rank_histograms("f", odd, {odd: np.array([0, 1])}, 3, look),
        gene_plots.sizes("g", odd, {odd: table}, ("de_real", "de_predicted"), ("x", "y"), look),
    ]
    for plot in found:
        ET.fromstring(plot.svg.replace("xlink:", ""))
        assert any(odd[:6] in w for w in words(plot)), plot.name
        assert plot.png


def test_export_writes_vector_image_and_numbers(tmp_path):
    one, two = (score_plots.forest(n, "t", [Forest(UP, rows([0.5, 0.7]))], LOOK) for n in ("one", "two"))
    export([one, two], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"{n}.{kind}" for n in ("one", "two") for kind in ("csv", "png", "svg")
    ]
    picture = Image.open(io.BytesIO((tmp_path / "one.png").read_bytes()))
    width, height = (float(x) for x in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', one.file).groups())
    assert picture.size == pytest.approx((width * PNG_DPI / 72, height * PNG_DPI / 72), abs=1)
    assert picture.convert("RGB").getpixel((0, 0)) == (253, 253, 252)  # readable on any ground
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.png").read_bytes() == one.png
    assert pd.read_csv(tmp_path / "one.csv")["value"].to_list() == [0.5, 0.7]
