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
from perturbdiff.runtime.large_arrays import long_array
from perturbdiff.runtime.seeds import generator, words

logger = logging.getLogger(__name__)

SLICE = 2048
"""Maximum number of cells that are compared with each other. A larger pool is cut into random slices."""
_STEPS = 256  # values are rounded to 1/256 of a log1p unit
_FINE = 64  # distances are rounded to 1/64 of that
_GENES, _ROWS = 512, 256  # columns made dense, and rows multiplied or summed, at a time
_SWAPS = 4  # maximum number of exchanges for each chosen cell
_POOL = 22  # first word of the seeds of slices
_KEPT = 8  # slices whose distances are kept, 16 MiB each


class Rows:
    """The rows of each condition that may be used.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    exclude
        bool [n_cells]: store rows that must never be used. None excludes no row.

    Attributes
    ----------
    start, count
        int64 [n_conditions]: first store row, and number of usable rows.
    """

    def __init__(self, conditions: pd.DataFrame, exclude: np.ndarray | None = None) -> None:
        self.start: np.ndarray = conditions["start"].to_numpy(np.int64)
        stop: np.ndarray = conditions["stop"].to_numpy(np.int64)
        self.count: np.ndarray = stop - self.start
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
        """Return the store rows (int64) at ``positions`` 0..count-1 of a condition's usable rows."""
        kept = self._kept.get(condition)
        return self.start[condition] + (positions if kept is None else kept[positions])

    def pooled(self, pool: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the store rows (int64) at ``positions`` of the usable rows of several conditions, concatenated."""
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
        """Return ``size`` random rows (int64) of the pooled conditions. Rows repeat only if there are too few."""
        total = int(self.count[pool].sum())
        return self.pooled(pool, rng.choice(total, size, replace=total < size))


class ControlPools:
    """Matched control cells of each condition.

    A condition uses the controls of its cell type and batch. If there are none, it uses those of its cell type in
    other batches, or else those of its batch in other cell types.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    rows
        Usable rows of each condition.
    wanted
        int [n]: conditions that need controls. Their pools are found at once.
    quiet
        Do not warn about conditions without controls of their own.

    Attributes
    ----------
    fallbacks
        Number of conditions with controls of the same cell type only, and of the same batch only.

    Raises
    ------
    UserError
        If a wanted condition has controls neither in its cell type nor in its batch.
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
        self._of_group = {groups[i]: np.array([i]) for i in usable}
        self._of_type, self._of_batch = _members(cell_types, usable), _members(batches, usable)
        self.fallbacks = {"cell_type": 0, "batch": 0}
        # pretraining names other controls than a store does
        named: np.ndarray = conditions["control"].to_numpy(np.int64)
        self._pool: dict[int, np.ndarray] = {
            int(c): named[[c]] if named[c] >= 0 and rows.count[named[c]] > 0 else self.match(*groups[c])
            for c in wanted
        }
        if not quiet:
            self.warn_of_fallbacks(len(wanted))

    def match(self, cell_type: str, batch: str) -> np.ndarray:
        """Return the control conditions (int64 ids) that a condition of this cell type and batch draws from.

        Raises
        ------
        UserError
            If there are none in the cell type and none in the batch.
        """
        if (controls := self._of_group.get((cell_type, batch))) is not None:
            return controls
        for column, controls in (
            ("cell_type", self._of_type.get(cell_type)),
            ("batch", self._of_batch.get(batch)),
        ):
            if controls is not None:
                self.fallbacks[column] += 1
                return controls
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
        """Return ``size`` random rows (int64) of matched controls. Rows repeat only if there are too few."""
        return self.rows.draw(self._pool[condition], size, rng)


def _members(names: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the ``ids`` of each name."""
    groups: dict[str, list[int]] = {}
    for i in ids:
        groups.setdefault(str(names[i]), []).append(int(i))
    return {name: np.array(members) for name, members in groups.items()}


def distances(values: sparse.csr_matrix) -> np.ndarray:
    """Return the distances between cells [N, G], log1p, in fractions of a log1p unit: int32 [N, N].

    Those of many cells are in a temporary file. Memory holds some rows of products, half of which are made.
    """
    rounded: Any = sparse.csr_matrix(values, dtype=np.float64)
    rounded.data = np.rint(rounded.data * _STEPS)
    size, genes = rounded.shape
    of_genes = [rounded[:, start : start + _GENES] for start in range(0, genes, _GENES)]
    squares = np.asarray(rounded.multiply(rounded).sum(axis=1)).ravel()
    found = long_array(size * size, np.dtype(np.int32)).reshape(size, size)
    for start in range(0, size, _ROWS):
        rows, later = slice(start, start + _ROWS), slice(start, size)
        product = np.zeros((len(squares[rows]), size - start))
        for block in of_genes:
            dense = block[later].toarray()
            product += dense[:_ROWS] @ dense.T  # sums of whole numbers below 2^53 are exact in any order
        found[rows, later] = np.rint(from_products(product, squares[rows], squares[later]) * _FINE)
        found[later, rows] = found[rows, later].T
    return found


def represent(apart: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Choose cells that represent all of N cells.

    Parameters
    ----------
    apart
        `distances` of the N cells.
    number
        Number of cells to choose, at most N.
    rng
        Selects one of the good choices. Each cell is about equally likely to be chosen.

    Returns
    -------
    The positions of the chosen cells, int64 [number], in random order.
    """
    size = number
    while 0 < 2 * size <= len(apart):
        size *= 2
    places = rng.permutation(len(apart))
    chosen = places[_exchange(apart, places, size)]
    while len(chosen) > number:
        places = rng.permutation(chosen)
        half = _exchange(apart, places, len(places) // 2)
        chosen = places[half if rng.integers(2) else ~half]
    return rng.permutation(chosen)


def _exchange(apart: np.ndarray, places: np.ndarray, number: int) -> np.ndarray:
    """Return which ``number`` of the N cells at ``places`` to take, bool [N]: the first ones, exchanged if that helps.

    Each exchange lowers the energy distance between the n taken cells and all cells. Times n² N and without its
    constant, it is 2 n Σ a_i - N Σ d_ij over the taken cells, where a_i is the sum of a cell's distances to all cells.
    """
    total, size = len(places), number
    taken = np.arange(total) < size
    if size in (0, total):
        return taken
    to_all, to_taken = (_sums(apart, places, others) for others in (places, places[:size]))
    most = np.iinfo(np.int64).max
    for _ in range(_SWAPS * size):
        score = size * to_all - total * to_taken
        out = int(np.where(taken, score - to_all, -most).argmax())
        from_out = apart[places[out], places].astype(np.int64)
        others = np.where(taken, most, score + total * from_out)
        into = int(others.argmin())
        if others[into] >= score[out]:
            break
        taken[out], taken[into] = False, True
        to_taken += apart[places[into], places] - from_out
    return taken


def _sums(apart: np.ndarray, places: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the sum of the distances of each of some cells to ``others``, int64 [places]."""
    parts = np.split(places, range(_ROWS, len(places), _ROWS))
    return np.concatenate([apart[np.ix_(part, others)].sum(1, dtype=np.int64) for part in parts])


class BalancedControls:
    """Chooses the control cells of conditions.

    A condition gets every cell of its pool equally often. Cells that represent the pool fill up the number of cells
    that is needed.

    Parameters
    ----------
    store
        The expression of control cells is read from it, and nothing else.
    rows
        Usable rows of each condition.
    seed
        Together with the labels of a condition it determines the choice. Other conditions have no influence.
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
            The control conditions (int64 ids) that it draws from (see `ControlPools`).
        condition
            Its labels, which determine the choice together with the seed.
        number
            Number of cells.
        """
        total = int(self.rows.count[pool].sum())
        seed = words(self.seed, condition, 0)
        turns, rest = divmod(number, total)
        order = [generator(*seed, turn).permutation(total) for turn in range(turns)]
        order.append(self._rest(tuple(map(int, pool)), total, rest, generator(*seed, turns)))
        return self.rows.pooled(pool, np.concatenate(order))

    def _rest(self, pool: tuple[int, ...], total: int, number: int, rng: np.random.Generator) -> np.ndarray:
        """Return positions in the pool, int64 [number], from just enough slices to hold twice as many cells."""
        if not number:
            return np.empty(0, np.int64)
        slices = self._slices(pool, total)
        some = min(len(slices), -(-number // (SLICE // 2)))
        which = np.arange(some) if some == len(slices) else rng.permutation(len(slices))[:some]
        chosen = [
            slices[k][represent(self._apart(pool, total, int(k)), number // some + (i < number % some), rng)]
            for i, k in enumerate(which)
        ]
        return rng.permutation(np.concatenate(chosen))

    def _slices(self, pool: tuple[int, ...], total: int) -> list[np.ndarray]:
        """Return the positions in a pool in slices of at most `SLICE` cells. All conditions share these slices."""
        if total <= SLICE:
            return [np.arange(total)]
        names = tuple(self._labels.iloc[list(pool)].to_numpy(object).ravel())
        order = generator(_POOL, *words(self.seed, names, 0)).permutation(total)
        return np.array_split(order, -(-total // SLICE))

    def _measure(self, pool: tuple[int, ...], total: int, k: int) -> np.ndarray:
        places = self._slices(pool, total)[k]
        return distances(self.store.expression(self.rows.pooled(np.array(pool), places)))
