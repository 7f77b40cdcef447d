"""The rank test, the adjustment and the fold change against scipy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from scipy import stats

from perturbdiff.evaluation.metrics.differential import (
    DEFINITIONS,
    Columns,
    Controls,
    Differential,
    benjamini_hochberg,
    fold_change,
)


def cells(rng, n, genes=40, density=0.4, decimals=1):
    values = np.round(rng.exponential(1.0, (n, genes)), decimals) * (rng.random((n, genes)) < density)
    return values.astype(np.float32)


@pytest.mark.parametrize("convert", [sp.csr_matrix, sp.csc_matrix, sp.csr_array])
@pytest.mark.parametrize(("n", "m"), [(30, 50), (3, 400), (1, 20), (60, 5), (1, 4000), (40, 3000)])
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


def test_benjamini_hochberg_of_each_perturbation():
    p = np.random.default_rng(1).random((7, 30)) ** 3
    expected = np.stack([stats.false_discovery_control(row) for row in p])
    np.testing.assert_allclose(benjamini_hochberg(p, "perturbation"), expected, rtol=1e-12)


def test_fold_changes_at_zero_means():
    mean, control = np.array([np.log(3.0), 0.0, 1.0, 0.0]), np.array([np.log(2.0), 1.0, 0.0, 0.0])
    np.testing.assert_allclose(fold_change(mean, control), [2.0, 0.05, 20.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(fold_change(mean, control, float("inf")), [2.0, 0.0, np.inf, 1.0], rtol=1e-6)
    new = Differential.of(np.ones((1, 4)), mean[None], control, definition=DEFINITIONS["cell-eval-0.8.2"])
    np.testing.assert_allclose(new.log2_fold[0], [1.0, -np.inf, np.inf, 0.0], rtol=1e-6)


def test_a_change_below_rounding_is_none():
    control = np.array([1.0, 5.0, 1.0, 0.0, 0.01])  # what float32 loses is relative: 5e-7 is a change of 0.01
    change = np.array([[4e-7, 4e-6, 4e-6, 4e-7, 5e-7]])
    table = Differential.of(np.ones((1, 5)), control + change, control)
    np.testing.assert_array_equal(table.delta[0] == 0, [True, True, False, False, False])  # 0 is not rounded
    np.testing.assert_array_equal(table.fold[0, [0, 1, 3]], [1, 1, 20])


def test_the_newer_definition_is_never_exact():
    rng = np.random.default_rng(0)
    x, c = rng.random((4, 25)) + 0.1, rng.random((30, 25))
    p, _ = Controls(sp.csr_matrix(c)).test(sp.csr_matrix(x), definition=DEFINITIONS["cell-eval-0.8.2"])
    expected = stats.mannwhitneyu(x, c, axis=0, method="asymptotic").pvalue
    np.testing.assert_allclose(p, expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [(5,), (40, 1), (7, 200, 3, 90, 12)])
def test_joined_columns_equal_columns_sorted_together(sizes, dtype):
    rng = np.random.default_rng(sum(sizes))
    blocks = [sp.csr_matrix(cells(rng, n, genes=17).astype(dtype)) for n in sizes]
    joined, together = Columns.joined([Columns.of([b]) for b in blocks]), Columns.of(blocks)
    for name in ("values", "starts", "ties", "mean", "num_cells"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(together, name), err_msg=name)


@pytest.mark.parametrize("n", [1, 12, 13, 24, 25, 100, 1000])
def test_columns_are_sorted_and_forget_the_order_of_cells(n):
    rng = np.random.default_rng(n)
    x = cells(rng, n, genes=9, density=0.7, decimals=3)
    found, turned = Columns.of([sp.csr_matrix(x)]), Columns.of([sp.csr_matrix(x[rng.permutation(n)])])
    for gene in range(9):
        values = found.values[found.starts[gene] : found.starts[gene + 1]]
        np.testing.assert_array_equal(values, np.sort(x[x[:, gene] > 0, gene]))
    np.testing.assert_array_equal(found.mean, turned.mean)


def test_float64_cells_keep_their_precision_beside_float32_controls():
    c = np.full((6, 1), 0.1, np.float32)
    x = np.array([[0.1], [0.1], [0.1], [float(np.float32(0.1))]])
    p, _ = Controls(sp.csr_matrix(c)).test(sp.csr_matrix(x))
    expected = stats.mannwhitneyu(x[:, 0], c[:, 0].astype(float), method="asymptotic").pvalue
    np.testing.assert_allclose(p, expected, rtol=1e-12)


def test_a_value_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        Controls(sp.csr_matrix(np.array([[1.0, np.nan]])))
