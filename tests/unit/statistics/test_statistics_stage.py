"""Tables of a store against the same numbers counted in memory."""

import json
import shutil

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from distributed import LocalCluster
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.datasets.registry import PaperCounts
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.reporting.figures.store_tables import data_tables
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.statistics import expression_pass, paper_counts
from perturbdiff.statistics.statistics_stage import write_statistics
from perturbdiff.store import row_reader
from perturbdiff.store.row_reader import RowReader
from perturbdiff.store.store import Store
from perturbdiff.store.views import to_dask

KEYS = ["cell_type", "batch", "perturbation"]


def tables_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.csv"))}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store that no test changes, beside the file it was made from."""
    folder = tmp_path_factory.mktemp("statistics")
    tiny_counts().write_h5ad(folder / "counts.h5ad")
    return preprocess([folder / "counts.h5ad"], folder / "store", DataConfig(num_hvgs=30))


def test_counts_and_composition(store, tmp_path):
    out = write_statistics(store, tmp_path / "stats")
    obs = ad.read_h5ad(store.with_name("counts.h5ad")).obs.astype(str)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["n_cells"], summary["n_genes"], summary["n_conditions"]) == (len(obs), 30, 16)
    assert (summary["n_perturbations"], summary["n_cell_types"], summary["n_batches"]) == (3, 2, 2)
    assert summary["n_control_cells"] == (obs["perturbation"] == "control").sum()
    conditions = pd.read_csv(out / "conditions.csv").set_index(KEYS)["n_cells"]
    pd.testing.assert_series_equal(
        conditions.sort_index(), obs.groupby(KEYS).size().sort_index(), check_names=False
    )
    perturbations = pd.read_csv(out / "perturbations.csv").set_index("perturbation")
    assert perturbations["n_cells"].to_dict() == obs["perturbation"].value_counts().to_dict()
    composition = pd.read_csv(out / "composition.csv").set_index(["cell_type", "batch"])
    assert composition["n_cells"].to_dict() == obs.groupby(["cell_type", "batch"]).size().to_dict()
    assert composition["share"].sum() == pytest.approx(1)
    for name, key in (("cell_types", "cell_type"), ("batches", "batch")):
        table = pd.read_csv(out / f"{name}.csv").set_index(key)
        assert table["n_cells"].to_dict() == obs[key].value_counts().to_dict()
        assert (table["n_perturbations"] == 3).all()


def test_expression_tables(store, tmp_path):
    out = write_statistics(store, tmp_path / "stats")
    x = Store(store).expression(slice(None)).toarray().astype(np.float64)
    genes = pd.read_csv(out / "genes.csv")
    np.testing.assert_allclose(genes["mean"], x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(genes["variance"], x.var(axis=0), rtol=1e-4)
    np.testing.assert_allclose(genes["maximum"], x.max(axis=0), rtol=1e-5)
    np.testing.assert_allclose(genes["share_of_cells"], (x > 0).mean(axis=0))
    lazy = to_dask(Store(store), rows_per_block=50)
    np.testing.assert_allclose(genes["mean"], np.asarray(lazy.mean(axis=0).compute()).ravel(), rtol=1e-5)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sparsity"] == pytest.approx((x == 0).mean())
    assert summary["genes_per_cell"]["median"] == np.median((x > 0).sum(axis=1))
    assert summary["depth"]["median"] == summary["target_sum"]
    for name in ("genes_per_cell", "depth"):
        table = pd.read_csv(out / f"{name}.csv")
        assert table["n_cells"].sum() == len(x)
        assert (table["lower"] < table["upper"]).all()


def test_split_counts(store, tmp_path):
    split = Store(store).conditions[[*KEYS, "n_cells"]].copy()
    split["part"] = np.where(split["perturbation"] == "p1", "test", "train")
    split.to_parquet(tmp_path / "split.parquet")
    out = write_statistics(store, tmp_path / "stats", split=tmp_path / "split.parquet")
    table = pd.read_csv(out / "split.csv").set_index("split")
    assert table["n_conditions"].to_dict() == {"test": 4, "train": 12}
    assert table["n_cells"].to_dict() == split.groupby("part")["n_cells"].sum().to_dict()
    assert set(pd.read_csv(out / "conditions.csv")["split"]) == {"train", "test"}
    split.iloc[1:].to_parquet(tmp_path / "other.parquet")
    with pytest.raises(UserError):
        write_statistics(store, tmp_path / "again", split=tmp_path / "other.parquet")
    assert not (tmp_path / "again").exists()


def test_numbers_beside_the_papers(store, tmp_path, monkeypatch):
    facts = {
        "train": 90,
        "valid": 0,
        "test": 30,
        "control": 40,
        "perturbations": 3,
        "cell_types": 5,
        "batches": 2,
    }
    known = PaperCounts(**facts, shared_genes=4)
    monkeypatch.setattr(paper_counts, "counted", lambda name: {"pbmc": known}[name])
    (tmp_path / "list.txt").write_text("\n".join([*Store(store).genes[:4], "OTHER"]))
    out = write_statistics(store, tmp_path / "stats", genes=tmp_path / "list.txt", published="pbmc", pairs=0)
    table = pd.read_csv(out / "paper_counts.csv").set_index("number")
    assert list(table.index) == [
        "control cells", "perturbations", "cell types", "batches", "genes of the prior's list"
    ], "no parts without a split"  # fmt: skip
    assert table["agrees"].to_dict() == {
        "control cells": False, "perturbations": True, "cell types": False, "batches": True,
        "genes of the prior's list": True,
    }  # fmt: skip
    assert table.loc["cell types", "difference"] == pytest.approx(-0.6)
    shown = {table.title: table for table in data_tables([out], {})}["Beside the paper’s counts: stats"]
    assert [cell.text for cell in shown.rows[2].cells] == ["5", "2", "−60 %"]
    monkeypatch.undo()
    with pytest.raises(
        UserError, match="the paper counts nothing in data set 'kang18-ifnb'; it does in pbmc,"
    ):
        write_statistics(store, tmp_path / "no", published="kang18-ifnb")


def test_nonzero_genes_by_cell_type_and_of_a_list(store, tmp_path):
    genes = Store(store).genes
    chosen = genes[::3]
    (tmp_path / "list.txt").write_text("\n".join([*chosen, "not-a-gene"]))
    out = write_statistics(store, tmp_path / "stats", genes=tmp_path / "list.txt", pairs=0)
    x = Store(store).expression(slice(None)).toarray() > 0
    cell_types = Store(store).obs(["cell_type"])["cell_type"].to_numpy(str)
    table = pd.read_csv(out / "nonzero_by_cell_type.csv")
    for gene_set, keep in (("store", np.ones(len(genes), bool)), ("list", np.isin(genes, chosen))):
        per_cell = x[:, keep].sum(axis=1)
        for scope, name, cells in (
            ("all cells", "all", np.ones(len(x), bool)),
            *(("cell type", t, cell_types == t) for t in ("B", "T")),
        ):
            row = table[
                (table["gene_set"] == gene_set) & (table["scope"] == scope) & (table["cell_type"] == name)
            ].iloc[0]
            own = per_cell[cells]
            assert (row["n_cells"], row["n_genes"]) == (cells.sum(), keep.sum())
            expected = np.quantile(own, [0, 0.25, 0.5, 0.75, 1])
            found = row[["minimum", "quartile_1", "median", "quartile_3", "maximum"]].to_numpy(float)
            np.testing.assert_allclose(found, expected)
            assert row["mean"] == pytest.approx(own.mean())
            assert row["share_nonzero"] == pytest.approx(own.mean() / keep.sum())
    histogram = pd.read_csv(out / "genes_per_cell_list.csv")
    per_cell = x[:, np.isin(genes, chosen)].sum(axis=1)
    for row in histogram.to_dict("records"):
        assert row["n_cells"] == ((per_cell >= row["lower"]) & (per_cell < row["upper"])).sum()


def test_group_sizes(store, tmp_path):
    out = write_statistics(store, tmp_path / "stats", pairs=0)
    conditions = Store(store).conditions
    treated = conditions[~conditions["is_control"]]
    sizes = treated.groupby("perturbation")["n_cells"].sum()
    for name, key, own in (
        ("cells_per_perturbation", "n_perturbations", sizes),
        ("cells_per_condition", "n_conditions", treated["n_cells"]),
    ):
        table = pd.read_csv(out / f"{name}.csv")
        for row in table.to_dict("records"):
            assert row[key] == ((own >= row["lower"]) & (own < row["upper"])).sum()
        assert table[key].sum() == len(own)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["cells_per_perturbation"]["mean"] == pytest.approx(sizes.mean())
    assert pd.read_csv(out / "distances.csv").empty
    assert pd.read_csv(out / "distance_summary.csv").empty


def test_depth_is_exact_though_counted_by_bits(store, monkeypatch):
    opened = Store(store)
    rng = np.random.default_rng(0)
    depth = np.sort(rng.lognormal(7, 1, opened.n_cells)).astype(np.float32)
    depth[5:15] = depth[5]
    depth = rng.permutation(depth)
    monkeypatch.setattr(RowReader, "depth", lambda _, start, stop: depth[start:stop])
    monkeypatch.setattr(expression_pass, "ROWS_PER_TASK", 37)
    with TaskRunner(1) as crew:
        sums = expression_pass.sum_expression(opened, crew, ["B", "T"], None)
        found, counts, edges = expression_pass.describe_depth(opened, crew, sums, 20)
    expected = np.quantile(depth.astype(float), list(expression_pass.QUANTILES.values()))
    np.testing.assert_allclose([found[k] for k in expression_pass.QUANTILES], expected, rtol=1e-12)
    assert found["mean"] == pytest.approx(depth.mean(dtype=float))
    np.testing.assert_array_equal(counts, np.histogram(depth, edges)[0])
    assert counts.sum() == len(depth)


def test_rows_read_in_windows(store, monkeypatch):
    monkeypatch.setattr(row_reader, "_WINDOW", 16)
    opened = Store(store)
    reader = RowReader(opened)
    rng = np.random.default_rng(0)
    for size in (0, 1, 5, opened.n_cells):
        rows = np.sort(rng.choice(opened.n_cells, size, replace=False))
        np.testing.assert_array_equal(reader.expression(rows).toarray(), opened.expression(rows).toarray())
    np.testing.assert_array_equal(reader.depth(3, 41), opened.n_counts[3:41])


def test_neither_tasks_nor_workers_change_a_byte(store, tmp_path, monkeypatch):
    one = write_statistics(store, tmp_path / "one", cells_per_group=10)
    monkeypatch.setattr("perturbdiff.statistics.group_distances._GROUPS_PER_TASK", 2)
    with LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster:
        address = cluster.scheduler_address
        two = write_statistics(store, tmp_path / "two", cells_per_group=10, scheduler=address)
    assert tables_of(one) == tables_of(two)
    other = write_statistics(store, tmp_path / "other", cells_per_group=10, seed=1)
    changed = {name for name, text in tables_of(one).items() if text != tables_of(other)[name]}
    assert changed == {"distances.csv", "distance_summary.csv"}


def many_cells(tmp_path, shift: float, per_condition: int = 60):
    """One cell type, one batch, a control and three perturbations; the last one shifted."""
    rng = np.random.default_rng(0)
    names = np.repeat(["control", "p1", "p2", "p3"], per_condition)
    mean = rng.lognormal(0.5, 0.5, 40)
    rate = np.where((names == "p3")[:, None] & (np.arange(40) < 10), mean * (1 + shift), mean)
    obs = pd.DataFrame({"perturbation": names}, index=[f"c{i}" for i in range(len(names))])
    path = tmp_path / "made.h5ad"
    counts = rng.poisson(rate).astype(np.float32)
    ad.AnnData(counts, obs, pd.DataFrame(index=[f"g{i}" for i in range(40)])).write_h5ad(path)
    config = DataConfig(num_hvgs=40, cell_type_key=None, batch_key=None, perturbation_key="perturbation")
    return preprocess([path], tmp_path / "made", config)


def test_between_exceeds_within_where_a_perturbation_shifts(tmp_path):
    out = write_statistics(many_cells(tmp_path, 1.0), tmp_path / "stats", seed=3)
    table = pd.read_csv(out / "distances.csv")
    assert set(table["level"]) == {"perturbation", "condition"}  # a single cell type is no level of its own
    own = table[table["level"] == "perturbation"]
    within = own[own["kind"] == "within"].set_index("group_a")["ed"]
    assert len(within) == 3
    assert within.abs().max() < 0.12
    between = own[own["kind"] == "between"]
    far = (between["group_a"] == "p3") | (between["group_b"] == "p3")
    assert between[far]["ed"].min() > 0.3
    assert between[~far]["ed"].abs().max() < 0.12
    control = own[own["kind"] == "control"].set_index("group_a")
    assert control.loc["p3", "ed"] > 0.3
    assert (control["group_b"] == "control").all()
    np.testing.assert_allclose(table["root"], np.sqrt(table["ed"].clip(lower=0)), rtol=1e-6)
    summary = pd.read_csv(out / "distance_summary.csv", keep_default_na=False, na_values=[""])
    mean = summary.set_index(["level", "kind"]).loc[("perturbation", "between")]
    assert mean["mean"] == pytest.approx(between["ed"].mean(), rel=1e-6)
    assert mean["low"] < mean["mean"] < mean["high"]
    assert (mean["n_pairs"], mean["interval_over"]) == (3, "perturbations")


def test_distance_is_that_of_the_rows_drawn(tmp_path):
    from perturbdiff.conditions.cell_distances import energy_distance
    from perturbdiff.statistics.pair_plan import PairPlan

    path = many_cells(tmp_path, 0.5)
    out = write_statistics(path, tmp_path / "stats", cells_per_group=12, seed=5)
    table = pd.read_csv(out / "distances.csv")
    store = Store(path)
    plan = PairPlan(store.conditions, "condition", pairs=300, cells=12, seed=5)
    flat = [c for group in plan.comparisons() for c in group]
    own = table[table["level"] == "condition"]
    assert len(own) == len(flat)
    for c, ed in zip(flat, own["ed"], strict=True):
        x, y = (store.expression(s.rows).toarray() for s in (c.a, c.b))
        assert ed == pytest.approx(energy_distance(x, y), rel=1e-6, abs=1e-9)


def test_smallest_data(tmp_path):
    """One perturbation, one cell type, conditions of one cell."""
    counts = np.random.default_rng(0).poisson(2.0, (2, 30)).astype(np.float32)
    obs = pd.DataFrame({"perturbation": ["control", "p"]}, index=["a", "b"])
    ad.AnnData(counts, obs, pd.DataFrame(index=[f"g{i}" for i in range(30)])).write_h5ad(tmp_path / "x.h5ad")
    config = DataConfig(num_hvgs=20, cell_type_key=None, batch_key=None, perturbation_key="perturbation")
    store = preprocess([tmp_path / "x.h5ad"], tmp_path / "store", config)
    out = write_statistics(store, tmp_path / "stats")
    assert pd.read_csv(out / "distances.csv").empty
    assert pd.read_csv(out / "cells_per_perturbation.csv")["n_perturbations"].sum() == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["distances"]["groups"]["perturbation"] == {"n_groups": 1, "n_with_enough_cells": 0}


@pytest.mark.parametrize("wrong", [{"pairs": -1}, {"cells_per_group": 5}])
def test_settings_out_of_range(store, tmp_path, wrong):
    with pytest.raises(UserError, match="cells per group"):
        write_statistics(store, tmp_path / "stats", **wrong)
    assert not (tmp_path / "stats").exists()


def test_command(store, tmp_path, run_cli):
    done = run_cli(
        "stats", store, "--out", tmp_path / "stats", "--pairs", "5", "--cells-per-group", "10", "--seed", "2"
    )
    assert done.code == 0, done.err
    assert done.out.strip() == str(tmp_path / "stats")
    plots = {path.name for path in (tmp_path / "stats" / "plots").iterdir()}
    assert {
        "sparsity.svg",
        "cells-per-perturbation.svg",
        "composition.svg",
        "distances-perturbation.svg",
    } <= plots
    manifest = json.loads((tmp_path / "stats" / "manifest.json").read_text())
    assert manifest["config"] == {"pairs": 5, "cells_per_group": 10}
    assert manifest["seed"] == 2


@pytest.mark.parametrize("array", ["X/indptr", "X/data", "X/indices", "obs/n_counts"])
def test_lost_files_of_a_store_are_noticed(store, tmp_path, array):
    store = shutil.copytree(store, tmp_path / "store")
    lost = [p for p in (store / "part-0000.zarr" / array / "c").rglob("*") if p.is_file()]
    assert lost
    for path in lost:
        path.unlink()
    with pytest.raises(UserError, match="preprocess again"):
        write_statistics(store, tmp_path / "stats")
    assert not (tmp_path / "stats").exists()
