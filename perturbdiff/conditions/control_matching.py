"""Which rows of a store may be used, and the control cells that belong to each condition."""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd

from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)


def generator(*words: int) -> np.random.Generator:
    """Return the random generator that belongs to these non-negative numbers, on any machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


class Rows:
    """The rows of each condition that may be used.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    exclude
        bool [n_cells]: store rows that must never be used. None: all may be.

    Attributes
    ----------
    start, count
        int64 [n_conditions]: first store row, and number of usable rows.
    """

    def __init__(self, conditions: pd.DataFrame, exclude: np.ndarray | None = None) -> None:
        self.start = conditions["start"].to_numpy(np.int64)
        stop = conditions["stop"].to_numpy(np.int64)
        self.count = stop - self.start
        self._kept: dict[int, np.ndarray] = {}
        if exclude is None:
            return
        if len(exclude) != stop.max(initial=0):
            raise ValueError(f"exclude has {len(exclude)} rows, the store {stop.max(initial=0)}")
        for i, (a, b) in enumerate(zip(self.start, stop, strict=True)):
            if exclude[a:b].any():
                self._kept[i] = np.flatnonzero(~exclude[a:b]).astype(np.int32)
                self.count[i] = len(self._kept[i])

    def at(self, condition: int, positions: np.ndarray) -> np.ndarray:
        """Return the store rows (int64) at ``positions`` 0..count-1 of a condition."""
        kept = self._kept.get(condition)
        return self.start[condition] + (positions if kept is None else kept[positions])

    def pooled(self, pool: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the store rows (int64) at ``positions`` of several conditions laid end to end."""
        if len(pool) == 1:
            return self.at(int(pool[0]), positions)
        ends = np.cumsum(self.count[pool])
        which = np.searchsorted(ends, positions, side="right")
        rows = np.empty(len(positions), dtype=np.int64)
        for i in np.unique(which):
            here = which == i
            condition = int(pool[i])
            rows[here] = self.at(condition, positions[here] - (ends[i] - self.count[condition]))
        return rows

    def draw(self, pool: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return ``size`` rows (int64) of the pooled conditions at random, repeats only if there are too few."""
        total = int(self.count[pool].sum())
        return self.pooled(pool, rng.choice(total, size, replace=total < size))


class ControlPools:
    """Matched control cells of each condition.

    The controls of the same (cell type, batch); if there are none, those of the same cell type in other batches;
    else those of the same batch in other cell types.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    rows
        Usable rows of each condition.
    wanted
        int [n]: conditions that need controls.
    quiet
        Do not warn of conditions without controls of their own.

    Attributes
    ----------
    fallbacks
        Number of wanted conditions that use controls of the same cell type or batch only.

    Raises
    ------
    UserError
        If a wanted condition has no controls in its cell type nor in its batch.
    """

    def __init__(
        self, conditions: pd.DataFrame, rows: Rows, wanted: np.ndarray, *, quiet: bool = False
    ) -> None:
        self.rows = rows
        usable = np.flatnonzero(conditions["is_control"].to_numpy(bool) & (rows.count > 0))
        labels = {column: conditions[column].to_numpy(object) for column in ("cell_type", "batch")}
        by = {column: _members(names, usable) for column, names in labels.items()}
        matched = conditions["control"].to_numpy(np.int64)
        self._pool: dict[int, np.ndarray] = {}
        self.fallbacks = {"cell_type": 0, "batch": 0}
        for c in map(int, wanted):
            own = matched[c]
            if own >= 0 and rows.count[own] > 0:
                self._pool[c] = np.array([own])
                continue
            column = next((k for k in by if labels[k][c] in by[k]), None)
            if column is None:
                raise UserError(
                    f"no control cells for cell type '{labels['cell_type'][c]}', batch '{labels['batch'][c]}', and "
                    "none in another batch or cell type; add controls or leave these conditions out of the split"
                )
            self._pool[c] = by[column][labels[column][c]]
            self.fallbacks[column] += 1
        for column, other in (("cell_type", "batches"), ("batch", "cell types")):
            if self.fallbacks[column] and not quiet:
                same = column.replace("_", " ")
                logger.warning(
                    "%d of %d conditions have no controls of their own: controls of the same %s in other %s are used",
                    self.fallbacks[column], len(wanted), same, other,
                )  # fmt: skip

    def pool(self, condition: int) -> np.ndarray:
        """Return the control conditions (int64 ids) that ``condition`` draws from."""
        return self._pool[condition]

    def drawn(self) -> np.ndarray:
        """Return the control conditions (int64 ids, ascending) that any condition draws from."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._pool.values()]))

    def draw(self, condition: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return ``size`` matched control rows (int64) at random, repeats only if there are too few."""
        return self.rows.draw(self._pool[condition], size, rng)


def _members(names: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return those of ``ids`` that bear each name."""
    groups: dict[str, list[int]] = {}
    for i in ids:
        groups.setdefault(str(names[i]), []).append(int(i))
    return {name: np.array(members) for name, members in groups.items()}
