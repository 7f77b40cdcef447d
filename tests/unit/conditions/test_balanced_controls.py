"""Control cells that stand for their pool."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from perturbdiff.conditions import cell_distances, control_matching
from perturbdiff.conditions.condition import Condition, condition_table
from perturbdiff.conditions.control_matching import BalancedControls, Rows, distances, represent
from perturbdiff.runtime import large_arrays


def some_cells(number: int, genes: int = 60, seed: int = 0) -> np.ndarray:
    """Cells of unlike depth, most values zero, log1p [number, genes]."""
    rng = np.random.default_rng(seed)
    depth = rng.gamma(3.0, 1 / 3.0, (number, 1))
    return np.log1p(rng.poisson(depth * rng.gamma(0.5, 1.0, genes))).astype(np.float32)


def a_store(number: int, others: int = 30) -> SimpleNamespace:
    """A store in memory: controls and cells of one perturbation in one context."""
    labels = ["control"] * number + ["p"] * others
    obs = pd.DataFrame({"cell_type": "B", "batch": "d", "perturbation": labels})
    values = sparse.csr_matrix(some_cells(number + others))
    return SimpleNamespace(conditions=condition_table(obs, "control"), expression=lambda rows: values[rows])


def chooser(store: SimpleNamespace, seed: int = 0) -> BalancedControls:
    table = store.conditions
    return BalancedControls(store, Rows(table), seed=seed)


LABELS = Condition("p", "B", "d")
POOL = np.array([0])


def test_distances_are_those_of_the_cells():
    x = some_cells(40)
    exact = np.linalg.norm(x[:, None] - x[None], axis=-1)
    found = distances(sparse.csr_matrix(x)) / (256 * 64)
    np.testing.assert_allclose(found, exact, atol=0.02)
    assert (np.diagonal(found) == 0).all()


def test_distances_of_many_genes_are_the_same_block_by_block(monkeypatch):
    x = sparse.csr_matrix(some_cells(20))
    whole = distances(x)
    monkeypatch.setattr(control_matching, "_GENES", 7)
    np.testing.assert_array_equal(distances(x), whole)


@pytest.mark.parametrize("number", [10, 40, 130])
def test_means_are_nearer_than_by_chance_and_the_spread_stays(number):
    x = some_cells(200)
    apart, total = distances(sparse.csr_matrix(x)), x.var(0, ddof=1).sum()
    error, chance, spread, nonzero = [], [], [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        chosen, random = x[represent(apart, number, rng)], x[rng.permutation(200)[:number]]
        error.append(np.square(chosen.mean(0) - x.mean(0)).sum())
        chance.append(np.square(random.mean(0) - x.mean(0)).sum())
        spread.append(chosen.var(0, ddof=1).sum() / total)
        nonzero.append((chosen > 0).mean() / (x > 0).mean())
    assert np.mean(error) < {10: 0.75, 40: 0.45, 130: 0.45}[number] * np.mean(chance)
    assert np.mean(spread) == pytest.approx(1, abs=0.06)
    assert np.mean(nonzero) == pytest.approx(1, abs=0.03)


def test_every_cell_is_about_as_likely_as_any_other():
    x = some_cells(64)
    apart, times = distances(sparse.csr_matrix(x)), np.zeros(64)
    for seed in range(600):
        times[represent(apart, 8, np.random.default_rng(seed))] += 1
    assert times.min() > 35  # 75 expected; by chance alone 40 is more than four standard deviations away
    assert times.max() < 115
    assert abs(np.corrcoef(times, (x > 0).sum(1))[0, 1]) < 0.35


@pytest.mark.parametrize("number", [0, 1, 2, 31, 32, 33, 63, 64])
def test_any_number_of_cells_without_repeats(number):
    apart = distances(sparse.csr_matrix(some_cells(64)))
    chosen = represent(apart, number, np.random.default_rng(0))
    assert len(set(chosen.tolist())) == len(chosen) == number


def test_equal_cells_are_no_difficulty():
    assert len(set(represent(np.zeros((9, 9), np.int32), 4, np.random.default_rng(0)).tolist())) == 4


def test_each_control_is_used_before_any_is_used_again():
    found = chooser(a_store(40)).take(POOL, LABELS, 100)
    assert sorted(found[:40]) == sorted(found[40:80]) == list(range(40))
    assert len(set(found[80:].tolist())) == 20
    assert list(found[:40]) != list(found[40:80])


def test_the_choice_is_of_seed_and_labels_alone():
    store = a_store(40)
    one = chooser(store)
    first = one.take(POOL, LABELS, 15)
    one.take(POOL, ("q", "B", "d"), 7)
    np.testing.assert_array_equal(one.take(POOL, LABELS, 15), first)
    np.testing.assert_array_equal(chooser(store).take(POOL, LABELS, 15), first)
    assert sorted(one.take(POOL, ("q", "B", "d"), 15)) != sorted(first)
    assert sorted(chooser(store, seed=1).take(POOL, LABELS, 15)) != sorted(first)


def test_only_controls_are_read():
    store = a_store(40)
    read, rows = [], store.expression
    store.expression = lambda asked: (read.append(asked), rows(asked))[1]
    chooser(store).take(POOL, LABELS, 15)
    assert sorted(np.concatenate(read)) == list(range(40))


@pytest.mark.parametrize("number", [3, 20, 50, 100, 149])
def test_a_large_pool_is_compared_in_slices(monkeypatch, number):
    monkeypatch.setattr(control_matching, "SLICE", 32)
    store = a_store(150)
    sizes, rows = [], store.expression
    store.expression = lambda asked: (sizes.append(len(asked)), rows(asked))[1]
    found = chooser(store).take(POOL, LABELS, number)
    assert len(set(found.tolist())) == number
    assert max(sizes) <= 32
    assert len(sizes) == min(5, -(-number // 16))


def test_memory_holds_some_rows_of_the_distances_at_a_time(monkeypatch):
    monkeypatch.setattr(large_arrays, "LONG_BYTES", 1 << 10)
    number = 1200
    values = sparse.csr_matrix(some_cells(number, genes=20))
    tracemalloc.start()
    try:
        apart = distances(values)
        represent(apart, 100, np.random.default_rng(0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * number * number, "products of all cells alone would take that"
    np.testing.assert_array_equal(apart, apart.T)
    np.testing.assert_allclose(
        apart[:50] / (64 * 256), cell_distances.distances(values[:50].toarray(), values.toarray()), atol=0.02
    )
