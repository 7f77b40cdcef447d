"""Control cells that stand for their whole pool: chosen by halving instead of at random.

The mean of n cells drawn at random differs from their pool's by chance, and what is predicted from them differs
with it. Here the pool is halved again and again, each time into halves whose energy distance is small, and one of
them is kept by a coin (kernel halving; Dwivedi and Mackey 2021, "Kernel Thinning", with exchanges of cells in place
of their walk). Either half may be kept, so that all cells are equally likely, the odd ones too, and the spread of
the pool stays what it is.

All that decides is computed in whole numbers, so that any machine and any number of threads choose alike.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import sparse

from perturbdiff.conditions.control_matching import ControlPools, generator

SLICE = 2048
"""Cells that are compared with each other; a larger pool is cut into random slices."""

_STEPS = 256  # values are rounded to this part of a log1p unit
_FINE = 64  # and distances to this part of one of these
_GENES = 2048  # columns made dense at a time
_SWAPS = 4  # at most, for each cell chosen
_POOL = 22  # first word of the seeds of slices
_KEPT = 4  # slices whose distances are held, 16 MiB each


def words(seed: int, labels: tuple[str, ...], number: int) -> tuple[int, ...]:
    """Return what seeds set ``number`` - 1 of a condition; number 0 seeds its control cells."""
    digest = hashlib.sha256("\0".join(labels).encode()).digest()
    return (seed, int.from_bytes(digest[:8], "little"), number)


def distances(values: sparse.csr_matrix) -> np.ndarray:
    """Return the distances between cells [N, G], log1p, in parts of a log1p unit: int32 [N, N]."""
    columns: Any = sparse.csc_matrix(values, dtype=np.float64)
    columns.data = np.rint(columns.data * _STEPS)
    product = np.zeros((columns.shape[0],) * 2)
    for start in range(0, columns.shape[1], _GENES):
        block = columns[:, start : start + _GENES].toarray()
        product += block @ block.T  # of whole numbers, below 2^53: exact in any order
    square = product.diagonal()
    return np.rint(np.sqrt(square[:, None] + square - 2 * product) * _FINE).astype(np.int32)


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
    pools
        The matched control cells of each condition.
    seed
        With a condition's labels it determines the choice, whatever else is asked for.
    """

    def __init__(self, store: Any, pools: ControlPools, *, seed: int) -> None:
        self.store, self.pools, self.seed = store, pools, seed
        self._labels = store.conditions[["cell_type", "batch"]].astype(str)
        self._apart = lru_cache(maxsize=_KEPT)(self._measure)

    def take(self, condition: int, labels: tuple[str, ...], number: int) -> np.ndarray:
        """Return the control rows of a condition, int64 [number].

        Parameters
        ----------
        condition
            Its id in ``pools``.
        labels
            Perturbation, cell type and batch.
        number
            Cells wanted.
        """
        pool = self.pools.pool(condition)
        total = int(self.pools.rows.count[pool].sum())
        own = words(self.seed, labels, 0)
        turns, rest = divmod(number, total)
        order = [generator(*own, turn).permutation(total) for turn in range(turns)]
        order.append(self._rest(tuple(map(int, pool)), total, rest, generator(*own, turns)))
        return self.pools.rows.pooled(pool, np.concatenate(order))

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
        return distances(self.store.expression(self.pools.rows.pooled(np.array(pool), places)))
