"""Distances between sets of cells against plain float64 formulas, by hand, and at their edges."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist, pdist
from scipy.stats import wasserstein_distance

from perturbdiff.evaluation.metrics import pairwise_distances
from perturbdiff.evaluation.metrics.pairwise_distances import energy_distance, mmd, pairwise
from perturbdiff.evaluation.metrics.populations import wasserstein
from perturbdiff.evaluation.metrics.sorted_columns import Columns


def draw(rng, n, genes=50, shift=0.0):
    return sp.csr_matrix((rng.poisson(1.0 + shift, (n, genes)) * rng.random((n, genes))).astype(np.float32))


def like_cells(rng, n, genes=2000, spread=0.2):
    """Return cells with the zeros, sizes and squared distances of real ones; half the mean profile is shared."""
    mean = np.random.default_rng(0).gamma(0.3, 1.0, genes) * rng.lognormal(0, spread, genes)
    size = rng.lognormal(0, 0.4, (n, 1))
    return sp.csr_matrix(np.log1p(2 * rng.poisson(rng.gamma(2.0, mean * size / 2))).astype(np.float32))


def plain_energy(x, y):
    x, y = x.toarray().astype(float), y.toarray().astype(float)
    return 2 * cdist(x, y).mean() - pdist(x).mean() - pdist(y).mean()


def plain_mmd(x, y):
    x, y = x.toarray().astype(float), y.toarray().astype(float)
    median = np.median(pdist(y, "sqeuclidean"))

    def alike(squared):
        return np.mean([np.exp(-squared / (s * median)).mean() for s in (0.25, 0.5, 1, 2, 4)])

    between, *within = cdist(x, y, "sqeuclidean"), pdist(x, "sqeuclidean"), pdist(y, "sqeuclidean")
    return alike(within[0]) + alike(within[1]) - 2 * alike(between)


@pytest.mark.parametrize(("n", "m"), [(30, 40), (7, 23), (2, 2), (8, 16)])
def test_distances_equal_the_plain_formulas(monkeypatch, n, m):
    monkeypatch.setattr(pairwise_distances, "_BLOCK", 8)
    rng = np.random.default_rng(n)
    x, y = draw(rng, n), draw(rng, m, shift=0.5)
    assert energy_distance(x, y) == pytest.approx(plain_energy(x, y), rel=1e-5, abs=1e-5)
    assert mmd(x, y) == pytest.approx(plain_mmd(x, y), rel=1e-5, abs=1e-6)


def test_cells_of_2000_genes_lose_nothing_in_float32():
    rng = np.random.default_rng(5)
    x, y = like_cells(rng, 300), like_cells(rng, 350)
    assert energy_distance(x, y) == pytest.approx(plain_energy(x, y), rel=1e-5)
    assert mmd(x, y) == pytest.approx(plain_mmd(x, y), rel=1e-4)


def test_by_hand():
    x, y = (sp.csr_matrix(np.array(v, np.float32)) for v in ([[0, 0], [0, 2]], [[3, 0], [3, 2]]))
    assert energy_distance(x, y) == pytest.approx(2 * (3 + 13**0.5) / 2 - 2 - 2)
    kernel = {d: np.mean(np.exp(-d / (4 * np.array([0.25, 0.5, 1, 2, 4])))) for d in (4, 9, 13)}
    assert mmd(x, y) == pytest.approx(2 * kernel[4] - kernel[9] - kernel[13], rel=1e-6)


def test_distances_are_near_zero_for_equal_distributions_and_grow_with_the_shift():
    rng = np.random.default_rng(0)
    real = draw(rng, 400)
    for distance in (energy_distance, mmd):
        same, near, far = (distance(draw(rng, 400, shift=s), real) for s in (0.0, 0.3, 1.0))
        assert abs(same) < 0.1 * near
        assert near < far


def test_estimates_are_unbiased():
    rng = np.random.default_rng(6)
    pairs = [(draw(rng, 6, genes=5), draw(rng, 9, genes=5)) for _ in range(400)]
    energy = np.array([energy_distance(x, y) for x, y in pairs])
    assert abs(energy.mean()) < 4 * energy.std() / 20
    many = draw(rng, 500, genes=5)  # few predicted cells against many real ones: the bandwidth hardly moves
    alike = np.array([mmd(draw(rng, 6, genes=5), many) for _ in range(400)])
    assert abs(alike.mean()) < 4 * alike.std() / 20


def test_equal_cells_count_as_equal():
    real = like_cells(np.random.default_rng(7), 80)
    blurred = sp.csr_matrix(
        np.tile(np.asarray(real.mean(axis=0), np.float32), (70, 1))
    )  # a mean for every cell
    assert energy_distance(blurred, real) == pytest.approx(plain_energy(blurred, real), rel=1e-5)
    assert mmd(blurred, real) == pytest.approx(plain_mmd(blurred, real), rel=1e-4)
    copies = real[np.random.default_rng(8).integers(0, 80, 200)]
    assert energy_distance(copies, real) == pytest.approx(plain_energy(copies, real), rel=1e-4, abs=1e-4)


def test_equal_real_cells_have_an_energy_distance_but_no_bandwidth():
    ones, rest = sp.csr_matrix(np.ones((5, 3), np.float32)), draw(np.random.default_rng(0), 4, genes=3)
    assert np.isnan(mmd(rest, ones))
    assert energy_distance(rest, ones) == pytest.approx(plain_energy(rest, ones), rel=1e-5)
    assert energy_distance(ones, ones) == 0.0


def test_a_draw_is_repeatable_and_close_to_the_whole():
    rng = np.random.default_rng(1)
    x, y = draw(rng, 500, shift=0.5), draw(rng, 400)
    drawn = energy_distance(x, y, max_cells=150, seed=4)
    assert drawn == energy_distance(x, y, max_cells=150, seed=4)
    assert drawn != energy_distance(x, y, max_cells=150, seed=5)
    assert drawn == pytest.approx(energy_distance(x, y), rel=0.3)


@pytest.mark.parametrize("num", [0, 1])
def test_no_distance_with_fewer_than_two_cells(num):
    some = draw(np.random.default_rng(2), 9)
    for x, y in ((some[:num], some), (some, some[:num])):
        assert np.isnan([energy_distance(x, y), mmd(x, y)]).all()
    found = pairwise(some, some, max_cells=9, seed=0, other=some[:num])
    assert np.isnan([found["chance_energy_distance"], found["chance_mmd"]]).all()
    assert np.isfinite(found["mmd"])


def test_the_order_of_cells_and_genes_does_not_matter():
    rng = np.random.default_rng(3)
    x, y = like_cells(rng, 90, genes=300), like_cells(rng, 70, genes=300)
    genes = rng.permutation(300)
    one = pairwise(x, y, max_cells=100, seed=0)
    other = pairwise(
        x[rng.permutation(90)][:, genes], y[rng.permutation(70)][:, genes], max_cells=100, seed=1
    )
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=1e-5)


def test_chance_is_the_same_distance_to_other_cells():
    rng = np.random.default_rng(4)
    x, y, z = draw(rng, 60), draw(rng, 50, shift=0.5), draw(rng, 70, shift=1.0)
    found = pairwise(x, y, max_cells=100, seed=0, other=z)
    assert found["energy_distance"] == energy_distance(x, y)
    assert found["mmd"] == mmd(x, y)
    assert found["chance_energy_distance"] == pytest.approx(plain_energy(x, z), rel=1e-5)
    assert found["chance_mmd"] == pytest.approx(plain_mmd(x, z), rel=1e-4)


def sorted_genes(cells):
    return Columns.of([sp.csr_matrix(cells)])


def test_wasserstein_by_hand():
    x = sorted_genes(np.array([[0, 1, 2, 0], [0, 1, 0, 0], [0, 0, 1, 3]], np.float32))
    y = sorted_genes(np.array([[0, 1, 5, 0], [4, 1, 5, 0]], np.float32))
    np.testing.assert_allclose(wasserstein(x, y), [2.0, 1 / 3, 4.0, 1.0], rtol=1e-7)
    np.testing.assert_array_equal(wasserstein(x, x), 0.0)


values = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.5]), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(values, values)
def test_wasserstein_equals_scipy(x, y):
    found = wasserstein(*(sorted_genes(np.array(v, np.float32)[:, None]) for v in (x, y)))
    assert found[0] == pytest.approx(wasserstein_distance(x, y), abs=1e-12)


def test_wasserstein_of_many_genes_equals_scipy():
    rng = np.random.default_rng(9)
    x, y = like_cells(rng, 60, genes=40), like_cells(rng, 83, genes=40)
    expected = [wasserstein_distance(x.toarray()[:, g], y.toarray()[:, g]) for g in range(40)]
    np.testing.assert_allclose(wasserstein(sorted_genes(x), sorted_genes(y)), expected, rtol=1e-9, atol=1e-12)
