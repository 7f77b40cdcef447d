"""Bootstrap intervals: known spread, repeatable, undefined values, groups, and blocks of draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from perturbdiff.evaluation.scoring import intervals
from perturbdiff.evaluation.scoring.intervals import bootstrap_mean, bootstrap_means


def test_the_interval_is_that_of_the_mean():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    low, high = bootstrap_mean(values, draws=4000, seed=0)
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_two_values_by_hand():
    # Of the four equally likely draws two have the mean 0.5: 2.5 % and 97.5 % lie in the outer quarters.
    assert bootstrap_mean(np.array([0.0, 1.0]), draws=2000, seed=1) == (0.0, 1.0)
    assert bootstrap_mean(np.array([2.0, 2.0, 2.0]), draws=100, seed=1) == (2.0, 2.0)


def test_weights_are_counts_of_draws():
    weights = intervals._table(30, 5000, 3, 0)
    assert weights.shape == (5000, 30)
    np.testing.assert_array_equal(weights.sum(axis=1), 30)
    assert weights.mean(axis=0) == pytest.approx(np.ones(30), abs=0.1)
    assert weights.var(axis=0).mean() == pytest.approx(1 - 1 / 30, abs=0.02)


def test_the_seed_fixes_the_interval():
    values = np.random.default_rng(1).random(20)
    first, second, other = (bootstrap_mean(values, draws=200, seed=s) for s in (7, 7, 8))
    assert first == second != other


def test_undefined_values_are_left_out():
    values = np.random.default_rng(2).random(200)
    gaps = np.concatenate([values, np.full(100, np.nan)])
    low, high = bootstrap_mean(gaps, draws=4000, seed=0)
    whole = bootstrap_mean(values, draws=4000, seed=0)
    assert (low, high) == pytest.approx(whole, abs=0.01)


@pytest.mark.parametrize("values", [[], [1.0], [np.nan, np.nan], [1.0, np.nan]])
def test_fewer_than_two_values_have_no_interval(values):
    assert np.isnan(bootstrap_mean(np.array(values), draws=100, seed=0)).all()


def test_no_draws_no_interval():
    assert np.isnan(bootstrap_mean(np.arange(9.0), draws=0, seed=0)).all()


def test_a_column_does_not_depend_on_the_others():
    values = np.random.default_rng(3).random((50, 4))
    values[::7, 1] = np.nan
    values[1:, 3] = np.nan
    together = np.array(bootstrap_means(values, draws=500, seed=5))
    alone = np.array([bootstrap_mean(values[:, i], draws=500, seed=5) for i in range(4)]).T
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert np.isnan(together[:, 3]).all()
    assert np.isfinite(together[:, :3]).all()


def test_groups_count_alike_and_are_drawn_within():
    rng = np.random.default_rng(4)
    small, large = rng.normal(0, 1, 50), rng.normal(10, 1, 5000)
    values, groups = np.concatenate([small, large]), np.repeat(["b", "a"], [50, 5000])
    low, high = bootstrap_mean(values, draws=3000, seed=0, groups=groups)
    middle = (small.mean() + large.mean()) / 2
    error = np.sqrt(small.var() / 50 + large.var() / 5000) / 2
    assert low == pytest.approx(middle - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(middle + 1.96 * error, abs=0.15 * error)


def test_groups_of_equal_size_are_drawn_apart():
    values = np.tile(np.random.default_rng(5).random(40), 2)
    apart = bootstrap_mean(values, draws=4000, seed=0, groups=np.repeat([0, 1], 40))
    one = bootstrap_mean(values[:40], draws=4000, seed=0)
    assert (apart[1] - apart[0]) == pytest.approx((one[1] - one[0]) / np.sqrt(2), rel=0.08)


def test_groups_of_one_value_say_nothing_of_spread():
    assert np.isnan(bootstrap_mean(np.arange(3.0), draws=50, seed=0, groups=np.arange(3))).all()
    groups = np.array(["a", "a", "b"])
    low, high = bootstrap_mean(np.array([0.0, 1.0, 5.0]), draws=500, seed=0, groups=groups)
    assert (low, high) == (2.5, 3.0)
    without = bootstrap_mean(np.array([0.0, 1.0, np.nan]), draws=500, seed=0, groups=groups)
    assert without == (0.0, 1.0)


def test_blocks_of_draws_give_the_same_weights(monkeypatch):
    whole = intervals._table(11, 60, 9, 2)
    monkeypatch.setattr(intervals, "_HELD", 11 * 7)
    blocks = list(intervals._weights(11, 60, 9, 2))
    assert len(blocks) == 9
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


def test_the_exact_distribution_of_three_values():
    values = np.array([0.0, 1.0, 5.0])
    means = np.array([np.mean(d) for d in itertools.product(values, repeat=3)])
    drawn = intervals._table(3, 40_000, 0, 0) @ values / 3
    for level in (10, 50, 90):
        assert np.percentile(drawn, level) == pytest.approx(np.percentile(means, level), abs=1e-9)
