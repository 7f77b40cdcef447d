"""The control cells that each predicted set starts from."""

from __future__ import annotations

import logging
from functools import cached_property, lru_cache, partial
from typing import Literal

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from torch import Tensor

from perturbdiff.conditions.condition import conditions_of
from perturbdiff.conditions.control_matching import BalancedControls, ControlPools, Rows
from perturbdiff.conditions.set_units import UnitRows
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.runtime.seeds import generator, words
from perturbdiff.store import stored_rows
from perturbdiff.store.pseudobulk import ROWS_PER_READ
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

_LEAST_CACHE = 16 << 20  # bytes
_HELD = 64  # number of requests whose rows are held in memory
_SURPLUS = 1 << 31  # used in place of the turn number in the seed


class ControlSets:
    """Sets of control cells for the requests. The sets of a request do not depend on other requests.

    Parameters
    ----------
    store
        The store with the control cells.
    wanted
        The requests: ``cell_type, batch, perturbation, n_cells``.
    gene_map
        Brings the store's genes into the model's order.
    size
        Cells per set, m.
    seed
        Seed of the choice of a condition's controls, and of their order.
    choice
        ``shuffled``: the control cells are distributed over a condition's sets in random order, and reused in a
        new order when all are used. ``balanced``: as in `BalancedControls`.
    by_set
        If the store knows which cells were a set: each set of controls is from one of them, which is drawn in
        proportion to its cells, as in training on whole sets. ``choice`` has no effect then.
    """

    def __init__(
        self,
        store: Store,
        wanted: pd.DataFrame,
        gene_map: GeneMap,
        *,
        size: int,
        seed: int,
        choice: Literal["shuffled", "balanced"] = "shuffled",
        by_set: bool = False,
    ) -> None:
        self.gene_map, self.size, self.seed, self.choice = gene_map, size, seed, choice
        self._cells = wanted["n_cells"].to_numpy(np.int64)
        self._conditions = conditions_of(wanted)
        self._store, self._rows = store, Rows(store.conditions)
        self._pools = self._find()
        store.cache_bytes = self._cache_bytes()
        whole = by_set and store.sets is not None
        self._units = UnitRows(store.conditions, store.set_of(slice(None))) if whole else None
        self._balanced_rows = lru_cache(maxsize=_HELD)(self._balance)
        self._mean_of = lru_cache(maxsize=_HELD)(self._pool_mean)

    def _cache_bytes(self) -> int:
        """Return the bytes of the store's cache of decoded chunks: twice the largest pool of controls.

        Requests that follow each other draw from one pool, so it is decoded once. A pool that is larger than all that
        a store keeps is decoded again for every batch of sets.
        """
        largest = max((int(self._rows.count[pool].sum()) for pool in self._pools), default=0)
        size = largest * self._store.nbytes_in_memory // max(self._store.n_cells, 1)
        return int(np.clip(2 * size, _LEAST_CACHE, stored_rows.CACHE_BYTES))

    @cached_property
    def _choose(self) -> BalancedControls:
        return BalancedControls(self._store, self._rows, seed=self.seed)

    def _find(self) -> list[np.ndarray]:
        """Return the control conditions of the store that each request draws from."""
        pools = ControlPools(self._store.conditions, self._rows)
        matched = [pools.match(*condition.group) for condition in self._conditions]
        pools.warn_of_fallbacks(len(matched))
        if few := sum(self._rows.count[pool].sum() < self.size for pool in matched):
            logger.info(
                "%d of %d conditions have fewer than %d control cells: their sets repeat some",
                few, len(matched), self.size,
            )  # fmt: skip
        return matched

    def __call__(self, sets: list[tuple[int, int]]) -> Tensor:
        """Return the control cells [B, S, G] of (request, number) pairs, log1p.

        A cell is used again only when all cells are used. Repeated cells would make the predicted population
        narrower than the controls.
        """
        values = self.gene_map.dense(self._store.expression(self.rows(sets)))
        return torch.from_numpy(values).view(len(sets), self.size, -1)

    def rows(self, sets: list[tuple[int, int]]) -> np.ndarray:
        """Return the store rows of the control cells of (request, number) pairs, int64 [B · S]."""
        find = self._balanced if self.choice == "balanced" else self._shuffled
        find = find if self._units is None else partial(self._of_one_unit, self._units)
        return np.concatenate([find(request, number) for request, number in sets])

    def pool_means(self, requests: list[int]) -> Tensor:
        """Return the mean of all control cells that each request draws from, log1p [requests, G]."""
        return torch.from_numpy(np.stack([self._mean_of(self._pools[each].tobytes()) for each in requests]))

    def _pool_mean(self, pool: bytes) -> np.ndarray:
        """Return the mean of the control cells of some conditions (int64 numbers as bytes), float32 [G]."""
        conditions = np.frombuffer(pool, np.int64)
        total = int(self._rows.count[conditions].sum())
        sums = np.zeros(self._store.n_genes)
        for first in range(0, total, ROWS_PER_READ):
            places = np.arange(first, min(first + ROWS_PER_READ, total))
            cells = self._store.expression(self._rows.pooled(conditions, places))
            sums += np.asarray(cells.sum(axis=0, dtype=np.float64)).ravel()
        return self.gene_map.dense(sparse.csr_matrix((sums / total).astype(np.float32)))[0]

    def counts(self, rows: np.ndarray) -> sparse.csr_matrix:
        """Return the counts of the store's ``rows`` [n, genes of the store]."""
        return self._store.counts(rows)

    def _shuffled(self, request: int, number: int) -> np.ndarray:
        """Return the store rows of a set, int64 [S]."""
        pool = self._pools[request]
        total = int(self._rows.count[pool].sum())
        places = np.arange(number * self.size, (number + 1) * self.size)
        turns = range(places[0] // total, places[-1] // total + 1)
        seed_words = words(self.seed, self._conditions[request], 0)
        order = np.concatenate([generator(*seed_words, turn).permutation(total) for turn in turns])
        return self._rows.pooled(pool, order[places - places[0] // total * total])

    def _of_one_unit(self, units: UnitRows, request: int, number: int) -> np.ndarray:
        """Return the store rows of a set whose cells are from one unit, int64 [S]. Rows repeat if it has too few."""
        among = units.of(self._pools[request])
        ends = np.cumsum(units.count[among])
        seed_words = words(self.seed, self._conditions[request], 0)
        cell = generator(*seed_words, 0).permutation(ends[-1])[
            number % ends[-1]
        ]  # no unit of chance too often
        unit = among[np.searchsorted(ends, cell, side="right")]
        return units.draw(np.array([unit]), self.size, generator(*seed_words, _SURPLUS, number))

    def _balanced(self, request: int, number: int) -> np.ndarray:
        """Return the store rows of a set, int64 [S]."""
        return self._balanced_rows(request)[number * self.size : (number + 1) * self.size]

    def _balance(self, request: int) -> np.ndarray:
        """Return the store rows of all sets of a request. Surplus cells of the last set are drawn at random."""
        pool, condition, cells = self._pools[request], self._conditions[request], int(self._cells[request])
        rows = self._choose.take(pool, condition, cells)
        rng = generator(*words(self.seed, condition, 0), _SURPLUS)
        return np.concatenate([rows, self._rows.draw(pool, -cells % self.size, rng)])
