"""Bad input of an evaluation: one line that names the place and the remedy, exit code 2, nothing left behind."""

import os
import shutil

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from evaluation_pair import GENES, QUICK, pair_side
from refusals import nothing_left, refused


@pytest.fixture
def given(tmp_path, run_cli):
    """A function that writes both sides after a change of one and evaluates them."""

    def run(change=None, *options, side="pred"):
        sides = {"pred": pair_side(1), "real": pair_side(0)}
        if change is not None:
            result = change(sides[side])
            sides[side] = sides[side] if result is None else result
        for name, adata in sides.items():
            adata.write_h5ad(tmp_path / f"{name}.h5ad")
        return run_cli("evaluate", tmp_path / "pred.h5ad", tmp_path / "real.h5ad", "--out", tmp_path / "out",
                       *QUICK, *options)  # fmt: skip

    return run


def put(value, where=7):
    """Return a change that sets one stored value; ``stored`` says which cell and gene it is."""

    def change(adata):
        adata.X.data[where] = value

    return change


def first(adata, where=7):
    """Return the cell and the gene of a stored value."""
    row = int(np.searchsorted(adata.X.indptr, where, "right")) - 1
    return f"cell 'c{row}', gene '{GENES[adata.X.indices[where]]}'"


def renamed(adata):
    adata.obs = adata.obs.rename(columns={"perturbation": "perturbatoin"})


def undeclared(adata):
    del adata.uns["perturbdiff"]


def counts_as_log(adata):
    return pair_side(1, counts=True, declared={"scale": "log1p"})


def large_counts_as_log(adata):
    adata.X.data = np.expm1(adata.X.data) * 7.5


def log_as_counts(adata):
    adata.uns["perturbdiff"]["scale"] = "counts"


def duplicate_genes(adata):
    adata.var_names = ["g1", "g1", *GENES[2:]]


def fewer_genes(adata):
    return adata[:, 3:].copy()


def no_condition(adata):
    return adata[~((adata.obs["perturbation"] == "p2") & (adata.obs["batch"] == "d2"))].copy()


def other_perturbation(adata):
    adata.obs["perturbation"] = adata.obs["perturbation"].cat.rename_categories({"p2": "p9"})


def no_controls(adata):
    return adata[adata.obs["perturbation"] != "control"].copy()


def only_controls(adata):
    return adata[adata.obs["perturbation"] == "control"].copy()


def unlabelled(adata):
    adata.obs.loc["c5", "batch"] = np.nan


def without_x(adata):
    return ad.AnnData(obs=adata.obs, var=adata.var, uns=adata.uns)


def other_depth(adata):
    adata.uns["perturbdiff"]["target_sum"] = 1e6


def no_cells(adata):
    return adata[:0].copy()


PREDICTED = {
    "nan": (put(np.nan), ["pred.h5ad", "not finite", first(pair_side(1).copy())]),
    "infinite": (put(np.inf), ["pred.h5ad", "not finite", first(pair_side(1))]),
    "negative": (put(-0.5), ["pred.h5ad", "negative", "-0.5", first(pair_side(1))]),
    "counts": (counts_as_log, ["pred.h5ad", "only whole numbers", "--scale counts"]),
    "large counts": (large_counts_as_log, ["pred.h5ad", "too large for log1p", "gene 'g", "--scale counts"]),
    "log as counts": (log_as_counts, ["pred.h5ad", "real.h5ad", "to what depth", "target_sum"]),
    "genes": (fewer_genes, ["pred.h5ad", "3 of the truth's 30 genes are missing: g0, g1, g2"]),
    "duplicate genes": (
        duplicate_genes,
        ["pred.h5ad", "gene names are not unique (g1)", "var_names_make_unique"],
    ),
    "missing": (no_condition, ["pred.h5ad", "2 of the 12 conditions", "B|d2|p2", "--missing skip"]),
    "unknown": (other_perturbation, ["pred.h5ad", "no real cells in", "B|d1|p9"]),
    "only controls": (only_controls, ["pred.h5ad", "no predicted cell"]),
    "unlabelled": (unlabelled, ["pred.h5ad", "obs column 'batch' has 1 missing values", "'c5'"]),
    "column": (renamed, ["pred.h5ad", "no obs column 'perturbation', did you mean 'perturbatoin'"]),
    "no X": (without_x, ["pred.h5ad", "has no X"]),
    "undeclared": (undeclared, ["pred.h5ad", "uns['perturbdiff']"]),
    "no cells": (no_cells, ["pred.h5ad", "has 0 cells"]),
}


@pytest.mark.parametrize("case", PREDICTED)
def test_bad_predictions(given, tmp_path, case):
    change, words = PREDICTED[case]
    refused(given(change), *words)
    nothing_left(tmp_path, "pred.h5ad", "real.h5ad")


TRUTH = {
    "nan": (put(np.nan), ["real.h5ad", "not finite", first(pair_side(0))]),
    "counts": (
        lambda a: pair_side(0, counts=True, declared={"scale": "log1p"}),
        ["real.h5ad", "--scale counts"],
    ),
    "no controls": (no_controls, ["real.h5ad", "no control cell 'control' in column 'perturbation'"]),
    "duplicate genes": (duplicate_genes, ["real.h5ad", "g1"]),
    "genes": (lambda a: a[:, :0].copy(), ["real.h5ad", "0 genes"]),
    "column": (renamed, ["real.h5ad", "did you mean 'perturbatoin'"]),
}


@pytest.mark.parametrize("case", TRUTH)
def test_bad_truth(given, tmp_path, case):
    change, words = TRUTH[case]
    refused(given(change, side="real"), *words)
    nothing_left(tmp_path, "pred.h5ad", "real.h5ad")


OPTIONS = {
    "context": (["--context-col", "cell_typ"], ["no obs column 'cell_typ', did you mean 'cell_type'"]),
    "perturbation": (["--pert-col", "perturbatio"], ["did you mean 'perturbation'"]),
    "batch": (["--batch-col", "lane"], ["no obs column 'lane'", "columns: cell_type, batch"]),
    "control": (["--control", "ctrl"], ["declares its control to be 'control', not 'ctrl'"]),
    "shard": (["--shard", "2/2"], ["--shard '2/2'"]),
    "metric": (["--metrics", "PDCor"], ["PDCor", "did you mean 'PDCorr'"]),
    "own controls": (["--set", "evaluate.controls=theirs"], ["evaluate.controls"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options(given, tmp_path, case):
    options, words = OPTIONS[case]
    refused(given(None, *options), *words)
    nothing_left(tmp_path, "pred.h5ad", "real.h5ad")


def damaged(path, kind):
    """Replace a file by one that cannot be read."""
    if kind == "text":
        path.write_text("cell,gene\n")
    elif kind == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
        (path / "notes.txt").write_text("none")
    else:
        path.unlink()


@pytest.mark.parametrize("kind", ["text", "truncated", "empty", "folder", "gone"])
@pytest.mark.parametrize("side", ["pred", "real"])
def test_a_file_that_cannot_be_read(tmp_path, run_cli, side, kind):
    for name, seed in (("pred", 1), ("real", 0)):
        pair_side(seed).write_h5ad(tmp_path / f"{name}.h5ad")
    damaged(tmp_path / f"{side}.h5ad", kind)
    before = sorted(p.name for p in tmp_path.iterdir())
    outcome = run_cli(
        "evaluate", tmp_path / "pred.h5ad", tmp_path / "real.h5ad", "--out", tmp_path / "out", *QUICK
    )
    refused(outcome, f"{side}.h5ad")
    nothing_left(tmp_path, *before)


def test_h5ad_without_anndata_inside(tmp_path, run_cli):
    import h5py

    with h5py.File(tmp_path / "pred.h5ad", "w") as file:
        file["numbers"] = np.arange(3)
    pair_side(0).write_h5ad(tmp_path / "real.h5ad")
    outcome = run_cli("evaluate", tmp_path / "pred.h5ad", tmp_path / "real.h5ad", "--out", tmp_path / "out")
    refused(outcome, "pred.h5ad", "not an AnnData file")


def test_a_zarr_folder_that_lacks_a_piece(tmp_path, run_cli):
    pair_side(1).write_zarr(tmp_path / "pred.zarr")
    shutil.rmtree(tmp_path / "pred.zarr" / "X" / "indptr")
    pair_side(0).write_h5ad(tmp_path / "real.h5ad")
    outcome = run_cli("evaluate", tmp_path / "pred.zarr", tmp_path / "real.h5ad", "--out", tmp_path / "out")
    refused(outcome, "pred.zarr", "damaged")
    nothing_left(tmp_path, "pred.zarr", "real.h5ad")


def evaluated(tmp_path):
    """Return the pooled means by metric."""
    means = pd.read_csv(tmp_path / "out" / "aggregate.csv")
    return means[means["scope_kind"] == "pooled"].set_index("metric")["nanmean"]


def test_the_same_file_twice_is_a_perfect_prediction(tmp_path, run_cli):
    pair_side(0).write_h5ad(tmp_path / "real.h5ad")
    outcome = run_cli(
        "evaluate", tmp_path / "real.h5ad", tmp_path / "real.h5ad", "--out", tmp_path / "out", *QUICK
    )
    assert outcome.code == 0, outcome.err
    assert "same file" in outcome.err
    assert evaluated(tmp_path)["PDCorr"] == pytest.approx(1)


def test_counts_on_both_sides_by_option(tmp_path, run_cli):
    for name, seed in (("pred", 1), ("real", 0)):
        pair_side(seed, counts=True, declared={"scale": None}).write_h5ad(tmp_path / f"{name}.h5ad")
    line = ("evaluate", tmp_path / "pred.h5ad", tmp_path / "real.h5ad", "--out", tmp_path / "out", *QUICK)
    refused(run_cli(*line), "pred.h5ad", "--scale")
    outcome = run_cli(*line, "--scale", "counts")
    assert outcome.code == 0, outcome.err
    assert evaluated(tmp_path)["PDCorr"] > 0.9


def test_missing_conditions_may_be_skipped(given, tmp_path):
    outcome = given(no_condition, "--missing", "skip")
    assert outcome.code == 0, outcome.err
    assert "2 of the 12 conditions" in outcome.err


@pytest.mark.parametrize("side", ["pred", "real"])
def test_conditions_of_one_cell_have_defined_values(given, tmp_path, side):
    def one_cell(adata):
        mine = np.flatnonzero(adata.obs["perturbation"] == "p2")
        return adata[np.setdiff1d(np.arange(len(adata)), np.setdiff1d(mine, mine[::12]))].copy()

    outcome = given(one_cell, side=side)
    assert outcome.code == 0, outcome.err
    metrics = pd.read_parquet(tmp_path / "out" / "metrics.parquet")
    mine = metrics[(metrics["perturbation"] == "p2") & metrics["metric"].isin(["MSE", "R2", "PDS_L1"])]
    assert len(mine)
    assert np.isfinite(mine["value"]).all()


def test_a_prediction_of_zeros_only_is_scored(given, tmp_path):
    def zeros(adata):
        adata.X = sp.csr_matrix(adata.shape, dtype=np.float32)

    outcome = given(zeros)
    assert outcome.code == 0, outcome.err
    assert "controls are not the real ones" in outcome.err
    assert evaluated(tmp_path)["MSE"] > 0.5


@pytest.mark.parametrize("options", [[], ["--split", "none.parquet"]])
def test_a_ceiling_of_single_cells_or_without_its_split(tmp_path, run_cli, options):
    adata = pair_side(0)
    adata[~adata.obs.duplicated(["perturbation", "cell_type", "batch"])].copy().write_h5ad(
        tmp_path / "real.h5ad"
    )
    outcome = run_cli("ceiling", tmp_path / "real.h5ad", "--out", tmp_path / "out", *options)
    refused(outcome, *(["none.parquet"] if options else ["real.h5ad", "at least two cells"]))
    nothing_left(tmp_path, "real.h5ad")


def test_parts_to_merge_that_are_none(tmp_path, run_cli):
    (tmp_path / "part").mkdir()
    refused(run_cli("merge", tmp_path / "part", "--out", tmp_path / "out"), "part")
    nothing_left(tmp_path, "part")
