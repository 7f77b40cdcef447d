"""The cells that are compared with a condition's: controls, sorted gene by gene, and its true and sampled sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from perturbdiff.conditions.condition import Condition, Group
from perturbdiff.evaluation.metrics.set_metrics import SET_CHANCE, common_size, drawn_rows, set_metrics
from perturbdiff.evaluation.metrics.sorted_columns import Columns, New
from perturbdiff.evaluation.readers.cells_by_condition import ExpressionView
from perturbdiff.evaluation.readers.pairing import Pairing
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


_SETS = 1  # number of the generator, beside that of the cells whose distances are computed


@dataclass(frozen=True)
class SetCells:
    """Cells of the sets of one condition, one set after the other, sparse log1p [S · m, G].

    Attributes
    ----------
    predicted, real, other
        Sampled sets, true ones, and true ones of another perturbation (None without one).
    size
        Cells of each set, m.
    seed
        Of what is drawn at random.
    """

    predicted: Sparse
    real: Sparse
    other: Sparse | None
    size: int
    seed: int

    @property
    def nnz(self) -> int:
        """Values held."""
        return sum(side.nnz for side in (self.predicted, self.real, self.other) if side is not None)

    def dense(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return predicted, real and other as float32 [S, m, G]."""
        found = [
            None if side is None else side.toarray().reshape(-1, max(1, self.size), side.shape[1])
            for side in (self.predicted, self.real, self.other)
        ]
        return found[0], found[1], found[2]  # type: ignore[return-value]

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return the named metrics, chance, and the numbers of sets that were compared."""
        predicted, real, other = self.dense()
        found = set_metrics(predicted, real, np.random.default_rng((self.seed, _SETS)), other=other)
        wanted = (*names, *(name for name in SET_CHANCE if name.removeprefix("chance_") in names))
        numbers = {"n_sets": len(real), "n_predicted_sets": len(predicted)}
        return numbers | {name: found[name] for name in wanted if name in found}


def read_sets(pairing: Pairing, condition: Condition, partner: Condition | None, *, seed: int) -> SetCells:
    """Read the sets of a condition, as many cells of each, and those of the partner that serves as chance.

    Every set has the cells that three in four sets of either side have, at most
    `perturbdiff.evaluation.metrics.set_metrics.MOST_CELLS`; smaller sets are left out. The partner's sets, if they are
    smaller, are left out too.
    """
    assert pairing.sets is not None
    real, predicted = pairing.sets.real[condition], pairing.sets.predicted[condition]
    size = common_size(real, predicted)
    rng = np.random.default_rng(seed)

    def cells(side: ExpressionView, sets: Sequence[np.ndarray]) -> Sparse:
        rows = drawn_rows(sets, size, rng) if size else np.empty(0, np.int64)
        return side.cells(rows.ravel())

    found = cells(pairing.predicted, predicted), cells(pairing.real, real)
    other = None if partner is None else cells(pairing.real, pairing.sets.real[partner])
    return SetCells(*found, other, size, seed)
