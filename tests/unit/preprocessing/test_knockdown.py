"""The knock-down filter: a case computed by hand, and a plain version of the published rule in memory."""

import logging

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from memory_passes import readers

from perturbdiff.config.settings import DataConfig
from perturbdiff.io.counts import Inputs
from perturbdiff.preprocessing import passes
from perturbdiff.preprocessing.knockdown import (
    decide,
    knockdown_values,
    plan_knockdown,
    read_targets,
    stays,
)
from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store

HERE = Machine(jobs=1)
GENES = ["A", "B", "C", "D", "filler"]


@pytest.fixture(autouse=True)
def _heard(monkeypatch):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)


def conditions_of(perturbation, cell_type):
    cells = pd.DataFrame({"cell_type": cell_type, "perturbation": perturbation})
    table = cells.drop_duplicates().reset_index(drop=True)
    codes = pd.MultiIndex.from_frame(table).get_indexer(pd.MultiIndex.from_frame(cells)).astype(np.int32)
    return table, codes


def judge(x, perturbation, config, *, genes=GENES, cell_type="T", targets=None, codes=None, **cut):
    """Run the filter; return its table by perturbation and which cells stay."""
    cell_type = np.broadcast_to(cell_type, len(perturbation))
    conditions, every = conditions_of(perturbation, cell_type)
    plan = plan_knockdown(conditions, genes, config, targets)
    parts = readers(x, every if codes is None else codes, log=config.input_scale == "log1p", **cut)
    found = [knockdown_values(part, plan.request) for part in parts]
    table, limit = decide(plan, lambda: iter(found), config)
    return table, np.concatenate([stays(f, limit, config.knockdown_cell_residual) for f in found])


def hand_made():
    """Cells of 100 counts: controls express 20 of A, 10 of B, 40 of C and none of D."""
    rows, labels = [], []

    def add(label, a=20, b=10, c=40, d=0):
        rows.append([a, b, c, d, 100 - a - b - c - d])
        labels.append(label)

    for a in (10, 20, 30):
        add("control", a=a)
    for a in (2, 2, 9, 11, 0, 0):  # mean 4 = 0.2 of 20; below 10: all but one
        add("A", a=a)
    for b in (1, 9):  # mean 5 = 0.5 of 10
        add("B", b=b)
    add("C", c=0)  # mean 0, but one cell
    for d in (0, 0, 1):
        add("D", d=d)
    add("E")
    add("A+B", a=0, b=0)
    return np.array(rows, np.float32), np.array(labels)


def test_a_case_by_hand(caplog):
    x, labels = hand_made()
    config = DataConfig(knockdown=True, knockdown_min_cells=2)
    table, stay = judge(x, labels, config, pieces=4, block_rows=2)
    table = table.set_index("perturbation")
    assert list(table.index) == ["A", "A+B", "B", "C", "D", "E"]
    assert table["control_mean"].to_dict() == pytest.approx(
        {"A": 2000, "B": 1000, "C": 4000, "D": 0, "E": np.nan, "A+B": np.nan}, nan_ok=True
    )
    assert table.loc["A", "perturbed_mean"] == pytest.approx(400)
    assert table["residual"].to_dict() == pytest.approx(
        {"A": 0.2, "B": 0.5, "C": 0, "D": np.nan, "E": np.nan, "A+B": np.nan}, nan_ok=True
    )
    assert table["n_cells"].tolist() == [6, 1, 2, 1, 3, 1]
    assert table.loc[["A", "B", "C"], "n_passing"].tolist() == [5, 1, 1]
    assert table["kept"].to_dict() == {k: k == "A" for k in table.index}
    assert table["reason"].to_dict() == {
        "A": "",
        "B": "residual expression is not below 0.3",
        "C": "fewer than 2 cells are below 0.5",
        "D": "control cells do not express the target gene",
        "E": "target gene is not measured",
        "A+B": "target gene is not measured",
    }
    assert labels[stay].tolist() == ["control"] * 3 + ["A"] * 5
    assert x[stay][3:, 0].tolist() == [2, 2, 9, 0, 0]
    assert "drops 2 perturbations whose target gene is not measured (A+B, E)" in caplog.text


def test_a_deep_cell_is_not_an_unperturbed_one_unless_values_are_taken_as_stored():
    x, labels = hand_made()
    x[labels == "A"] *= 10
    config = DataConfig(knockdown=True, knockdown_min_cells=1)
    table, stay = judge(x, labels, config)
    assert table.set_index("perturbation")["residual"]["A"] == pytest.approx(0.2)
    assert (stay & (labels == "A")).sum() == 5
    raw = config.model_copy(update={"knockdown_values": "stored"})
    table = judge(x, labels, raw)[0].set_index("perturbation")
    assert table["residual"]["A"] == pytest.approx(2.0)
    assert table["control_mean"]["A"] == pytest.approx(20)


def test_each_cell_type_by_its_own_controls():
    x, labels = hand_made()
    both = np.concatenate([x, x])
    both[len(x) :, 0] *= np.where(labels == "control", 0.1, 1)  # the other type hardly expresses A
    two = np.repeat(["T", "U"], len(x))
    config = DataConfig(knockdown=True, knockdown_min_cells=1, knockdown_by="cell_type")
    table, stay = judge(both, np.tile(labels, 2), config, cell_type=two)
    kept = table.set_index(["perturbation", "cell_type"])["kept"]
    assert kept[("A", "T")]
    assert not kept[("A", "U")]
    assert kept[("C", "U")]
    assert stay[: len(x)].sum() == stay[len(x) :].sum() + 5
    pooled = judge(both, np.tile(labels, 2), config.model_copy(update={"knockdown_by": "all"}))[0]
    assert pooled["cell_type"].unique().tolist() == ["all"]
    assert pooled.set_index("perturbation")["control_mean"]["A"] == pytest.approx(
        1e4 * np.mean(both[np.tile(labels, 2) == "control", 0] / both[np.tile(labels, 2) == "control"].sum(1))
    )


def test_a_cell_type_without_controls_is_dropped_with_the_reason():
    x, labels = hand_made()
    config = DataConfig(knockdown=True, knockdown_min_cells=1, knockdown_by="cell_type")
    kinds = np.where(np.arange(len(labels)) == np.flatnonzero(labels == "A")[0], "U", "T")
    table, _ = judge(x, labels, config, cell_type=kinds)
    alone = table[table["cell_type"] == "U"].iloc[0]
    assert (alone["perturbation"], alone["reason"]) == ("A", "no control cells to compare with")


def test_cells_that_other_filters_dropped_do_not_count():
    x, labels = hand_made()
    codes = conditions_of(labels, np.full(len(labels), "T"))[1]
    dropped = (x[:, 0] == 30) | (labels == "B") | (labels == "A") & (x[:, 0] == 11)
    codes[dropped] = -1
    table, _ = judge(x, labels, DataConfig(knockdown=True, knockdown_min_cells=1), codes=codes)
    table = table.set_index("perturbation")
    assert table["control_mean"]["A"] == pytest.approx(1500)
    assert (table["n_cells"]["A"], table["n_passing"]["A"]) == (5, 4)
    assert table["reason"]["B"] == "no cell passes the other filters"


def published_rule(x, labels, genes, residual, cell_residual, min_cells, control="control"):
    """The rule as cell-load states it, on a dense matrix; returns the cells that stay."""
    stay = labels == control
    for name in sorted(set(labels) - {control}):
        if name not in genes:
            continue
        values = x[:, genes.index(name)]
        mean = values[labels == control].mean()
        own = labels == name
        if np.isclose(mean, 0) or not values[own].mean() / mean < residual:
            continue
        passing = own & (values / mean < cell_residual)
        if passing.sum() >= min_cells:
            stay |= passing
    return stay


@pytest.mark.parametrize("scale", ["counts", "log1p"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_published_rule(seed, scale):
    rng = np.random.default_rng(seed)
    genes = [f"g{k}" for k in range(40)]
    labels = rng.choice(["control", *genes[:25], "unknown"], 1500)
    mean = rng.lognormal(0, 1.2, 40)
    strength = rng.choice([0.02, 0.15, 0.3, 0.6, 1.0], 40)
    x = np.empty((len(labels), 40))
    for k, name in enumerate(labels):
        own = mean.copy()
        if name in genes:
            own[genes.index(name)] *= strength[genes.index(name)]
        x[k] = rng.poisson(own * rng.lognormal(0, 0.4))
    x[7] = 0
    if scale == "log1p":
        x = np.log1p(x)
    config = DataConfig(knockdown=True, knockdown_min_cells=20, input_scale=scale)
    table, stay = judge(x, labels, config, genes=genes, pieces=5, block_rows=61)
    linear = np.expm1(x) if scale == "log1p" else 1e4 * x / np.maximum(x.sum(axis=1, keepdims=True), 1)
    expected = published_rule(linear, labels, genes, 0.3, 0.5, 20)
    np.testing.assert_array_equal(stay, expected)
    assert table["kept"].sum() == len(set(labels[stay])) - 1 > 0
    stored = config.model_copy(update={"knockdown_values": "stored"})
    stay = judge(x, labels, stored, genes=genes)[1]
    np.testing.assert_array_equal(stay, published_rule(x, labels, genes, 0.3, 0.5, 20))


def test_pieces_do_not_change_the_outcome():
    x, labels = hand_made()
    config = DataConfig(knockdown=True, knockdown_min_cells=2)
    table, stay = judge(x, labels, config, pieces=1, block_rows=1000)
    for pieces, rows in ((2, 3), (5, 1), (16, 7)):
        again, same = judge(x, labels, config, pieces=pieces, block_rows=rows)
        pd.testing.assert_frame_equal(again, table)
        np.testing.assert_array_equal(same, stay)


def test_targets_from_a_column(tmp_path):
    x, labels = hand_made()
    labels = np.where(labels == "A+B", "combo", np.char.add("sg_", labels)).astype(object)
    labels[labels == "sg_control"] = "control"
    target = [None if n == "control" else "B" if n == "combo" else n.removeprefix("sg_") for n in labels]
    obs = pd.DataFrame({"perturbation": labels, "gene": target}, index=[f"c{i}" for i in range(len(labels))])
    obs["gene"] = obs["gene"].astype("category")
    ad.AnnData(sp.csr_matrix(x), obs, pd.DataFrame(index=GENES)).write_h5ad(tmp_path / "x.h5ad")
    config = DataConfig(
        knockdown=True, knockdown_min_cells=1, knockdown_gene_key="gene", cell_type_key=None, batch_key=None
    )
    conditions, codes = conditions_of(labels, np.full(len(labels), "all"))
    with Inputs([tmp_path / "x.h5ad"], config, tmp_path) as inputs:
        targets = read_targets(inputs, conditions, codes)
    assert targets == {f"sg_{k}": k for k in "ABCDE"} | {"combo": "B"}
    table, _ = judge(x, labels, config, targets=targets)
    table = table.set_index("perturbation")
    assert table["kept"].to_dict() == {
        "combo": True, "sg_A": True, "sg_B": False, "sg_C": True, "sg_D": False, "sg_E": False,
    }  # fmt: skip
    del targets["sg_C"]
    table = judge(x, labels, config, targets=targets)[0].set_index("perturbation")
    assert table["reason"]["sg_C"] == "no target gene is given"
    obs["gene"] = obs["gene"].astype(object)
    obs.iloc[4, 1] = "D"
    ad.AnnData(sp.csr_matrix(x), obs, pd.DataFrame(index=GENES)).write_h5ad(tmp_path / "y.h5ad")
    with (
        Inputs([tmp_path / "y.h5ad"], config, tmp_path) as inputs,
        pytest.raises(UserError, match=r"y.h5ad: obs column 'gene' .* 'sg_A' two targets"),
    ):
        read_targets(inputs, conditions, codes)


def test_nothing_to_judge_is_an_error():
    x, labels = hand_made()
    config = DataConfig(knockdown=True)
    with pytest.raises(
        UserError, match=r"none of the 6 target genes \(A, A\+B, B.*\) is among the 5 genes.*gene_key"
    ):
        judge(x, labels, config, genes=[f"ENSG{k}" for k in range(5)])
    with pytest.raises(UserError, match="none of the 6 perturbations passes.*smallest residual 0"):
        judge(x, labels, config)


def screen(seed=0, cells=900):
    """Counts of 60 genes; g0 to g5 are knocked down to 5 %, g6 and g7 are not, one label is no gene."""
    rng = np.random.default_rng(seed)
    genes = [f"g{k}" for k in range(60)]
    obs = pd.DataFrame(
        {
            "perturbation": rng.choice(["control", "control", *genes[:8], "none"], cells),
            "cell_type": rng.choice(["B", "T"], cells),
            "batch": rng.choice(["d1", "d2"], cells),
        },
        index=[f"c{i}" for i in range(cells)],
    )
    mean = np.tile(rng.lognormal(2, 0.5, 60), (cells, 1))
    for k in range(6):
        mean[obs["perturbation"] == f"g{k}", k] *= 0.05
    x = rng.poisson(mean * rng.lognormal(0, 0.3, (cells, 1))).astype(np.float32)
    x[:5] = 0
    return ad.AnnData(sp.csr_matrix(x), obs, pd.DataFrame(index=genes))


@pytest.mark.parametrize("flavor", ["seurat", "cell_ranger", "seurat_v3"])
def test_a_store_holds_what_is_left_and_its_genes_are_chosen_from_that(tmp_path, monkeypatch, flavor):
    monkeypatch.setattr(passes, "VALUES_PER_PIECE", 10_000)
    adata = screen()
    adata.write_h5ad(tmp_path / "x.h5ad")
    values = adata.X.toarray()
    kept = published_rule(
        1e4 * values / np.maximum(values.sum(axis=1, keepdims=True), 1),
        adata.obs["perturbation"].to_numpy(str), list(adata.var_names), 0.3, 0.5, 30,
    )  # fmt: skip
    shallow = np.diff(adata.X.indptr) < 20
    assert shallow.sum() == 5
    kept &= ~shallow
    config = DataConfig(num_hvgs=12, hvg_flavor=flavor, min_genes=20)
    full = config.model_copy(update={"knockdown": True})
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "filtered", full, machine=HERE))
    adata[kept].write_h5ad(tmp_path / "y.h5ad")
    other = Store(preprocess([tmp_path / "y.h5ad"], tmp_path / "given", config, machine=HERE))
    assert sorted(store.obs(["cell"])["cell"]) == sorted(adata.obs_names[kept])
    assert store.genes == other.genes
    assert store.target_sum == other.target_sum
    pd.testing.assert_frame_equal(store.var, other.var, rtol=1e-9)
    pd.testing.assert_frame_equal(store.perturbations, other.perturbations)
    table = pd.read_csv(tmp_path / "filtered" / "knockdown.csv").set_index("perturbation")
    assert sorted(table.index[table["kept"]]) == [f"g{k}" for k in range(6)]
    assert table["reason"]["none"] == "target gene is not measured"
    assert table.loc[table["kept"], "n_passing"].sum() == (adata.obs["perturbation"][kept] != "control").sum()
    quality = pd.read_csv(tmp_path / "filtered" / "qc.csv")
    assert quality["dropped_knockdown"].sum() == 900 - 5 - kept.sum()
    given = pd.read_csv(tmp_path / "given" / "qc.csv")
    columns = ["cell_type", "batch", "cells_kept", "median_counts", "median_genes"]
    pd.testing.assert_frame_equal(
        quality[columns].sort_values(columns[:2], ignore_index=True),
        given[columns].sort_values(columns[:2], ignore_index=True),
    )


def test_a_screen_without_effect_is_an_error_and_leaves_nothing(tmp_path):
    adata = screen()
    adata.X = sp.csr_matrix(np.random.default_rng(0).poisson(5, adata.shape).astype(np.float32))
    adata.write_h5ad(tmp_path / "x.h5ad")
    with pytest.raises(UserError, match=r"none of the 9 perturbations passes \(most often: residual"):
        preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig(knockdown=True))
    assert not (tmp_path / "store").exists()
