"""Chooses the rows of a store that form each cell set, as a pure function of seed and position.

A set holds ``m`` cells of one condition and ``m`` control cells of the same cell type and batch (paper, App.
Training Details). The sets form an endless stream of epochs, and every epoch contains each cell at least once. The
stream does not depend on the number of ranks or workers, or on the step where a run was resumed.
Every rank takes its share of that one stream of positions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pandas as pd

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.seeds import generator

logger = logging.getLogger(__name__)


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


class RankShare:
    """The share of one of ``world_size`` ranks in a stream that has a set at every position.

    Parameters
    ----------
    sets_per_step
        Sets of an optimiser step, of all ranks.
    rank, world_size
        This rank gets sets r, r + W, r + 2W, … of the stream.

    Raises
    ------
    UserError
        If the ranks cannot share the sets of a step evenly.
    """

    def __init__(self, sets_per_step: int, rank: int, world_size: int) -> None:
        if sets_per_step % world_size or not 0 <= rank < world_size:
            raise UserError(
                f"train.sets_per_step={sets_per_step} cannot be shared evenly by {world_size} processes; "
                "choose a multiple of their number"
            )
        self.sets_per_step, self.rank, self.world_size = sets_per_step, rank, world_size

    def positions(self, k: int) -> range:
        """Return the stream positions of optimiser step ``k`` that belong to this rank."""
        return range(k * self.sets_per_step + self.rank, (k + 1) * self.sets_per_step, self.world_size)

    def step(self, k: int) -> list[CellSet]:
        """Return the B / W sets of optimiser step ``k`` on this rank."""
        return [self.set_at(position) for position in self.positions(k)]

    def set_at(self, position: int) -> CellSet:
        """Return the set at a position of the stream. It is the same for every rank."""
        raise NotImplementedError


FEWEST_CONTROLS_LEFT = 8  # fewer other cells would represent the population badly

ControlTargets: TypeAlias = bool | Literal["perturbed"]

# first words of the seeds, so that each kind of draw has its own random stream
ORDER, DRAW, MIX, TWIN = 1, 2, 3, 4


@dataclass(frozen=True)
class _Plan:
    """One epoch: the order of the usable rows in each condition, and the order of the sets."""

    epoch: int
    positions: np.ndarray  # int32 [cells]: concatenated permutations of the conditions' rows
    order: np.ndarray  # int [sets]


class CellSetSampler(RankShare):
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
        super().__init__(sets_per_step, rank, world_size)
        self.set_size, self.seed = set_size, seed
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
