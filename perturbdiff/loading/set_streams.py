"""What gives the cell sets of each optimiser step: every rank takes its share of one endless stream of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from perturbdiff.runtime.errors import UserError


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
