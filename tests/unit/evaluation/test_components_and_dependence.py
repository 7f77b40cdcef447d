"""The MMD in components and the dependence of genes: against slow formulas, and what each does and does not see."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from perturbdiff.evaluation.metrics.pairwise_distances import energy_distance, mmd, mmd_in_components
from perturbdiff.evaluation.metrics.populations import condition_metrics
from perturbdiff.evaluation.metrics.realism import dependence_gap

NAMES = ("mmd_pc", "dependence_gap")


def cells(rng, n, genes=40, *, shared=0.7, shift=0.0):
    """Return log1p values of genes in four modules, whose genes vary together as far as ``shared`` says."""
    common = rng.standard_normal((n, 4))[:, np.arange(genes) % 4]
    latent = np.sqrt(shared) * common + np.sqrt(1 - shared) * rng.standard_normal((n, genes))
    rates = np.linspace(0.3, 4, genes) * np.exp(0.7 * latent - 0.25)
    return sp.csr_matrix(np.log1p(rng.poisson(rates)) + shift * (np.arange(genes) < 5)).astype(np.float32)


def shuffled(rng, side):
    """Return cells whose genes are the same one by one, but independent."""
    return sp.csr_matrix(rng.permuted(side.toarray(), axis=0))


def test_the_mmd_in_components_equals_the_plain_formula():
    rng = np.random.default_rng(0)
    x, y, control = cells(rng, 45), cells(rng, 50, shift=0.5), cells(rng, 30).toarray().mean(axis=0)
    order = np.argsort(((y.toarray() - y.toarray().mean(axis=0)) ** 2).sum(axis=1))

    def squared(one, other):
        return ((one[:, None] - other[None]) ** 2).sum(axis=2)

    def in_components(fitted, scored):
        axes = np.linalg.svd(fitted - control, full_matrices=False)[2][: len(fitted) // 10]
        a, b = x.toarray() @ axes.T, scored @ axes.T
        within = squared(b, b)[np.triu_indices(len(b), 1)]

        def kernel(distances):
            widths = np.array([0.25, 0.5, 1, 2, 4]) * np.median(within)
            return np.exp(-distances[..., None] / widths).mean()

        return kernel(squared(a, a)[np.triu_indices(45, 1)]) + kernel(within) - 2 * kernel(squared(a, b))

    one, two = (y.toarray()[order[first::2]] for first in (0, 1))
    expected = (in_components(one, two) + in_components(two, one)) / 2
    assert mmd_in_components(x, y, control=control) == pytest.approx(expected, rel=1e-4)


def test_the_components_hold_the_change_and_leave_out_noise():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(5):
        sides = [cells(rng, n, shift=shift) for n, shift in ((120, 0.4), (120, 0.4), (200, 0))]
        # 400 genes of nothing but noise
        sides = [
            sp.hstack([c, sp.random(c.shape[0], 400, 0.3, "csr", random_state=rng)]).tocsr() for c in sides
        ]
        real, good, control = sides
        mean = np.asarray(control.mean(axis=0)).ravel()
        found.append([mmd_in_components(side, real, control=mean) for side in (good, control)])
        found[-1] += [mmd(side, real) for side in (good, control)]
    close, far, _, plain_far = np.transpose(found)
    assert abs(close.mean()) < 4 * close.std() / np.sqrt(5) + 1e-3  # no bias by axes fitted to noise
    assert far.mean() > 5 * plain_far.mean()
    assert far.mean() > 20 * abs(close.mean())


def test_more_cells_than_the_components_are_fitted_to():
    rng = np.random.default_rng(2)
    x, y = cells(rng, 300), cells(rng, 1200, shift=0.5)
    found = mmd_in_components(x, y)
    assert found == pytest.approx(mmd_in_components(x, y[rng.permutation(1200)]), rel=1e-3)
    assert found > 5 * abs(mmd_in_components(cells(rng, 300, shift=0.5), y))


def test_the_dependence_gap_equals_the_slow_formula():
    rng = np.random.default_rng(3)
    x, y = cells(rng, 60, genes=8), cells(rng, 70, genes=8, shared=0.2)
    total = []
    for i in range(8):
        for j in range(i):
            rho, noise = [], []
            for side in (x.toarray(), y.toarray()):
                a, b = (stats.zscore(stats.rankdata(side[:, k])) for k in (i, j))
                r = stats.spearmanr(side[:, i], side[:, j]).statistic
                rho.append(r)
                noise.append(np.mean((a * b - r * (a * a + b * b) / 2) ** 2) / (len(a) - 1))
            total.append((rho[0] - rho[1]) ** 2 - sum(noise))
    assert dependence_gap(x, y) == pytest.approx(np.mean(total), rel=1e-6)


def test_it_sees_dependence_that_distances_of_populations_miss():
    rng = np.random.default_rng(4)
    same, broken = [], []
    for _ in range(6):
        real, other = cells(rng, 200), cells(rng, 200)
        same.append([f(other, real) for f in (dependence_gap, energy_distance, mmd)])
        broken.append([f(shuffled(rng, other), real) for f in (dependence_gap, energy_distance, mmd)])
    sizes = (np.mean(broken, axis=0) - np.mean(same, axis=0)) / np.std(same, axis=0, ddof=1)
    assert sizes[0] > 15 > 3 * max(sizes[1:])
    assert abs(np.mean(same, axis=0)[0]) < 0.05 * np.mean(broken, axis=0)[0]  # unbiased: near 0


@pytest.mark.parametrize("n", [20, 60, 300])
def test_equal_dependence_is_near_zero_for_any_number_of_cells(n):
    rng = np.random.default_rng(5)
    gaps = [dependence_gap(cells(rng, n, genes=12), cells(rng, n, genes=12)) for _ in range(40)]
    assert abs(np.mean(gaps)) < 4 * np.std(gaps) / np.sqrt(len(gaps)) + 2e-3


def test_only_the_dependence_matters():
    rng = np.random.default_rng(6)
    x, y = cells(rng, 50), cells(rng, 60)
    stretched = sp.csr_matrix(x.power(2) + x * 3)  # a rising function of each gene's values
    assert dependence_gap(stretched, y) == pytest.approx(dependence_gap(x, y), abs=1e-12)
    assert dependence_gap(y, y) < 0 < dependence_gap(shuffled(rng, y), y)


def test_the_order_of_cells_and_genes_does_not_matter():
    rng = np.random.default_rng(7)
    x, y, control = cells(rng, 50), cells(rng, 60), rng.random(40)
    order = rng.permutation(40)
    one = condition_metrics(x, y, NAMES, max_cells=100, seed=0, control=control)
    turned = (side[rng.permutation(side.shape[0])][:, order] for side in (x, y))
    two = condition_metrics(*turned, NAMES, max_cells=100, seed=0, control=control[order])
    assert two == pytest.approx(one, rel=1e-4, abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    kind=st.sampled_from(["any", "zero", "equal", "one gene"]),
)
def test_degenerate_cells_give_a_number_or_nan_and_no_warning(seed, sizes, kind):
    rng = np.random.default_rng(seed)
    genes = 1 if kind == "one gene" else 5
    sides = [np.log1p(rng.poisson(0.5, (n, genes))).astype(np.float32) for n in sizes]
    for side in sides:
        side[:] = {"zero": 0, "equal": 1}.get(kind, side)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = condition_metrics(
            *map(sp.csr_matrix, sides), NAMES, max_cells=3, seed=0, other=sp.csr_matrix(sides[0])
        )
    assert not np.isinf(list(found.values())).any()
    if min(sizes) < 2:
        assert np.isnan(found["mmd_pc"])
    if min(sizes) < 3 or kind in ("zero", "equal", "one gene"):
        assert np.isnan(found["dependence_gap"])
