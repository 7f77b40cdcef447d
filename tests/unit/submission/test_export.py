"""Submissions: what is accepted is written in the right form, what would be rejected is named at once."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff.predictions import PredictionWriter
from perturbdiff.runtime.errors import UserError
from perturbdiff.submission import check, export
from perturbdiff.submission.requirements import read_panel
from perturbdiff.submission.submission_stage import Request

GENES = ["g3", "g1", "g2", "g4"]
PANEL = ["g1", "g2", "g3"]
CELLS = 5


def cells(seed=0, count=None, perturbations=("g1", "g2"), contexts=("A", "B")):
    """Counts and labels of predicted cells, the labels in turns."""
    labels = [(p, c) for _ in range(count or CELLS) for p in perturbations for c in contexts]
    obs = pd.DataFrame(labels, columns=pd.Index(["perturbation", "cell_type"])).assign(batch="all")
    return np.random.default_rng(seed).poisson(3, (len(obs), len(GENES))), obs


def written(path, values, obs, scale="counts"):
    predicted = None if scale == "log1p" else np.array([True, True, False, True])
    with PredictionWriter(
        path, GENES, method="it", control="ctrl", target_sum=100, predicted=predicted
    ) as writer:
        depth = np.asarray(values).sum(axis=1)
        writer.append(sp.csr_matrix(values), obs.assign(n_counts=depth))
        some = obs.iloc[:4].assign(perturbation="ctrl", source="control", n_counts=depth[:4])
        writer.append(sp.csr_matrix(values[:4]), some)
    return path


@pytest.fixture
def folder(tmp_path):
    """Predictions, and the competition's files."""
    written(tmp_path / "counts.h5ad", *cells())
    (tmp_path / "gene_names.csv").write_text("\n".join(["gene_name", *PANEL]) + "\n")
    (tmp_path / "pert_counts.csv").write_text("target_gene\ng1\ng2\nnon-targeting\n")
    (tmp_path / "manifest.json").write_text(json.dumps({"contexts": ["A", "B"]}))
    return tmp_path


def request(folder, rules="vcc2026", **options):
    given = {
        "predictions": folder / "counts.h5ad",
        "genes": folder / "gene_names.csv",
        "perturbations": folder / "pert_counts.csv",
        "cells": CELLS,
    }
    return Request(rules=rules, **{**given, **options})


def test_what_is_accepted_is_written(folder, caplog):
    caplog.set_level("INFO", logger="perturbdiff")
    out = export(request(folder), folder / "out.h5ad")
    made = ad.read_h5ad(out)
    values, obs = cells()
    assert made.var_names.tolist() == PANEL
    assert list(made.obs.columns) == ["target_gene", "context"]
    assert made.X.dtype == np.float32
    assert sp.issparse(made.X)
    np.testing.assert_array_equal(made.X.toarray(), values[:, [1, 2, 0]])
    assert made.X.nnz == np.count_nonzero(values[:, [1, 2, 0]])
    assert made.obs["target_gene"].astype(str).tolist() == obs["perturbation"].tolist()
    assert made.obs["context"].astype(str).tolist() == obs["cell_type"].tolist()
    assert made.obs_names.is_unique
    assert "1 genes of the predictions are not in the panel" in caplog.text
    assert "4 control cells are left out" in caplog.text
    assert "1 of 4 genes" in caplog.text
    manifest = json.loads((folder / "out.h5ad.manifest.json").read_text())
    assert manifest["results"] == {
        "cells": 4 * CELLS,
        "largest_sum": float(values[:, [1, 2, 0]].sum(axis=1).max()),
    }


def test_the_scorer_gets_control_cells(folder):
    out = export(request(folder, "cell-eval2", perturbations=None, cells=None), folder / "out.h5ad")
    made = ad.read_h5ad(out)
    values, _ = cells()
    assert (made.obs["target"] == made.obs["target_gene"]).all()  # the preset's name
    assert made.obs["target_gene"].astype(str).tolist()[-4:] == ["non-targeting"] * 4
    np.testing.assert_array_equal(made.X.toarray(), np.vstack([values, values[:4]])[:, [1, 2, 0]])


def problems(folder, **options):
    return check(request(folder, **options)).problems


def test_nothing_is_wrong(folder):
    assert problems(folder) == []


def test_all_that_is_wrong_is_named_at_once_and_nothing_is_written(folder, run_cli):
    values, obs = cells(count=3, perturbations=("g1", "g9", "g2-1"), contexts=("A", "C"))
    values[0] = 2**19
    values[[i for i in range(len(obs)) if obs["perturbation"][i] == "g9"]] = 0
    written(folder / "bad.h5ad", values, obs)
    (folder / "gene_names.csv").write_text("\n".join([*PANEL, "g7"]) + "\n")
    arguments = [
        "export", folder / "bad.h5ad", "--for", "vcc2026", "--genes", folder / "gene_names.csv", "--perturbations",
        folder / "pert_counts.csv",
    ]  # fmt: skip
    before = sorted(folder.iterdir())
    told = []
    for how in (["--dry-run"], ["--out", folder / "out.h5ad"]):
        outcome = run_cli(*arguments, *how)
        assert outcome.code == 2
        told.append([line for line in outcome.err.splitlines() if line.startswith("  ")])
    assert sorted(folder.iterdir()) == before
    assert told[0] == told[1]
    for k, text in enumerate([
        "1 of the panel's 4 genes are missing: g7",
        "'C' is no context of this panel; contexts are A, B",
        "'B' is a context without any cell",
        "context 'A': 1 perturbations are not predicted: g2",
        "2 perturbations are not asked for: g2-1, g9; give the gene's name without the number of the guide",
        "1 perturbations have another number of cells than is asked for: g1 has 3, not 400",
        "1 cells have more than 1,000,000 counts, the largest 1,572,864",
        "1 perturbations have no count in any cell: g9",
    ]):  # fmt: skip
        assert text in told[0][k], told[0]
    assert len(told[0]) == 8


def test_values_that_are_no_counts(folder):
    made = ad.read_h5ad(folder / "counts.h5ad")
    values = made.X.toarray().astype(np.float32)
    values[:4, 1] = [-1, 0.5, np.nan, np.inf]
    made.X = sp.csr_matrix(values)
    made.write_h5ad(folder / "odd.h5ad")
    found = problems(folder, predictions=folder / "odd.h5ad")
    assert found == [
        "2 values are not finite",
        "1 values are negative",
        "1 values are no whole number; sample with --values counts",
    ]


def test_control_labels_and_numbers(folder):
    values, obs = cells(perturbations=("g1", "g2", "non-targeting"))
    written(folder / "named.h5ad", values, obs)
    found = problems(folder, predictions=folder / "named.h5ad")
    assert found == ["10 predicted cells are labelled 'non-targeting'; control cells must not be submitted"]
    (folder / "pert_counts.csv").write_text("target_gene,context,n_cells\ng1,A,5\ng2,A,6\ng1,B,\ng2,B,7\n")
    found = problems(folder)
    assert len(found) == 2
    assert "context 'A': 1 perturbations" in found[0]
    assert "g2 has 5, not 6" in found[0]
    assert "g2 has 5, not 7" in found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": "vcc2027"}, "did you mean 'vcc2026'"),
        ({"perturbations": None}, "needs the list of perturbations"),
    ],
)
def test_requests_that_lack_something(folder, options, message):
    with pytest.raises(UserError, match=message):
        check(request(folder, **options))


def test_contexts_must_be_known(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="the contexts are not known"):
        check(request(folder))
    assert problems(folder, contexts=("A", "B")) == []
    assert "'A' is no context" in problems(folder, contexts=("B",))[0]


def test_only_predictions_of_counts_are_exported(folder, run_cli):
    values, obs = cells()
    written(folder / "log1p.h5ad", np.log1p(values), obs, scale="log1p")
    ad.AnnData(values.astype(np.float32), obs.set_axis(obs.index.astype(str))).write_h5ad(
        folder / "real.h5ad"
    )
    with pytest.raises(UserError, match="values are log1p.*--values counts"):
        check(request(folder, predictions=folder / "log1p.h5ad"))
    with pytest.raises(UserError, match="is no predictions file"):
        check(request(folder, predictions=folder / "real.h5ad"))
    with pytest.raises(UserError, match=r"a submission is one .h5ad file"):
        export(request(folder), folder / "out.zarr")
    outcome = run_cli(
        "export", folder / "counts.h5ad", "--for", "cell-eval2", "--genes", folder / "counts.h5ad"
    )
    assert (outcome.code, "name the file to write by --out" in outcome.err) == (2, True)


def test_gene_lists(folder):
    (folder / "plain.txt").write_text("g1\ng2\n")
    assert read_panel(folder / "plain.txt", None, None).genes == ["g1", "g2"]
    assert read_panel(folder / "gene_names.csv", None, None).genes == PANEL
    assert read_panel(folder / "counts.h5ad", None, None).genes == GENES
    (folder / "plain.txt").write_text("g1\ng2\ng1\n")
    with pytest.raises(UserError, match="names a gene twice"):
        read_panel(folder / "plain.txt", None, None)
    (folder / "pert_counts.csv").write_text("name\ng1\n")
    with pytest.raises(UserError, match="lacks the column target_gene"):
        read_panel(folder / "gene_names.csv", folder / "pert_counts.csv", None)
