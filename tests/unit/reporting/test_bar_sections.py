"""What the sections of a chapter take from the runs: made-up tables laid out as `evaluate` writes them."""

import numpy as np
import pandas as pd
import pytest

from perturbdiff.reporting.figures.svg import looks
from perturbdiff.reporting.loading.metric_columns import named
from perturbdiff.reporting.loading.results import Run, read_runs
from perturbdiff.reporting.sections.cell_sections import cell_figures
from perturbdiff.reporting.sections.chapter_data import drawn, subject
from perturbdiff.reporting.sections.chapters import chapter
from perturbdiff.reporting.sections.gene_sections import alike_table, distinct, genes
from perturbdiff.reporting.sections.score_sections import duels, further, glance, over_seeds
from perturbdiff.reporting.sections.standing import chance

POOLED = ("PDCorr", "MSE", "PDS_cos", "AUPRC", "DEOver")
DIRECTIONS = {"MSE": "lower", "energy_distance": "lower", "gene_sd_ratio": "one"}


def make(folder, method, *, level=0.5, perturbations=4, further=True, seed=0, dataset="toy"):
    """Write the tables of one run; its metrics vary around ``level``."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    names = [f"p{i}" for i in range(perturbations)]
    parts = []
    for metric in (*POOLED, "energy_distance", "gene_sd_ratio"):
        pooled = metric in POOLED
        values = np.clip(level + 0.05 * rng.standard_normal(perturbations), 0.01, 1)
        if metric == "PDS_cos":
            values = 1 - rng.permutation(perturbations) / perturbations
        scope = ("pooled", "pooled") if pooled else ("condition", "c|b")
        keys = {"scope_kind": scope[0], "scope": scope[1], "perturbation": names, "metric": metric}
        parts.append(pd.DataFrame({**keys, "value": values}))
    metrics = pd.concat(parts, ignore_index=True)
    metrics = metrics.assign(method=method, dataset=dataset, status="ok", n_cells=9, definition="d")
    metrics.to_parquet(folder / "metrics.parquet")
    means = metrics.groupby("metric", sort=False)["value"].agg(["mean", "count"]).reset_index()
    means = means.rename(columns={"mean": "nanmean", "count": "n_defined"})
    means = means.assign(scope_kind="pooled", scope="pooled", n=means["n_defined"])
    means["direction"] = means["metric"].map(DIRECTIONS).fillna("higher")
    if further:
        means = means.assign(low=means["nanmean"] - 0.1, high=means["nanmean"] + 0.1, chance=0.25)
    means.to_csv(folder / "aggregate.csv", index=False)
    return folder


def write_genes(folder, changes, *, spread=0.01):
    """Write DE tables whose mean changes are ``changes`` [perturbations × genes] on both sides, predicted × 0.5."""
    for side, factor in (("real", 1.0), ("pred", 0.5)):
        rows = [
            (
                "pooled",
                "pooled",
                f"p{i}",
                f"g{j}",
                0.0,
                spread if abs(x) > 0.5 else 0.9,
                2 * factor * x,
                1 + factor * x,
                1.0,
            )
            for i, row in enumerate(changes)
            for j, x in enumerate(row)
        ]
        columns = ["scope_kind", "scope", "perturbation", "gene", "p", "q", "log2fc", "mean", "control_mean"]
        pd.DataFrame(rows, columns=columns).to_parquet(folder / f"de_{side}.parquet")


def about(*folders, against=None):
    runs = read_runs(folders)
    look = looks(
        [r.method for r in runs if r.kind != "ceiling"], [r.method for r in runs if r.kind == "ceiling"]
    )
    return subject("d1", runs, look, against)


@pytest.fixture
def three(tmp_path):
    levels = {"mine": 0.8, "linear": 0.4, "nearest-context": 0.6, "ceiling": 0.9}
    return [make(tmp_path / n, n, level=level, seed=i) for i, (n, level) in enumerate(levels.items())]


def test_intervals_and_chance_are_read_and_optional(tmp_path):
    new, old = (read_runs([make(tmp_path / n, n, further=n == "new")])[0] for n in ("new", "old"))
    middle = new.score("PDCorr")[0]
    assert new.interval("PDCorr") == pytest.approx((middle - 0.1, middle + 0.1))
    assert new.chance("PDCorr") == 0.25
    assert np.isnan([*old.interval("PDCorr"), old.chance("PDCorr"), new.chance("nothing")]).all()
    assert chance(old, "PDS_cos") == 0.5  # by its definition
    assert np.isnan(chance(old, "PDCorr"))


def test_forest_holds_what_the_runs_hold(three):
    found = about(*three)
    forest = glance(found).figures[0][0].data.set_index(["metric", "method"])
    row = forest.loc[("PDCorr", "mine")]
    run = found.focus
    assert row[["value", "low", "high"]].to_list() == [run.score("PDCorr")[0], *run.interval("PDCorr")]
    assert row["ceiling"] == found.ceilings[0].score("PDCorr")[0]
    assert set(forest.index.get_level_values("method")) == {"mine", "linear", "nearest-context"}


def test_who_is_shown_first(three):
    found = about(*three)
    assert [r.method for r in found.panels(9)] == ["mine", "nearest-context", "ceiling", "linear"]
    assert len(found.panels(2)) == 2
    assert about(*three, against="linear").other.method == "linear"
    assert about(three[0]).other is None
    assert about(three[0], three[1]).other.method == "linear"


def test_duels_and_win_rates_cover_every_metric(three):
    section = duels(about(*three))
    assert {p.name for p in drawn([section])} == {
        f"d1-{m}-duel" for m in ("pdcorr", "mse", "pds-cos", "auprc", "deover", "energy")
    }
    table = next(p.data for p in drawn([further(about(*three))]) if p.name == "d1-wins")
    assert set(table["metric"]) == {*POOLED, "energy_distance"}
    assert table.groupby("metric").size().eq(6).all()
    mse = table[table["metric"] == "MSE"].set_index(["method", "against"])["rate"]
    assert mse["linear", "mine"] == 1.0  # a smaller error wins
    alone = duels(about(three[0]))
    assert "needs a second method" in alone.intro
    assert not alone.filled


def test_repeated_runs_have_mean_and_spread(tmp_path):
    folders = [make(tmp_path / f"seed{i}", "mine", level=level) for i, level in enumerate((0.4, 0.6))]
    found = about(*folders, make(tmp_path / "linear", "linear"))
    assert {r.method for r in found.ranked} == {"mine · seed0", "mine · seed1", "linear"}
    assert found.other.method == "linear"  # another method rather than another run of the same
    assert about(*folders).other.method == "mine · seed1"
    table = over_seeds(found)
    assert [(r.head, r.cells[0].text) for r in table.rows] == [("mine", "2"), ("linear", "1")]
    values = [r.score("PDCorr")[0] for r in found.ranked[:2]]
    cell = dict(zip(table.columns[1:], table.rows[0].cells, strict=True))["PDCorr ↑"]
    assert cell.value == pytest.approx(np.mean(values))
    assert cell.note == f"± {np.std(values, ddof=1):.3f}"
    assert over_seeds(about(folders[0])) is None


def test_ranks_are_those_of_the_definition(three):
    plot = next(p for p in drawn([distinct(about(*three))]) if p.name == "d1-ranks")
    shares = plot.data.set_index("method").loc["mine", "share"]
    assert shares.to_list() == [0.25] * 4  # a permutation of the ranks 0 to 3


def test_collapse_is_read_where_evaluation_wrote_it(three):
    write_genes(three[0], np.eye(4, 6))
    computed = {r.head: r.cells for r in alike_table(about(*three)).rows}
    assert list(computed) == ["mine"]
    assert computed["mine"][2].value == pytest.approx(0.5)
    table = {
        "scope_kind": ["context", "pooled"],
        "scope": ["c", "pooled"],
        "real": 0.1,
        "predicted": [0.2, 0.95],
    }
    pd.DataFrame({**table, "ratio": 1.0, "verdict": ["no", "collapsed"]}).to_csv(three[0] / "collapse.csv")
    read = {r.head: r.cells for r in alike_table(about(*three)).rows}
    assert [c.text for c in read["mine"]] == ["0.95", "0.10", "1.00", "collapsed"]


def test_gene_section_from_the_tables(three):
    for folder in three[:2]:
        write_genes(folder, np.array([[3, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]))
    section = genes(about(three[0], three[1]))
    found = {p.name: p.data for p in drawn([section])}
    assert set(found) == {"d1-separation", "d1-de-counts", "d1-genes-0", "d1-genes-1"}
    counts = found["d1-de-counts"].set_index(["method", "perturbation"])
    assert counts.loc[("mine", "p0"), ["de_real", "de_predicted"]].to_list() == [2, 2]
    first = found["d1-genes-0"]
    assert first["gene"].to_list() == ["g0", "g1"]
    assert first["real"].to_list() == [6.0, 4.0]
    assert first["linear"].to_list() == [3.0, 2.0]
    tables = [t for part in section.parts for t in part.tables]
    assert [t.title for t in tables] == ["p0 · 2 DE genes", "p1 · 1 DE genes"]
    assert tables[0].rows[0].cells[1].value == 3.0


def test_no_de_gene_at_all(three):
    write_genes(three[0], np.zeros((4, 5)))
    names = {p.name for p in drawn([genes(about(three[0]))])}
    assert names == {"d1-de-counts"}


def test_distances_of_chance_stand_beside_the_methods(three):
    conditions = {
        "cell_type": "c",
        "batch": "b",
        "perturbation": ["p0", "p1"],
        "chance_energy_distance": [2.0, 3.0],
    }
    pd.DataFrame(conditions).to_csv(three[0] / "conditions.csv", index=False)
    data = next(p.data for p, _ in cell_figures(about(*three)) if p.name == "d1-energy")
    assert data.loc[data["method"] == "chance", "value"].to_list() == [2.0, 3.0]
    assert data["method"].nunique() == 5
    (three[0] / "conditions.csv").write_text("a\n1\n")
    assert about(*three).focus.conditions is None


def test_realism_shows_quartiles(three):
    data = next(p.data for p, _ in cell_figures(about(*three)) if p.name == "d1-realism").set_index("method")
    values = about(*three).focus.values("gene_sd_ratio")
    assert data.loc["mine", ["low", "median", "high"]].to_list() == pytest.approx(
        np.percentile(values, (25, 50, 75))
    )


@pytest.mark.parametrize("perturbations", [1, 2])
def test_hardly_anything_to_show(tmp_path, perturbations):
    folder = make(tmp_path / "run", "mine", perturbations=perturbations, further=False)
    write_genes(folder, np.ones((perturbations, 2)))
    runs = read_runs([folder])
    found = chapter(1, runs, looks(["mine"]), None)
    names = [p.name for p in found.plots]
    assert len(names) == len(set(names))
    assert "d1-forest" in names
    assert "d1-ranks" not in names
    anchors = [s.anchor for s in found.sections]
    assert len(anchors) == len(set(anchors))
    assert named(found.about.every, "PDCorr").heading == "PDCorr ↑"


def test_runs_are_compared_by_identity():
    tables = {
        "metrics": pd.DataFrame(),
        "aggregate": pd.DataFrame(),
        "summary": {},
        "manifest": {},
        "record": {},
    }
    one, two = (Run(path=None, method="m", dataset="d", kind="model", **tables) for _ in range(2))
    assert one != two
    assert one in [two, one]
