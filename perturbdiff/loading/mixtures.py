"""Streams made of other streams: several stores mixed with exact weights, and sets followed by their twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perturbdiff.loading.cell_sets import MIX, CellSetSampler
from perturbdiff.loading.set_streams import CellSet, RankShare
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.seeds import generator

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
