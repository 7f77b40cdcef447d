"""Real cells that anyone may hand in for a condition: its controls, and the cells of other perturbations.

A condition's own cells are never among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import scipy.sparse as sp

from perturbdiff.conditions.condition import Condition, Group
from perturbdiff.conditions.targets import Targets
from perturbdiff.evaluation.cell_eval2.panels import CountReader
from perturbdiff.evaluation.readers.cells_by_condition import Cells, ExpressionView, median_depth
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.seeds import generator, words

_CONTROL, _OTHERS, _NOISE, _RING = 1, 2, 3, 4  # last number of the seeds of a condition's draws
_CELLS_AT_ONCE = 4096


@dataclass
class HonestCells:
    """Rows of the truth that stand for a condition without being its own.

    Attributes
    ----------
    truth
        The real cells.
    conditions
        Conditions to predict, sorted.
    targets
        Target genes of all perturbations of the truth.
    seed
        Of the draws. The draw of a condition does not depend on what else is predicted.
    counts
        Reads the counts of the truth, if counts are handed in; None: log1p values are.
    """

    truth: Cells
    conditions: list[Condition]
    targets: Targets
    seed: int = 0
    counts: CountReader | None = None
    _pools: dict[Group, list[Condition]] = field(default_factory=dict, repr=False)
    _means: dict[Group, np.ndarray] = field(default_factory=dict, repr=False)

    @cached_property
    def depth(self) -> float:
        """Return the total that each cell's counts are scaled to, NaN if the truth does not say it."""
        if self.truth.scale == "counts":
            return median_depth(self.truth.reader)
        return float("nan") if self.truth.target_sum is None else self.truth.target_sum

    @cached_property
    def view(self) -> ExpressionView:
        """Return the real cells as log1p values."""
        depth = self.depth if self.truth.scale == "counts" else None
        return ExpressionView(self.truth.reader, self.truth.rows, depth=depth)

    def handed(self, values: Sparse, cells: Sparse, rows: np.ndarray, rng: np.random.Generator) -> Sparse:
        """Return log1p values as they are handed in: as they are, or as whole counts at the depths of real cells.

        Parameters
        ----------
        values
            What is predicted, CSR [n, G].
        cells
            The real cells that it was made of, log1p CSR [n, G]; cells that were not changed keep their counts.
        rows
            Their rows.
        rng
            A count is rounded up with a probability equal to its fraction.
        """
        if self.counts is None:
            return values
        counts = self.counts(rows)
        if values is cells:
            return counts
        shares = np.asarray(cells.expm1().sum(axis=1, dtype=np.float64)).ravel()
        totals = np.asarray(counts.sum(axis=1)).ravel()
        factor = np.divide(totals, shares, out=np.zeros_like(totals), where=shares > 0)
        expected = np.expm1(values.data.astype(np.float64)) * np.repeat(factor, np.diff(values.indptr))
        whole = np.floor(expected + rng.random(len(expected)))
        return sp.csr_matrix((whole, values.indices, values.indptr), shape=values.shape)

    def size(self, condition: Condition) -> int:
        """Return how many cells a condition really has, which an honest prediction repeats."""
        return len(self.truth.rows[condition])

    def controls(self, condition: Condition) -> np.ndarray:
        """Return the rows of the matched controls: of the same cell type and batch, else the nearest there are.

        Raises
        ------
        UserError
            If the truth has no control cell.
        """
        found = self.truth.controls.get(condition.group)
        for place in (0, 1):
            if found is None and (
                same := [
                    rows
                    for group, rows in self.truth.controls.items()
                    if group[place] == condition.group[place]
                ]
            ):
                found = np.concatenate(same)
        if found is None:
            found = np.concatenate([np.empty(0, np.int64), *self.truth.controls.values()])
        if not len(found):
            raise UserError(
                f"{self.truth.reader.path}: has no control cells, so that no change can be computed"
            )
        return found

    def control_mean(self, condition: Condition) -> np.ndarray:
        """Return the mean log1p profile of the matched controls, float64 [G]."""
        if condition.group not in self._means:
            self._means[condition.group] = self.profile(self.controls(condition))
        return self._means[condition.group]

    def profile(self, rows: np.ndarray) -> np.ndarray:
        """Return the mean log1p profile of some cells, float64 [G]."""
        total = np.zeros(len(self.truth.reader.genes))
        for some in blocks(rows, _CELLS_AT_ONCE):
            total += np.asarray(self.view.cells(some).sum(axis=0, dtype=np.float64)).ravel()
        return total / len(rows)

    def others(self, condition: Condition) -> list[Condition]:
        """Return the conditions whose cells may stand for this one: of the same context, of another perturbation.

        Where the context has no other perturbation, they are the perturbed conditions of the other contexts that need
        not be predicted, else all others.

        Raises
        ------
        UserError
            If the truth has one perturbed condition only.
        """
        if condition.group not in self._pools:
            self._pools[condition.group] = [c for c in self.truth.rows if c.group == condition.group]
        found = [c for c in self._pools[condition.group] if c.perturbation != condition.perturbation]
        if not found:
            told = set(self.conditions)
            elsewhere = [c for c in self.truth.rows if c.group != condition.group]
            found = [c for c in elsewhere if c not in told] or elsewhere
        if not found:
            raise UserError(
                f"{self.truth.reader.path}: {condition} is the only perturbed condition, and no other can stand for it"
            )
        return found

    def drawn_controls(self, condition: Condition) -> np.ndarray:
        """Return as many control rows as the condition has cells, drawn at random."""
        return _draw([self.controls(condition)], self.size(condition), self.rng(condition, _CONTROL))

    def drawn_others(self, condition: Condition) -> np.ndarray:
        """Return as many rows of other perturbations as the condition has cells, drawn at random from all of them."""
        pool = [self.truth.rows[c] for c in self.others(condition)]
        return _draw(pool, self.size(condition), self.rng(condition, _OTHERS))

    def of(self, other: Condition, condition: Condition) -> np.ndarray:
        """Return rows of one other condition, as many as ``condition`` has cells."""
        return _draw([self.truth.rows[other]], self.size(condition), self.rng(condition, _OTHERS))

    def rng(self, condition: Condition, number: int = _NOISE) -> np.random.Generator:
        """Return the generator of a condition's draws."""
        return generator(*words(self.seed, condition, number))

    def relabelled(self, condition: Condition) -> Condition:
        """Return the other condition of the context whose cells come under this label when labels are shuffled.

        Labels are put on a ring in random order and passed on by one place, so that none keeps its cells.
        """
        pool = sorted({condition, *self.others(condition)})
        ring = generator(*words(self.seed, ("", *condition.group), _RING)).permutation(len(pool))
        place = int(np.flatnonzero(ring == pool.index(condition))[0])
        return pool[int(ring[(place + 1) % len(pool)])]

    def best_known(self, condition: Condition) -> Condition:
        """Return the other condition of the context with the most cells."""
        return max(sorted(self.others(condition)), key=lambda c: len(self.truth.rows[c]))


def _draw(pool: Iterable[np.ndarray], size: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``size`` rows of the joined ``pool``, ascending; repeated only if there are too few."""
    parts = list(pool)
    ends = np.cumsum([len(rows) for rows in parts])
    total = int(ends[-1])
    rounds = [np.arange(total)] * (size // total) + [rng.choice(total, size % total, replace=False)]
    at = np.sort(np.concatenate(rounds))
    part = np.searchsorted(ends, at, "right")
    start = np.concatenate([[0], ends[:-1]])
    rows = [parts[k][at[part == k] - start[k]] for k in np.unique(part)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *rows]))


def blocks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield rows, at most ``size`` at a time."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
