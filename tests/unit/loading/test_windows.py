"""Sets cut from windows are as good as random rows, and their bookkeeping is small."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pandas as pd
import pytest

from perturbdiff.conditions.condition import condition_table
from perturbdiff.loading.windows import WindowedSampler

CELLS, CONTROLS, GROUPS, GENES = 6000, 5000, 12, 300


def table(sizes: dict[str, int], cell_types: int = 1) -> pd.DataFrame:
    keys = [(f"t{i:04d}", "x", name) for i in range(cell_types) for name in sizes]
    frame = pd.DataFrame(keys, columns=["cell_type", "batch", "perturbation"])
    return condition_table(frame.assign(n_cells=list(sizes.values()) * cell_types), "control")


def error_of_means(sets: list[np.ndarray], values: np.ndarray) -> float:
    """Return the squared error of sets' means over that of as many random cells, drawn without replacement."""
    population, size = len(values), len(sets[0])
    random = values.var(0).sum() / size * (population - size) / (population - 1)
    found = [((values[rows].mean(0) - values.mean(0)) ** 2).sum() for rows in sets]
    return float(np.mean(found) / random)


def grouped(cells: int, *, shuffled: bool) -> np.ndarray:
    """Return values [cells, genes] of cells in hidden groups of different means."""
    rng = np.random.default_rng(cells)
    group = np.sort(rng.integers(0, GROUPS, cells))
    values = rng.normal(size=(cells, GENES)) + rng.normal(0, 0.5, (GROUPS, GENES))[group]
    return values[rng.permutation(cells)] if shuffled else values


def windowed_sets(size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    conditions = table({"control": CONTROLS, "p": CELLS})
    sampler = WindowedSampler(conditions, np.array([False, True]), set_size=size, sets_per_step=8, seed=4)
    epochs = 12 if size > 100 else 2
    sets = [sampler.set_at(i) for i in range(epochs * sampler.sets_per_epoch)]
    return [s.target - CONTROLS for s in sets], [s.control for s in sets]


@pytest.mark.parametrize("size", [256, 32])
def test_a_set_has_the_sampling_error_of_random_cells(size):
    targets, controls = windowed_sets(size)
    assert all(len(set(rows)) == size for rows in (*targets, *controls))
    assert error_of_means(targets, grouped(CELLS, shuffled=True)) == pytest.approx(1, abs=0.05)
    assert error_of_means(controls, grouped(CONTROLS, shuffled=True)) == pytest.approx(1, abs=0.05)
    # the measure detects a store that was not shuffled when it was written
    assert error_of_means(targets, grouped(CELLS, shuffled=False)) > 1.05


@pytest.mark.parametrize("kind", [0, 1])
def test_a_set_lies_in_several_windows(kind):
    touched = [len(np.unique(rows // 64)) for rows in windowed_sets(256)[kind]]
    assert min(touched) >= 4  # not in one window
    assert max(touched) <= 9 * 3 + 1  # nor all over the condition, which has some eighty chunks


def test_pairs_meet_anew_in_each_epoch():
    """Windows of a fixed place would bring the same cells together for ever."""
    conditions = table({"control": 300, "p": 2000})
    sampler = WindowedSampler(conditions, np.array([False, True]), set_size=256, sets_per_step=1, seed=0)
    met = np.zeros((2000, 2000), bool)
    share = []
    for i in range(8 * sampler.sets_per_epoch):
        rows = sampler.set_at(i).target - 300
        met[np.ix_(rows, rows)] = True
        if (i + 1) % sampler.sets_per_epoch == 0:
            share.append(met.mean())
    random = 1 - (1 - share[0]) ** 8
    assert share[-1] > 0.9 * random


def test_successive_steps_hold_several_conditions():
    conditions = table({"control": 5000, **{f"p{i}": 5000 for i in range(40)}})
    use = ~conditions["is_control"].to_numpy(bool)
    sampler = WindowedSampler(conditions, use, set_size=32, sets_per_step=16, seed=0)
    kinds = [len({s.condition for s in sampler.step(k)}) for k in range(20)]
    assert min(kinds) >= 5
    assert np.mean(kinds) >= 7


def test_bookkeeping_of_a_hundred_million_cells_is_small():
    conditions = table({"control": 250_000, **{f"p{i}": 2500 for i in range(100)}}, cell_types=200)
    assert conditions["n_cells"].sum() == 100_000_000
    use = np.ones(len(conditions), bool)
    tracemalloc.start()
    sampler = WindowedSampler(
        conditions, use, set_size=256, sets_per_step=8, seed=0, control_targets=True, quiet=True
    )
    last = sampler.steps_per_epoch - 1
    for k in (0, 1, last, last + 1):
        sampler.step(k)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sampler.sets_per_epoch >= 100_000_000 // 256
    assert peak < 32 * 2**20  # 0.3 bytes a cell
