"""How cell-like cells are: values by hand, plain formulas, known blemishes, and edges."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from perturbdiff.evaluation.metrics.populations import effect_slope
from perturbdiff.evaluation.metrics.realism import Moments, correlation_agreement, mean_variance_gap, realism


def draw(rng, n, genes=50, scale=1.0):
    mean = np.linspace(0.3, 3.0, genes)
    return sp.csr_matrix(np.log1p(scale * rng.poisson(mean, (n, genes))).astype(np.float32))


RATIOS = (
    *("nonzero_ratio", "library_ratio", "library_sd_ratio", "total_sd_ratio", "detected_sd_ratio"),
    *("gene_sd_ratio", "cell_sd_ratio"),
)


def test_moments_by_hand():
    cells = sp.csr_matrix(np.array([[0, 1, 2], [0, 3, 0]], np.float32))
    found = Moments.of(cells)
    assert found.shape == (2, 3)
    np.testing.assert_array_equal(found.nonzero, [0, 2, 1])
    np.testing.assert_allclose(found.mean, [0, 2, 1])
    np.testing.assert_allclose(found.sd, [0, 1, 1])
    np.testing.assert_allclose(found.cell_mean, [1, 1])
    np.testing.assert_allclose(found.library, [np.expm1(1) + np.expm1(2), np.expm1(3)])
    assert found.largest == 3
    assert found.density == 0.5


def test_stored_zeros_are_zeros():
    cells = sp.csr_matrix(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    cells.data[0] = 0
    np.testing.assert_array_equal(Moments.of(cells).nonzero, [1, 2])


def test_the_cells_themselves_are_perfect():
    cells = draw(np.random.default_rng(2), 60)
    figures = realism(cells, cells)
    for name in (*RATIOS, "correlation_agreement"):
        assert figures[name] == pytest.approx(1.0), name
    assert figures["mean_variance_gap"] == 0
    assert figures["max_value"] == cells.max()


def test_blur_zeros_and_lost_correlations_are_seen():
    rng = np.random.default_rng(3)
    factor = rng.random((200, 1)) * rng.random((1, 40)) * 3
    real = sp.csr_matrix((factor * (rng.random((200, 40)) < 0.5)).astype(np.float32))
    mean = np.asarray(real.mean(axis=0))
    blurred = sp.csr_matrix((0.5 * real.toarray() + 0.5 * mean).astype(np.float32))
    figures = realism(blurred, real)
    assert figures["nonzero_ratio"] == pytest.approx(1 / (real.nnz / 8000), rel=1e-6)
    assert figures["gene_sd_ratio"] == pytest.approx(0.5, rel=1e-5)
    assert figures["cell_sd_ratio"] == pytest.approx(0.5, rel=1e-5)
    assert figures["mean_variance_gap"] == pytest.approx(0.5, rel=1e-5)
    shuffled = real.toarray()
    for gene in range(40):
        shuffled[:, gene] = rng.permutation(shuffled[:, gene])
    assert abs(correlation_agreement(sp.csr_matrix(shuffled), real)) < 0.3


def test_library_sizes_are_those_of_counts():
    counts = np.random.default_rng(4).poisson(2.0, (40, 30)).astype(np.float64)
    real, double = (sp.csr_matrix(np.log1p(c)) for c in (counts, 2 * counts))
    figures = realism(double, real)
    assert figures["library_ratio"] == pytest.approx(2.0)
    sizes = np.log1p(counts.sum(axis=1)).std(), np.log1p(2 * counts.sum(axis=1)).std()
    assert figures["library_sd_ratio"] == pytest.approx(sizes[1] / sizes[0])
    assert figures["total_sd_ratio"] == pytest.approx(2.0)
    assert figures["detected_sd_ratio"] == pytest.approx(1.0)
    assert np.isnan(figures["above_depth"])
    depth = counts.sum(axis=1).max()
    assert realism(real, real, depth=depth)["above_depth"] == 0
    above = (2 * counts.sum(axis=1) > 1.001 * depth).mean()
    assert 0 < realism(double, real, depth=depth)["above_depth"] == above


def test_equal_totals_have_no_spread_to_compare_with():
    rng = np.random.default_rng(10)
    counts = rng.poisson(2.0, (40, 30)) + 1.0
    closed = sp.csr_matrix(np.log1p(1e4 * counts / counts.sum(axis=1, keepdims=True)).astype(np.float32))
    figures = realism(draw(rng, 40, genes=30), closed, depth=1e4)
    assert np.isnan([figures["total_sd_ratio"], figures["library_sd_ratio"]]).all()
    assert realism(closed, closed, depth=1e4)["above_depth"] == 0


def test_the_slope_is_the_share_of_the_change_that_is_predicted():
    rng = np.random.default_rng(11)
    change = np.zeros(400)
    change[:60] = rng.uniform(-1, 1, 60)
    control = rng.uniform(2, 3, 400)
    slopes = []
    for seed in range(30):  # few noisy cells, whose largest changes are too large by chance
        real = sp.csr_matrix(control + change + rng.standard_normal((60, 400)))
        slopes.append(effect_slope(control + 0.7 * change, real, control, seed=seed))
    assert np.mean(slopes) == pytest.approx(0.7, abs=0.03)
    exact = sp.csr_matrix(np.tile(control + change, (4, 1)))
    assert effect_slope(control + 0.7 * change, exact, control) == pytest.approx(0.7)
    assert effect_slope(control, exact, control) == 0
    assert np.isnan(effect_slope(control, exact[:3], control))


def test_no_slope_of_a_change_that_the_cells_do_not_show():
    rng = np.random.default_rng(12)
    control = np.full(400, 2.0)
    real = sp.csr_matrix(control + rng.standard_normal((40, 400)))
    assert np.isnan(effect_slope(control + 0.1, real, control))


def test_a_shift_along_the_trend_is_no_gap_but_a_wrong_spread_is():
    rng = np.random.default_rng(5)
    mean = np.linspace(0.5, 4.0, 400)
    noise = rng.standard_normal((300, 400))
    real = sp.csr_matrix(10 + mean + noise * mean)  # SD = mean − 10
    higher = mean + 0.2
    along = sp.csr_matrix(10 + higher + noise * higher)
    wide = sp.csr_matrix(10 + mean + 1.5 * noise * mean)
    assert mean_variance_gap(Moments.of(along), Moments.of(real)) < 0.05
    assert mean_variance_gap(Moments.of(wide), Moments.of(real)) == pytest.approx(1 / 3, abs=0.05)
    blurred = sp.csr_matrix(np.tile(10 + mean, (300, 1)))
    assert mean_variance_gap(Moments.of(blurred), Moments.of(real)) == 1.0


def test_two_samples_of_the_same_cells_have_nearly_no_gap():
    rng = np.random.default_rng(6)
    x, y = (Moments.of(draw(rng, 200, genes=300)) for _ in range(2))
    assert mean_variance_gap(x, y) < 0.05


@pytest.mark.parametrize("num", [0, 1])
def test_no_spread_with_fewer_than_two_cells(num):
    some = draw(np.random.default_rng(7), 9)
    for x, y in ((some[:num], some), (some, some[:num])):
        figures = realism(x, y)
        undefined = ("library_sd_ratio", "gene_sd_ratio", "cell_sd_ratio", "mean_variance_gap")
        assert np.isnan([figures[n] for n in (*undefined, "correlation_agreement")]).all()
        assert np.isnan(figures["nonzero_ratio"]) == (num == 0)
        assert np.isnan(figures["library_ratio"]) == (num == 0)
    assert np.isnan(realism(some[:0], some)["max_value"])


def test_constant_and_empty_genes():
    same = sp.csr_matrix(np.tile(np.linspace(0.1, 1, 40, dtype=np.float32), (20, 1)))
    nothing = sp.csr_matrix((20, 40), dtype=np.float32)
    real = draw(np.random.default_rng(8), 20, genes=40)
    assert realism(same, real)["gene_sd_ratio"] == 0
    assert realism(same, real)["cell_sd_ratio"] == 0
    assert np.isnan(realism(same, real)["correlation_agreement"])
    figures = realism(real, same)  # equal real cells vary in nothing
    assert np.isnan([figures["gene_sd_ratio"], figures["cell_sd_ratio"], figures["library_sd_ratio"]]).all()
    figures = realism(real, nothing)
    assert np.isnan([figures[n] for n in (*RATIOS, "mean_variance_gap")]).all()
    assert realism(nothing, real)["nonzero_ratio"] == 0
    assert realism(nothing, real)["library_ratio"] == 0
    assert realism(nothing, real)["max_value"] == 0


def test_the_order_of_cells_and_genes_does_not_matter():
    rng = np.random.default_rng(9)
    x, y = draw(rng, 50), draw(rng, 60, scale=2.0)
    genes = rng.permutation(50)
    one = realism(x, y, depth=90.0)
    other = realism(x[rng.permutation(50)][:, genes], y[rng.permutation(60)][:, genes], depth=90.0)
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=1e-9), name
