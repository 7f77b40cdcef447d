"""Which rows of a store may be used, and the control cells that belong to each condition."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.conditions.cell_distances import from_products
from perturbdiff.conditions.condition import Condition
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.seeds import generator, words

logger = logging.getLogger(__name__)

SLICE = 2048
"""Cells that are compared with each other; a larger pool is cut into random slices."""
_STEPS = 256  # values are rounded to this part of a log1p unit
_FINE = 64  # and distances to this part of one of these
_GENES = 2048  # columns made dense at a time
_SWAPS = 4  # at most, for each cell chosen
_POOL = 22  # first word of the seeds of slices
_KEPT = 4  # slices whose distances are held, 16 MiB each


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
        int [n]: conditions that need controls, whose pools are looked up at once.
    quiet
        Do not warn of conditions without controls of their own.

    Attributes
    ----------
    fallbacks
        Number of matches with controls of the same cell type or batch only.

    Raises
    ------
    UserError
        If a wanted condition has no controls in its cell type nor in its batch.
    """

    def __init__(
        self,
        conditions: pd.DataFrame,
        rows: Rows,
        wanted: Sequence[int] | np.ndarray = (),
        *,
        quiet: bool = False,
    ) -> None:
        self.rows = rows
        usable = np.flatnonzero(conditions["is_control"].to_numpy(bool) & (rows.count > 0))
        cell_types, batches = (conditions[name].to_numpy(object) for name in ("cell_type", "batch"))
        groups = [(str(t), str(b)) for t, b in zip(cell_types, batches, strict=True)]
        self._own = {groups[i]: np.array([i]) for i in usable}
        self._of_type, self._of_batch = _members(cell_types, usable), _members(batches, usable)
        self.fallbacks = {"cell_type": 0, "batch": 0}
        told = conditions["control"].to_numpy(np.int64)  # pretraining tells other controls than a store does
        self._pool = {
            int(c): told[[c]] if told[c] >= 0 and rows.count[told[c]] > 0 else self.match(*groups[c])
            for c in wanted
        }
        if not quiet:
            self.warn_of_fallbacks(len(wanted))

    def match(self, cell_type: str, batch: str) -> np.ndarray:
        """Return the control conditions (int64 ids) that a condition of this cell type and batch draws from.

        Raises
        ------
        UserError
            If there are none in the cell type nor in the batch.
        """
        if (own := self._own.get((cell_type, batch))) is not None:
            return own
        for column, found in (
            ("cell_type", self._of_type.get(cell_type)),
            ("batch", self._of_batch.get(batch)),
        ):
            if found is not None:
                self.fallbacks[column] += 1
                return found
        raise UserError(
            f"no control cells for cell type '{cell_type}', batch '{batch}', and none in another batch or cell type; "
            "add controls or leave these conditions out of the split"
        )

    def warn_of_fallbacks(self, number: int) -> None:
        """Warn if some of ``number`` conditions that were matched have no controls of their own."""
        for column, other in (("cell_type", "batches"), ("batch", "cell types")):
            if self.fallbacks[column]:
                same = column.replace("_", " ")
                logger.warning(
                    "%d of %d conditions have no controls of their own: controls of the same %s in other %s are used",
                    self.fallbacks[column], number, same, other,
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


def distances(values: sparse.csr_matrix) -> np.ndarray:
    """Return the distances between cells [N, G], log1p, in parts of a log1p unit: int32 [N, N]."""
    columns: Any = sparse.csc_matrix(values, dtype=np.float64)
    columns.data = np.rint(columns.data * _STEPS)
    product = np.zeros((columns.shape[0],) * 2)
    for start in range(0, columns.shape[1], _GENES):
        block = columns[:, start : start + _GENES].toarray()
        product += block @ block.T  # of whole numbers, below 2^53: exact in any order
    squares = product.diagonal()
    return np.rint(from_products(product, squares, squares) * _FINE).astype(np.int32)


def represent(apart: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Choose cells that stand for all.

    Parameters
    ----------
    apart
        `distances` of the N cells.
    number
        How many to choose, at most N.
    rng
        Says which of the good choices it is; each cell is about equally likely.

    Returns
    -------
    Their places, int64 [number], in random order.
    """
    size = number
    while 0 < 2 * size <= len(apart):
        size *= 2
    places = rng.permutation(len(apart))
    chosen = places[_exchange(apart[np.ix_(places, places)], size)]
    while len(chosen) > number:
        places = rng.permutation(chosen)
        half = _exchange(apart[np.ix_(places, places)], len(places) // 2)
        chosen = places[half if rng.integers(2) else ~half]
    return rng.permutation(chosen)


def _exchange(apart: np.ndarray, number: int) -> np.ndarray:
    """Return which ``number`` of N cells to take, bool [N]: the first ones, exchanged while that helps.

    What falls is the energy distance between those taken and all, times n² N and without its constant:
    2 n Σ a_i - N Σ d_ij over the cells taken, with a_i the sum of a cell's distances to all.
    """
    total, size = len(apart), number
    taken = np.arange(total) < size
    if size in (0, total):
        return taken
    to_all = apart.sum(1, dtype=np.int64)
    to_taken = apart[:, taken].sum(1, dtype=np.int64)
    most = np.iinfo(np.int64).max
    for _ in range(_SWAPS * size):
        score = size * to_all - total * to_taken
        out = int(np.where(taken, score - to_all, -most).argmax())
        others = np.where(taken, most, score + total * apart[out].astype(np.int64))
        into = int(others.argmin())
        if others[into] >= score[out]:
            break
        taken[out], taken[into] = False, True
        to_taken += apart[into] - apart[out]
    return taken


class BalancedControls:
    """Chooses the control cells of conditions.

    A condition gets every cell of its pool once, twice … as often as that goes into the number of cells wanted, and
    for the rest cells that stand for the pool.

    Parameters
    ----------
    store
        Gives the expression of control cells; nothing else is read.
    rows
        Usable rows of each condition.
    seed
        With a condition's labels it determines the choice, whatever else is asked for.
    """

    def __init__(self, store: Any, rows: Rows, *, seed: int) -> None:
        self.store, self.rows, self.seed = store, rows, seed
        self._labels = store.conditions[["cell_type", "batch"]].astype(str)
        self._apart = lru_cache(maxsize=_KEPT)(self._measure)

    def take(self, pool: np.ndarray, condition: Condition, number: int) -> np.ndarray:
        """Return the control rows of a condition, int64 [number].

        Parameters
        ----------
        pool
            The control conditions (int64 ids) that it draws from, see `ControlPools`.
        condition
            Its labels, which with the seed determine the choice.
        number
            Cells wanted.
        """
        total = int(self.rows.count[pool].sum())
        own = words(self.seed, condition, 0)
        turns, rest = divmod(number, total)
        order = [generator(*own, turn).permutation(total) for turn in range(turns)]
        order.append(self._rest(tuple(map(int, pool)), total, rest, generator(*own, turns)))
        return self.rows.pooled(pool, np.concatenate(order))

    def _rest(self, pool: tuple[int, ...], total: int, number: int, rng: np.random.Generator) -> np.ndarray:
        """Return places in the pool, int64 [number]; from as few slices as hold twice as many cells, if there are."""
        if not number:
            return np.empty(0, np.int64)
        slices = self._slices(pool, total)
        some = min(len(slices), -(-number // (SLICE // 2)))
        which = np.arange(some) if some == len(slices) else rng.permutation(len(slices))[:some]
        found = [
            slices[k][represent(self._apart(pool, total, int(k)), number // some + (i < number % some), rng)]
            for i, k in enumerate(which)
        ]
        return rng.permutation(np.concatenate(found))

    def _slices(self, pool: tuple[int, ...], total: int) -> list[np.ndarray]:
        """Return the places of a pool in parts of at most `SLICE` cells, the same for all conditions."""
        if total <= SLICE:
            return [np.arange(total)]
        names = tuple(self._labels.iloc[list(pool)].to_numpy(object).ravel())
        order = generator(_POOL, *words(self.seed, names, 0)).permutation(total)
        return np.array_split(order, -(-total // SLICE))

    def _measure(self, pool: tuple[int, ...], total: int, k: int) -> np.ndarray:
        places = self._slices(pool, total)[k]
        return distances(self.store.expression(self.rows.pooled(np.array(pool), places)))
