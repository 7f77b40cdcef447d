"""The rank test, the adjustment and the fold change against scipy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from scipy import stats

from perturbdiff.evaluation.differential import (
    Controls,
    Differential,
    benjamini_hochberg,
    fold_change,
)


def cells(rng, n, genes=40, density=0.4, decimals=1):
    values = np.round(rng.exponential(1.0, (n, genes)), decimals) * (rng.random((n, genes)) < density)
    return values.astype(np.float32)


@pytest.mark.parametrize("convert", [sp.csr_matrix, sp.csc_matrix, sp.csr_array])
@pytest.mark.parametrize(("n", "m"), [(30, 50), (3, 400), (1, 20), (60, 5)])
def test_p_equals_scipy_with_ties(convert, n, m):
    rng = np.random.default_rng(n + m)
    x, c = cells(rng, n), cells(rng, m, density=0.3)
    p, mean = Controls(convert(c)).test(convert(x))
    expected = stats.mannwhitneyu(x.astype(float), c.astype(float), axis=0, method="asymptotic").pvalue
    np.testing.assert_allclose(p, np.nan_to_num(expected, nan=1.0), rtol=1e-10)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-12)


@pytest.mark.parametrize(("n", "m"), [(4, 30), (8, 8), (12, 7), (1, 3)])
def test_small_groups_without_ties_are_exact(n, m):
    rng = np.random.default_rng(0)
    x, c = rng.random((n, 25)) + 0.1, rng.random((m, 25))
    p, _ = Controls(sp.csr_matrix(c)).test(sp.csr_matrix(x))
    np.testing.assert_allclose(p, stats.mannwhitneyu(x, c, axis=0, method="exact").pvalue, rtol=1e-12)


def test_small_groups_with_a_tie_are_asymptotic():
    x, c = np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [0.5], [0.2], [4.0]])
    p, _ = Controls(sp.csr_matrix(c)).test(sp.csr_matrix(x))
    assert p[0] == pytest.approx(stats.mannwhitneyu(x, c, axis=0, method="asymptotic").pvalue[0], rel=1e-12)


def test_a_constant_gene_is_not_different():
    p, _ = Controls(sp.csr_matrix(np.zeros((9, 2)))).test(sp.csr_matrix(np.zeros((4, 2))))
    np.testing.assert_array_equal(p, 1.0)


def test_very_small_p_keeps_its_size():
    x, c = np.full((400, 1), 5.0), np.zeros((4000, 1))
    p, _ = Controls(sp.csr_matrix(c)).test(sp.csr_matrix(x))
    assert p[0] < 1e-300 or p[0] == 0.0


def test_stored_zeros_and_the_input_are_left_alone():
    rng = np.random.default_rng(3)
    x, c = cells(rng, 20), cells(rng, 30)
    stored = sp.csr_matrix(x)
    stored.data[::3] = 0
    before = stored.data.copy()
    p, _ = Controls(sp.csr_matrix(c)).test(stored)
    np.testing.assert_array_equal(stored.data, before)
    expected = stats.mannwhitneyu(stored.toarray().astype(float), c, axis=0, method="asymptotic").pvalue
    np.testing.assert_allclose(p, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("bad", "message"),
    [(np.full((3, 2), -1.0), "negative"), (np.zeros((3, 5)), "genes"), (np.zeros((0, 2)), "cell")],
)
def test_what_cannot_be_tested_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        Controls(sp.csr_matrix(np.ones((4, 2)))).test(sp.csr_matrix(bad))


def test_benjamini_hochberg_equals_scipy_over_the_whole_table():
    p = np.random.default_rng(1).random((7, 30)) ** 3
    p[2, :5] = p[3, 4]
    expected = stats.false_discovery_control(p.ravel()).reshape(p.shape)
    np.testing.assert_allclose(benjamini_hochberg(p), expected, rtol=1e-12)


def test_fold_changes_at_zero_means():
    mean, control = np.array([np.log(3.0), 0.0, 1.0, 0.0]), np.array([np.log(2.0), 1.0, 0.0, 0.0])
    np.testing.assert_allclose(fold_change(mean, control), [2.0, 0.05, 20.0, 1.0], rtol=1e-6)


def test_a_change_below_rounding_is_none():
    control = np.array([1.0, 1.0])
    table = Differential.of(np.ones((1, 2)), control + np.array([[4e-7, 4e-6]]), control)
    assert table.delta[0, 0] == 0
    assert table.fold[0, 0] == 1
    assert table.delta[0, 1] > 0
