"""Twin sets: beside each set of a step another one, drawn apart from the same condition.

A loss that compares the cells of one set with each other can be cheated: the network makes these cells together
and can spread them. Across twins, made apart, it cannot; see `perturbdiff.diffusion.losses`. The draws are
independent: twins that never shared a cell would tell each other, in a small condition, which cells are left.
"""

from __future__ import annotations

from perturbdiff.loading.cell_sets import CellSet, CellSetSampler, MixtureSampler, rank_positions
from perturbdiff.runtime.errors import UserError


class PairedSetStream:
    """The sets of a stream, each followed by its twin.

    Parameters
    ----------
    stream
        Gives the first of each pair; has half as many sets in a step.
    """

    def __init__(self, stream: CellSetSampler | MixtureSampler) -> None:
        self.stream = stream

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in which the first sets of the pairs pass over all cells once."""
        return self.stream.steps_per_epoch

    def step(self, k: int) -> list[CellSet]:
        """Return the sets of step ``k`` on this rank: twins side by side."""
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
