"""Twin sets: each condition of a step is drawn twice, as two sets without a cell in common.

A loss that compares the cells of one set with each other can be cheated: the network makes these cells together
and can spread them. Across twins, made apart, it cannot; see `perturbdiff.diffusion.losses`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perturbdiff.data.cell_sets import CellSet, SetStream
from perturbdiff.errors import UserError


class TwinStream:
    """A stream of sets of m cells in pairs, from a stream of sets of 2m cells.

    Parameters
    ----------
    stream
        Sets of 2m cells, half as many in a step.
    """

    def __init__(self, stream: SetStream) -> None:
        self.stream = stream

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps that pass over all cells once."""
        return self.stream.steps_per_epoch

    def step(self, k: int) -> list[CellSet]:
        """Return the sets of step ``k`` on this rank: twins side by side."""
        return [one for pair in map(halves, self.stream.step(k)) for one in pair]


def halves(cells: CellSet) -> tuple[CellSet, CellSet]:
    """Cut a set of 2m cells into two of m that share no cell, whose controls share none either.

    Where the 2m hold repeats, the distinct cells are shared out and repeated within each half; a single cell is
    in both.
    """
    a, b = _share_out(cells.target)
    c, d = _share_out(cells.control)
    return replace(cells, target=a, control=c), replace(cells, target=b, control=d)


def check_even(sets_per_step: int, world_size: int) -> None:
    """Raise a `UserError` if the sets of a step do not make pairs on every rank."""
    if sets_per_step % (2 * world_size):
        raise UserError(
            f"train.sets_per_step={sets_per_step} does not make pairs for {world_size} processes; "
            f"loss.mmd_statistic=cross needs a multiple of {2 * world_size}"
        )


def _share_out(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    size = len(rows) // 2
    first = np.sort(np.unique(rows, return_index=True)[1])
    distinct = rows[first]
    middle = (len(distinct) + 1) // 2
    other = distinct[middle:] if len(distinct) > 1 else distinct
    return np.resize(distinct[:middle], size), np.resize(other, size)
