"""The control cells of the groups: read some at a time, sorted gene by gene, joined for the scopes that pool them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from perturbdiff.conditions.condition import Group
from perturbdiff.evaluation.metrics.sorted_columns import Columns, New
from perturbdiff.evaluation.readers.cells_by_condition import ExpressionView
from perturbdiff.evaluation.scoring.scopes import Unit
from perturbdiff.evaluation.scoring.worker_threads import Workers
from perturbdiff.io.matrices import Sparse

_CELLS_AT_ONCE = 4096


def sorted_groups(
    side: ExpressionView, wanted: Mapping[Group, np.ndarray], workers: Workers, scratch: New
) -> dict[Group, Columns]:
    """Return the sorted columns of the rows of each group. Rows are read some at a time, and sorted by ``workers``."""
    parts: dict[Group, dict[int, Columns]] = {group: {} for group in wanted}

    def sort(group: Group, start: int, cells: Sparse) -> None:
        parts[group][start] = Columns.of([cells], scratch)

    for group, rows in wanted.items():
        for start in range(0, len(rows), _CELLS_AT_ONCE):
            cells = side.cells(rows[start : start + _CELLS_AT_ONCE])
            workers.submit(partial(sort, group, start, cells), cells.nnz)
            del cells
    workers.finish()
    return {group: Columns.joined([some[k] for k in sorted(some)], scratch) for group, some in parts.items()}


def mean_of(side: ExpressionView, rows: np.ndarray) -> np.ndarray:
    """Return the mean of each gene over rows that are read some at a time, float64 [G]."""
    total = np.zeros(0)
    for start in range(0, len(rows), _CELLS_AT_ONCE):
        cells = side.cells(rows[start : start + _CELLS_AT_ONCE])
        total = total if len(total) else np.zeros(cells.shape[1])
        np.add.at(total, cells.indices, cells.data)  # one value after the other, whatever is read at once
    return total / len(rows)


def joined_groups(unit: Unit, by_group: Mapping[Group, Columns], scratch: New) -> Columns:
    """Return the sorted columns of all groups of a unit together."""
    groups = sorted({c.group for c in unit.conditions})
    return Columns.joined([by_group[g] for g in groups if g in by_group], scratch)
