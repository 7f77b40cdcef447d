"""Energy distance against all pairs, and the realism figures on cells with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.spatial.distance import cdist

from perturbdiff.evaluation import distances
from perturbdiff.evaluation.distances import correlation_agreement, energy_distance, realism


def draw(rng, n, genes=50, shift=0.0):
    return sp.csr_matrix((rng.poisson(1.0 + shift, (n, genes)) * rng.random((n, genes))).astype(np.float32))


def all_pairs(x, y):
    x, y = x.toarray().astype(float), y.toarray().astype(float)
    n, m = len(x), len(y)
    return 2 * cdist(x, y).mean() - cdist(x, x).sum() / (n * (n - 1)) - cdist(y, y).sum() / (m * (m - 1))


@pytest.mark.parametrize(("n", "m"), [(30, 40), (7, 23), (2, 2)])
def test_energy_distance_equals_all_pairs(monkeypatch, n, m):
    monkeypatch.setattr(distances, "_BLOCK", 8)
    rng = np.random.default_rng(n)
    x, y = draw(rng, n), draw(rng, m, shift=0.5)
    assert energy_distance(x, y) == pytest.approx(all_pairs(x, y), rel=1e-4, abs=1e-5)


def test_energy_distance_is_near_zero_for_equal_distributions_and_grows_with_the_shift():
    rng = np.random.default_rng(0)
    real = draw(rng, 400)
    same, near, far = (energy_distance(draw(rng, 400, shift=s), real) for s in (0.0, 0.3, 1.0))
    assert abs(same) < 0.1 * near
    assert near < far


def test_a_draw_is_repeatable_and_close_to_the_whole():
    rng = np.random.default_rng(1)
    x, y = draw(rng, 500, shift=0.5), draw(rng, 400)
    drawn = energy_distance(x, y, max_cells=150, seed=4)
    assert drawn == energy_distance(x, y, max_cells=150, seed=4)
    assert drawn != energy_distance(x, y, max_cells=150, seed=5)
    assert drawn == pytest.approx(energy_distance(x, y), rel=0.3)


def test_one_cell_has_no_distance_and_no_spread():
    x = sp.csr_matrix(np.ones((1, 4), np.float32))
    y = sp.csr_matrix(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert np.isnan(energy_distance(x, y))
    figures = realism(x, y)
    assert np.isnan(
        [figures["gene_sd_ratio"], figures["cell_sd_ratio"], figures["correlation_agreement"]]
    ).all()
    assert figures["max_value"] == 1.0


def test_realism_of_the_cells_themselves_is_perfect():
    cells = draw(np.random.default_rng(2), 60)
    figures = realism(cells, cells)
    for name in ("nonzero_ratio", "gene_sd_ratio", "cell_sd_ratio", "correlation_agreement"):
        assert figures[name] == pytest.approx(1.0), name


def test_realism_sees_blur_zeros_and_lost_correlations():
    rng = np.random.default_rng(3)
    factor = rng.random((200, 1)) * rng.random((1, 40)) * 3
    real = sp.csr_matrix((factor * (rng.random((200, 40)) < 0.5)).astype(np.float32))
    mean = np.asarray(real.mean(axis=0))
    blurred = sp.csr_matrix((0.5 * real.toarray() + 0.5 * mean).astype(np.float32))
    figures = realism(blurred, real)
    assert figures["nonzero_ratio"] == pytest.approx(1 / (real.nnz / 8000), rel=1e-6)
    assert figures["gene_sd_ratio"] == pytest.approx(0.5, rel=1e-5)
    assert figures["cell_sd_ratio"] == pytest.approx(0.5, rel=1e-5)
    shuffled = real.toarray()
    for gene in range(40):
        shuffled[:, gene] = rng.permutation(shuffled[:, gene])
    assert abs(correlation_agreement(sp.csr_matrix(shuffled), real)) < 0.3


def test_equal_cells_have_no_correlations():
    same = sp.csr_matrix(np.tile(np.linspace(0.1, 1, 9, dtype=np.float32), (20, 1)))
    real = draw(np.random.default_rng(4), 20, genes=9)
    assert np.isnan(correlation_agreement(same, real))
