"""Chooses the rows of a store that form each cell set, as a pure function of seed and position.

A set holds ``m`` cells of one condition and ``m`` control cells of the same cell type and batch (paper, App.
Training Details). The sets form an endless stream of epochs, and every epoch contains each cell at least once. The
stream does not depend on the number of ranks or workers, or on the step where a run was resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pandas as pd

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.seeds import generator

logger = logging.getLogger(__name__)

FEWEST_CONTROLS_LEFT = 8  # fewer other cells would represent the population badly
_CYCLE = 1024  # positions over which a mixture keeps its weights exactly

ControlTargets: TypeAlias = bool | Literal["perturbed"]

# first words of the seeds, so that each kind of draw has its own random stream
ORDER, DRAW, MIX, TWIN = 1, 2, 3, 4


@dataclass(frozen=True)
class CellSet:
    """Rows of one training example.

    Attributes
    ----------
    condition
        Row of the condition in its store's table.
    target, control
        int64 [m]: store rows of the cells of the condition, and of control cells.
    store
        Index of the store in a mixture.
    """

    condition: int
    target: np.ndarray
    control: np.ndarray
    store: int = 0


class SetStream(Protocol):
    """What the loader needs: the sets of this rank at optimiser step ``k``."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimiser steps that pass over all cells once."""
        ...

    def step(self, k: int) -> list[CellSet]:
        """Return the sets of step ``k`` on this rank."""
        ...


@dataclass(frozen=True)
class _Plan:
    """One epoch: the order of the usable rows in each condition, and the order of the sets."""

    epoch: int
    positions: np.ndarray  # int32 [cells]: concatenated permutations of the conditions' rows
    order: np.ndarray  # int [sets]


class CellSetSampler:
    """The stream of cell sets of one store.

    Each epoch permutes the cells of each condition and divides them into blocks of ``set_size``. It fills the last
    block with repeats drawn from the condition, and shuffles the sets of all conditions together. A set never mixes
    conditions. Control cells are drawn at random from the matched controls (`ControlPools`).

    Parameters
    ----------
    conditions
        `Store.conditions`.
    use
        bool [n_conditions]: conditions whose cells are targets. Control conditions among them are targets only
        with ``control_targets``.
    set_size
        m, number of cells in a set.
    sets_per_step
        B, number of sets in an optimiser step over all ranks. A multiple of ``world_size``.
    seed
        Seed of the stream.
    control_targets
        Use control sets as targets too. ``"perturbed"`` uses only those control cells that are matched to perturbed
        targets, because a network that sees a cell type only unperturbed may learn that it does not respond. The
        control set of a control target is drawn from the other cells. A condition of fewer than 2m cells is divided
        into two halves, one for the target and one for the control. Only below 16 cells may the two overlap.
    rank, world_size
        This rank gets sets r, r + W, r + 2W, … of the stream.
    exclude
        bool [n_cells]: store rows that are never used. A condition that loses all its cells disappears.
    quiet
        Do not log how many conditions are smaller than a set.

    Raises
    ------
    UserError
        If no cells are left to train on, the number of ranks does not divide the number of sets in a step, or controls
        are missing.
    """

    def __init__(
        self,
        conditions: pd.DataFrame,
        use: np.ndarray,
        *,
        set_size: int,
        sets_per_step: int,
        seed: int,
        control_targets: ControlTargets = False,
        rank: int = 0,
        world_size: int = 1,
        exclude: np.ndarray | None = None,
        quiet: bool = False,
    ) -> None:
        check_ranks(sets_per_step, rank, world_size)
        self.set_size, self.sets_per_step, self.seed = set_size, sets_per_step, seed
        self.rank, self.world_size = rank, world_size
        self._rows = self._usable(conditions, exclude)
        self._is_control = conditions["is_control"].to_numpy(bool)
        usable = np.asarray(use, dtype=bool) & (self._rows.count > 0)
        perturbed = np.flatnonzero(usable & ~self._is_control)
        self._pools = self._matched(conditions, perturbed, quiet=quiet)
        controls = np.flatnonzero(usable & self._is_control)
        if control_targets == "perturbed":
            controls = np.intersect1d(controls, self._pools.drawn())
        self.targets = np.union1d(perturbed, controls) if control_targets else perturbed
        if not len(self.targets):
            raise UserError(
                "no cells to make sets of: no condition of this part of the split is in the store"
            )
        count = self._rows.count[self.targets]
        self.sets_per_epoch = self._number_sets(count)
        if not quiet:
            self._report_small(count)

    @property
    def target_conditions(self) -> np.ndarray:
        """The conditions whose cells are targets, int64, ascending."""
        return self.targets

    def _usable(self, conditions: pd.DataFrame, exclude: np.ndarray | None) -> Rows:
        """Return the rows that may be used."""
        return Rows(conditions, exclude)

    def _matched(self, conditions: pd.DataFrame, perturbed: np.ndarray, *, quiet: bool) -> Any:
        """Return the control cells of the perturbed targets."""
        return ControlPools(conditions, self._rows, perturbed, quiet=quiet)

    def _number_sets(self, count: np.ndarray) -> int:
        """Number the sets of an epoch, given the sizes of the target conditions. Return the number of sets."""
        self._block = self._block_sizes(count)
        self._first_set = np.concatenate([[0], np.cumsum(-(-count // self._block))])
        self._first_cell = np.concatenate([[0], np.cumsum(count)])
        self._plans: dict[int, _Plan] = {}
        return int(self._first_set[-1])

    def _block_sizes(self, count: np.ndarray) -> np.ndarray:
        halves = (
            self._is_control[self.targets] & (count < 2 * self.set_size) & (count >= 2 * FEWEST_CONTROLS_LEFT)
        )
        return np.where(halves, np.minimum(-(-count // 2), self.set_size), self.set_size)

    def _report_small(self, count: np.ndarray) -> None:
        small = int((count < self.set_size).sum())
        if small:
            logger.info(
                "%d of %d conditions have fewer than %d cells: their sets hold repeats drawn with replacement",
                small, len(count), self.set_size,
            )  # fmt: skip

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimiser steps that pass over all cells once. The last one may reach into the next epoch."""
        return -(-self.sets_per_epoch // self.sets_per_step)

    def step(self, k: int) -> list[CellSet]:
        """Return the B / W sets of optimiser step ``k`` on this rank."""
        return [self.set_at(p) for p in rank_positions(k, self.sets_per_step, self.rank, self.world_size)]

    def set_at(self, position: int) -> CellSet:
        """Return the set at a position of the stream. It is the same for every rank."""
        epoch, number, slot = self._place(position)
        plan = self._plan(epoch)
        condition, first = int(self.targets[slot]), int(self._first_cell[slot])
        count, block = int(self._rows.count[condition]), int(self._block[slot])
        begin = (number - int(self._first_set[slot])) * block
        distinct = plan.positions[first + begin : first + min(begin + block, count)].astype(np.int64)
        return self._cell_set(condition, distinct, generator(DRAW, self.seed, epoch, number))

    def twin_at(self, position: int) -> CellSet:
        """Return another set of the condition at ``position``, drawn at random and independently of the set there."""
        epoch, number, slot = self._place(position)
        condition = int(self.targets[slot])
        rng = generator(TWIN, self.seed, epoch, number)
        count, most = int(self._rows.count[condition]), int(self._block[slot])
        return self._cell_set(condition, rng.choice(count, min(most, count), replace=False), rng)

    def _cell_set(self, condition: int, distinct: np.ndarray, rng: np.random.Generator) -> CellSet:
        """Return a set with these positions in its condition, filled up with repeats, and with drawn controls."""
        count = int(self._rows.count[condition])
        cells = np.concatenate([distinct, rng.integers(count, size=self.set_size - len(distinct))])
        if self._is_control[condition]:
            cells, control = self._own_controls(condition, distinct, rng)
        else:
            control = self._pools.draw(condition, self.set_size, rng)
        return CellSet(condition, self._rows.at(condition, cells), control)

    def _place(self, position: int) -> tuple[int, int, int]:
        """Return the epoch, the number of the set and the index of its target condition for a stream position."""
        epoch, index = divmod(position, self.sets_per_epoch)
        number = int(self._plan(epoch).order[index])
        return epoch, number, int(np.searchsorted(self._first_set, number, side="right")) - 1

    def _own_controls(
        self, condition: int, distinct: np.ndarray, rng: np.random.Generator, near: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the target positions and control rows of a set of controls. They are disjoint if enough are left.

        Controls are drawn from the distinct positions ``near``, or if it is None, from the whole condition.
        """
        count, size = int(self._rows.count[condition]), self.set_size
        cells = distinct
        if len(distinct) < size:  # repeats are cells of the target, because any other cell may be a control
            cells = np.concatenate([distinct, rng.choice(distinct, size - len(distinct))])
        near = np.arange(count) if near is None else near
        others = np.setdiff1d(near, distinct, assume_unique=True)
        if len(others) < FEWEST_CONTROLS_LEFT:
            others = near
        return cells, self._rows.at(condition, rng.choice(others, size, replace=len(others) < size))

    def _plan(self, epoch: int) -> _Plan:
        if epoch not in self._plans:
            # a step may reach into the next epoch, so the previous plan is kept until it cannot be needed
            self._plans = {e: plan for e, plan in self._plans.items() if abs(e - epoch) == 1}
            self._plans[epoch] = self._make_plan(epoch)
        return self._plans[epoch]

    def _make_plan(self, epoch: int) -> _Plan:
        rng = generator(ORDER, self.seed, epoch)
        positions = np.empty(self._first_cell[-1], dtype=np.int32)
        for slot in range(len(self.targets)):
            of_condition = positions[self._first_cell[slot] : self._first_cell[slot + 1]]
            of_condition[:] = np.arange(len(of_condition), dtype=np.int32)
            rng.shuffle(of_condition)
        return _Plan(epoch, positions, rng.permutation(self.sets_per_epoch))


class MixtureSampler:
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
        check_ranks(sets_per_step, rank, world_size)
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
        self.samplers, self.sets_per_step, self.seed = list(samplers), sets_per_step, seed
        self.rank, self.world_size = rank, world_size
        self.quota = _quota(share / share.sum())
        self._cycle: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimiser steps that pass over every store at least once."""
        longest = max(s.sets_per_epoch / q for s, q in zip(self.samplers, self.quota, strict=True))
        return -(-int(np.ceil(longest * self.quota.sum())) // self.sets_per_step)

    def step(self, k: int) -> list[CellSet]:
        """Return the B / W sets of optimiser step ``k`` on this rank."""
        return [self.set_at(p) for p in rank_positions(k, self.sets_per_step, self.rank, self.world_size)]

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


def check_ranks(sets_per_step: int, rank: int, world_size: int) -> None:
    """Raise a `UserError` if the ranks cannot share the sets of a step evenly."""
    if sets_per_step % world_size or not 0 <= rank < world_size:
        raise UserError(
            f"train.sets_per_step={sets_per_step} cannot be shared evenly by {world_size} processes; "
            "choose a multiple of their number"
        )


def rank_positions(k: int, sets_per_step: int, rank: int, world_size: int) -> range:
    """Return the stream positions of optimiser step ``k`` that belong to a rank."""
    return range(k * sets_per_step + rank, (k + 1) * sets_per_step, world_size)


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
        positions = rank_positions(k, stream.sets_per_step, stream.rank, stream.world_size)
        return [cells for p in positions for cells in (stream.set_at(p), stream.twin_at(p))]


def check_even(sets_per_step: int, world_size: int) -> None:
    """Raise a `UserError` if the sets of a step do not make pairs on every rank."""
    if sets_per_step % (2 * world_size):
        raise UserError(
            f"train.sets_per_step={sets_per_step} does not make pairs for {world_size} processes; "
            f"loss.mmd_statistic=cross needs a multiple of {2 * world_size}"
        )
