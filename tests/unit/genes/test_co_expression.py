"""Vectors of genes from control cells."""

import numpy as np
import pytest
from small_store import small_store
from written_cells import Cells

from perturbdiff.embeddings import EmbeddingTable
from perturbdiff.genes.co_expression import co_expression, embed_genes
from perturbdiff.runtime.errors import UserError


def cells(controls=400):
    """Genes 0 to 4 follow one factor, 5 to 9 its opposite, 10 to 14 another; gene 15 is constant."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, controls, 1))
    signal = np.concatenate(
        [one + np.zeros((controls, 5)), -one + np.zeros((controls, 5)), other + np.zeros((controls, 5))], 1
    )
    values = 5 + signal + 0.5 * rng.normal(size=signal.shape)
    values = np.concatenate([values, np.ones((controls, 1))], 1)
    moved = values[:2] * rng.normal(size=(2, 16))
    rows = [("B", "x", "control", "train", values), ("B", "x", "p", "test", moved)]
    return Cells(rows, [f"g{i}" for i in range(16)]), values


def test_products_of_vectors_are_the_correlations_of_control_cells():
    store, values = cells()
    table = co_expression(store, width=15)
    found = table.vectors[:15] @ table.vectors[:15].T
    np.testing.assert_allclose(found, np.corrcoef(values[:, :15].T), atol=0.02)
    assert not table.vectors[15].any()
    two = co_expression(store, width=2).vectors
    assert (two[:5] @ two[:5].T).min() > 0.7
    assert (two[:5] @ two[5:10].T).max() < -0.7
    assert np.abs(two[:10] @ two[10:15].T).max() < 0.2


def test_cells_are_thinned_out_and_perturbed_ones_not_read():
    store, _ = cells()
    again = co_expression(store, cells=100)
    assert [len(rows) for rows in store.asked] == [100]
    assert store.asked[0].max() < 400
    assert again.vectors.shape == (16, 15)


def test_a_store_becomes_a_file_and_too_few_controls_are_refused(tmp_path):
    small = small_store(tmp_path / "s")
    table = EmbeddingTable.read(embed_genes(small.store, tmp_path / "genes.parquet"))
    assert len(table.names) == len(set(table.names)) > 3
    with pytest.raises(UserError, match="has 2 control cells; co-expression needs at least 3"):
        co_expression(cells(2)[0])
