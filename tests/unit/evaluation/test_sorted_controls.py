"""Controls that are read some at a time and lie in temporary files give the numbers of those held in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from perturbdiff.conditions.condition import Condition
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.evaluation.readers.cells_by_condition import Cells, RowRanges
from perturbdiff.evaluation.scoring import condition_cells
from perturbdiff.evaluation.scoring.scopes import Unit
from perturbdiff.evaluation.scoring.worker_threads import Workers
from perturbdiff.runtime import large_arrays

GROUPS = {("A", "x"): np.arange(5, 45), ("A", "y"): np.arange(50, 53), ("B", "x"): np.arange(60, 99)}


@pytest.fixture
def side() -> Any:
    rng = np.random.default_rng(0)
    values = sp.csr_matrix(
        np.round(rng.exponential(1, (100, 12)), 1) * (rng.random((100, 12)) < 0.5), dtype="f4"
    )
    return SimpleNamespace(cells=lambda rows: values[rows])


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_and_files_change_nothing(side, threads, monkeypatch):
    whole = {group: Columns.of([side.cells(rows)]) for group, rows in GROUPS.items()}
    means = {group: condition_cells.mean_of(side, rows) for group, rows in GROUPS.items()}
    monkeypatch.setattr(condition_cells, "_CELLS_AT_ONCE", 7)
    monkeypatch.setattr(large_arrays, "HELD_BYTES", 0)
    scratch = large_arrays.ScratchArrays().empty
    with Workers(threads) as workers:
        found = condition_cells.sorted_groups(side, GROUPS, workers, scratch)
    unit = Unit((("pooled", "pooled"),), tuple(Condition("p", *group) for group in GROUPS), ())
    for group, rows in GROUPS.items():
        np.testing.assert_array_equal(condition_cells.mean_of(side, rows), means[group])
    pairs = [(found[group], whole[group]) for group in GROUPS]
    pairs.append((condition_cells.joined_groups(unit, found, scratch), Columns.joined([*whole.values()])))
    for columns, expected in pairs:
        for name in ("values", "starts", "ties", "mean", "num_cells"):
            np.testing.assert_array_equal(getattr(columns, name), getattr(expected, name), err_msg=name)


def test_ranges_of_rows_are_rows():
    ranges = RowRanges({Condition("p", "A", "x"): [(7, 9)], Condition("p", "A", "y"): [(2, 5)]})
    assert list(ranges) == [Condition("p", "A", "x"), Condition("p", "A", "y")]
    assert Condition("p", "B", "x") not in ranges
    np.testing.assert_array_equal(ranges[Condition("p", "A", "y")], [2, 3, 4])
    pooled = Cells(SimpleNamespace(), ranges, RowRanges({("A", "x"): [(0, 2)]})).pooled_over(
        frozenset({"batch"})
    )  # type: ignore[arg-type]
    np.testing.assert_array_equal(pooled.rows[Condition("p", "A", "all")], [2, 3, 4, 7, 8])
    np.testing.assert_array_equal(pooled.controls["A", "all"], [0, 1])
