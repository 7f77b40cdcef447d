"""Streams of cell sets beside those of one store: drawn within a unit, mixed of several stores, followed by twins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.conditions.set_units import UnitPools, UnitRows
from perturbdiff.loading.cell_sets import MIX, CellSet, CellSetSampler, RankShare
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.seeds import generator

logger = logging.getLogger(__name__)


class UnitSetSampler(CellSetSampler):
    """The stream of cell sets of a store that knows its sets. Cells of a set are from one unit, its controls also.

    It is the stream of `CellSetSampler` with units in place of conditions: an epoch has every cell of every unit at
    least once, and the last set of a unit is filled up with repeats. Units of fewer than 8 cells are left out, unless
    their condition has no larger one.

    Parameters
    ----------
    sets
        int [n_cells]: number of the set of each store row (`Store.set_of`).

    The other parameters are those of `CellSetSampler`. ``targets`` are units.
    """

    def __init__(
        self,
        conditions: pd.DataFrame,
        use: np.ndarray,
        *,
        sets: np.ndarray,
        exclude: np.ndarray | None = None,
        **options: Any,
    ) -> None:
        self.units = UnitRows(conditions, sets, exclude)
        self._conditions, self._exclude = conditions, exclude
        of_units = conditions.iloc[self.units.condition].reset_index(drop=True)
        used = np.asarray(use, dtype=bool)[self.units.condition] & self.units.large_enough()
        super().__init__(of_units, used, **options)

    @property
    def target_conditions(self) -> np.ndarray:
        """The conditions whose cells are targets, int64, ascending."""
        return np.unique(self.units.condition[self.targets])

    def check_family(self, told: Sequence[str], set_key: str) -> None:
        """Raise a `UserError` if the labels that the model is told leave it one set for each of them.

        Parameters
        ----------
        told
            Those of ``perturbation, cell_type, batch`` that the model is told. Controls tell it the cell type anyway.
        set_key
            The column with the sets, for the message.
        """
        known = list(dict.fromkeys([*told, "cell_type"]))
        targets = self._conditions.iloc[self.units.condition[self.targets]]
        if int(targets[known].value_counts().max()) > 1:
            return
        raise UserError(
            f"loss.mmd_statistic=set: '{set_key}' (data.set_key) names one set for each {' and '.join(known)} that "
            "the model is told, so there is no difference between sets to learn; take the label that tells the set, "
            "such as the batch, out of model.covariates, or preprocess with another data.set_key"
        )

    def _usable(self, conditions: pd.DataFrame, exclude: np.ndarray | None) -> Rows:
        return self.units

    def _matched(self, conditions: pd.DataFrame, perturbed: np.ndarray, *, quiet: bool) -> UnitPools:
        wanted = np.unique(self.units.condition[perturbed])
        rows = Rows(self._conditions, self._exclude)
        return UnitPools(ControlPools(self._conditions, rows, wanted, quiet=quiet), self.units)

    def _cell_set(self, condition: int, distinct: np.ndarray, rng: np.random.Generator) -> CellSet:
        made = super()._cell_set(condition, distinct, rng)
        return replace(made, condition=int(self.units.condition[condition]))

    def _report_small(self, count: np.ndarray) -> None:
        number, middle = len(self.units.count), int(np.median(count))
        logger.info(
            "%d sets of %d to %d cells (data.set_key), %d too small to learn from",
            number, count.min(), count.max(), number - int(self.units.large_enough().sum()),
        )  # fmt: skip
        if middle < self.set_size:
            logger.warning(
                "most sets have fewer cells than train.set_size=%d (half of them at most %d): what lacks is filled up "
                "with repeats, which look like differences between sets; choose train.set_size=%d or less",
                self.set_size, middle, middle,
            )  # fmt: skip


_CYCLE = 1024  # positions over which a mixture keeps its weights exactly


class MixtureSampler(RankShare):
    """Mixes the streams of several stores with exact weights.

    Each store gets its share of every 1024 successive sets, in an order drawn from (seed, cycle). The sets of a store
    follow its own stream, so none is left out.

    Parameters
    ----------
    samplers
        One for each store.
    weights
        Relative share of each store's sets. None: the number of sets in an epoch, as if all were one store.
    sets_per_step, seed, rank, world_size
        As in `CellSetSampler`. Those of the single samplers are not used.
    """

    def __init__(
        self,
        samplers: Sequence[CellSetSampler],
        *,
        sets_per_step: int,
        seed: int,
        weights: Sequence[float] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(sets_per_step, rank, world_size)
        sizes = {sampler.set_size for sampler in samplers}
        if len(sizes) > 1:
            raise UserError(
                f"the stores of a mixture need one set size, found {listing(map(str, sorted(sizes)))}"
            )
        share = np.array(
            weights if weights is not None else [s.sets_per_epoch for s in samplers], dtype=np.float64
        )
        if len(share) != len(samplers) or (share <= 0).any():
            raise UserError(f"mixture: give one weight above 0 for each of the {len(samplers)} stores")
        self.samplers, self.seed = list(samplers), seed
        self.quota = _quota(share / share.sum())
        self._cycle: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimiser steps that pass over every store at least once."""
        longest = max(s.sets_per_epoch / q for s, q in zip(self.samplers, self.quota, strict=True))
        return -(-int(np.ceil(longest * self.quota.sum())) // self.sets_per_step)

    def set_at(self, position: int) -> CellSet:
        """Return the set at a position of the mixed stream. It is the same for every rank."""
        store, local = self._place(position)
        return replace(self.samplers[store].set_at(local), store=store)

    def twin_at(self, position: int) -> CellSet:
        """Return the twin of the set at a position (see `CellSetSampler.twin_at`)."""
        store, local = self._place(position)
        return replace(self.samplers[store].twin_at(local), store=store)

    def _place(self, position: int) -> tuple[int, int]:
        """Return the store at a position of the mixed stream, and the position in the store's own stream."""
        cycle, index = divmod(position, int(self.quota.sum()))
        if self._cycle is None or self._cycle[0] != cycle:
            order = np.repeat(np.arange(len(self.samplers)), self.quota)
            generator(MIX, self.seed, cycle).shuffle(order)
            before = np.empty_like(order)
            for i in range(len(self.samplers)):
                before[order == i] = np.arange(self.quota[i])
            self._cycle = (cycle, order, before)
        store, before_here = int(self._cycle[1][index]), int(self._cycle[2][index])
        return store, cycle * int(self.quota[store]) + before_here


def _quota(share: np.ndarray) -> np.ndarray:
    """Return the number of positions that each store gets in a cycle, by largest remainders and at least one."""
    exact = share * _CYCLE
    quota = np.maximum(np.floor(exact).astype(np.int64), 1)
    left = _CYCLE - int(quota.sum())
    if left > 0:
        quota[np.argsort(np.floor(exact) - exact, kind="stable")[:left]] += 1
    return quota


class PairedSetStream:
    """The sets of a stream, each followed by its twin.

    Parameters
    ----------
    stream
        Gives the first set of each pair. It has half as many sets in a step.
    """

    def __init__(self, stream: CellSetSampler | MixtureSampler) -> None:
        self.stream = stream

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimiser steps in which the first sets of the pairs pass over all cells once."""
        return self.stream.steps_per_epoch

    def step(self, k: int) -> list[CellSet]:
        """Return the sets of step ``k`` on this rank, with twins next to each other."""
        stream = self.stream
        return [cells for p in stream.positions(k) for cells in (stream.set_at(p), stream.twin_at(p))]


def check_even(sets_per_step: int, world_size: int) -> None:
    """Raise a `UserError` if the sets of a step do not make pairs on every rank."""
    if sets_per_step % (2 * world_size):
        raise UserError(
            f"train.sets_per_step={sets_per_step} does not make pairs for {world_size} processes; "
            f"loss.mmd_statistic=cross needs a multiple of {2 * world_size}"
        )
