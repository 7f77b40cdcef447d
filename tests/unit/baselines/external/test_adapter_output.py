"""What an adapter gives back is checked before anything is made of it."""

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff.baselines.external import adapter_output
from perturbdiff.baselines.external.adapter_output import Answer
from perturbdiff.runtime.errors import UserError

GENES = [f"g{i}" for i in range(6)]
QUERIES = pd.DataFrame({"perturbation": ["a", "a", "b", "b", "b"], "cell_type": "T", "batch": "d1"})
MAXIMA = np.full(6, 2.0, np.float32)
VALUES = np.abs(np.random.default_rng(0).normal(size=(5, 6))).astype(np.float32)


def opened(path, values, genes=GENES, names=None):
    ad.AnnData(values, var=pd.DataFrame(index=genes)).write_h5ad(path)
    return Answer(path, "cpa", GENES, QUERIES, MAXIMA, names)


def read(answered):
    with answered:
        blocks = list(answered.cells())
    return pd.concat([obs for obs, _ in blocks]), sp.vstack([values for _, values in blocks]).toarray()


@pytest.mark.parametrize("form", [np.array, sp.csr_matrix, lambda x: x.astype(np.float64)])
def test_dense_and_sparse_values_are_read_in_blocks(tmp_path, monkeypatch, form):
    monkeypatch.setattr(adapter_output, "_ROWS_PER_BLOCK", 2)
    obs, values = read(opened(tmp_path / "x.h5ad", form(VALUES)))
    np.testing.assert_array_equal(values, VALUES)
    assert obs["perturbation"].tolist() == QUERIES["perturbation"].tolist()
    assert "cell" not in obs


def test_names_of_controls_are_handed_on(tmp_path):
    obs, _ = read(opened(tmp_path / "x.h5ad", VALUES, names=np.array(list("vwxyz"), object)))
    assert obs["cell"].tolist() == list("vwxyz")


def test_genes_need_not_be_named(tmp_path):
    with h5py.File(tmp_path / "x.h5ad", "w") as file:
        file["X"] = VALUES
    np.testing.assert_array_equal(
        read(Answer(tmp_path / "x.h5ad", "r", GENES, QUERIES, MAXIMA, None))[1], VALUES
    )


@pytest.mark.parametrize("form", [np.array, sp.csr_matrix])
def test_negative_values_become_zero_and_are_counted(tmp_path, form):
    values = VALUES.copy()
    values[0, :3], values[1, 4] = -0.25, 7.5
    found = opened(tmp_path / "x.h5ad", form(values))
    _, clipped = read(found)
    np.testing.assert_array_equal(clipped, np.maximum(values, 0))
    assert (found.negative, found.largest) == (3, 7.5)
    assert found.above == (values > 2).sum()


def put(value):
    values = VALUES.copy()
    values[3, 2] = value
    return values


@pytest.mark.parametrize(
    ("values", "genes", "words"),
    [
        (
            put(np.nan),
            GENES,
            "not finite.*line 5 of queries.csv, perturbation 'b', gene 'g2'.*3.3% of the values",
        ),
        (put(np.inf), GENES, "not finite"),
        (put(1e5), GENES, "cpa has diverged: it predicts values up to 1e\\+05.*gene 'g2'"),
        (VALUES[:4], GENES, r"are \(4, 6\), expected are \(5, 6\)"),
        (VALUES[:, :5], GENES[:5], r"are \(5, 5\)"),
        (sp.csc_matrix(VALUES), GENES, "csc_matrix; X must be dense or CSR"),
        (VALUES, [*GENES[:4], "g5", "g4"], "column 4 of its predictions is gene 'g5', expected is 'g4'"),
    ],
)
def test_wrong_predictions_are_refused(tmp_path, values, genes, words):
    with pytest.raises(UserError, match=words):
        read(opened(tmp_path / "x.h5ad", values, genes))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match="ended well but wrote no x.h5ad"):
        Answer(tmp_path / "x.h5ad", "cpa", GENES, QUERIES, MAXIMA, None)
    (tmp_path / "x.h5ad").write_text("no")
    with pytest.raises(UserError, match="cannot be read"):
        Answer(tmp_path / "x.h5ad", "cpa", GENES, QUERIES, MAXIMA, None)
