"""Cell sets of a store that is too large for memory. Rows are read in windows, and several sets share a window.

A *block* is about a thousand rows of one condition. A small condition is one block. The blocks of a large condition
consist of windows of successive rows, with a new offset and a new order in each epoch. The rows of a block are
shuffled and form several sets, and so do its control rows. A store is shuffled within conditions when it is written, so
a window is as good a sample as single rows, and reading is sequential. The sets of about sixteen blocks are shuffled
together. All this is a pure function of seed and position. Only a few bytes per block are kept of an epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from perturbdiff.loading.cell_sets import ORDER, TWIN, CellSet, CellSetSampler
from perturbdiff.runtime.seeds import generator

WINDOW = 128
"""Number of rows that are read together: two chunks of a store."""

BLOCK = 1024
"""Number of rows that form sets together, and the size up to which a condition is one block."""

MIXED = 16 * BLOCK
"""Number of rows whose sets are shuffled together."""

_FEWEST_WINDOWS = 4  # in a draw of controls
_BLOCKS, _GROUP = 11, 12  # first words of the seeds, different from those of `cell_sets`

T = TypeVar("T")


class _Recent:
    """A small cache of the most recently used results."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        value = self._kept.pop(key, None)
        if value is None:
            value = make()
        self._kept[key] = value
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return value


class _Epoch(NamedTuple):
    """Order of the blocks, and the groups of successive blocks whose sets are shuffled together.

    Attributes
    ----------
    order
        int32 [blocks].
    group
        int64 [groups + 1]: position in ``order`` of the first block of each group.
    first_set
        int64 [groups + 1]: number of sets in the epoch before each group.
    """

    order: np.ndarray
    group: np.ndarray
    first_set: np.ndarray


class _Block(NamedTuple):
    """The sets of a block: target positions in the condition, and store rows of the controls, each [sets, m]."""

    target: np.ndarray
    control: np.ndarray


class WindowedSampler(CellSetSampler):
    """A stream of cell sets that is read in windows. Its parameters are those of `CellSetSampler` and these.

    Parameters
    ----------
    window, block, mixed
        Number of rows read together, of rows that form sets together, and of rows whose sets are shuffled together.
    """

    def __init__(
        self,
        conditions: pd.DataFrame,
        use: np.ndarray,
        *,
        window: int = WINDOW,
        block: int = BLOCK,
        mixed: int = MIXED,
        **options: Any,
    ) -> None:
        self.window, self._block_rows, self._mixed = window, block, mixed
        super().__init__(conditions, use, **options)

    def _number_sets(self, count: np.ndarray) -> int:
        size = self.set_size
        self._block = self._block_sizes(count)
        self._is_one = np.maximum(self._block_rows, 2 * size) >= count  # the condition is one block
        self._sets = np.where(self._is_one, -(-count // self._block), max(self._block_rows // size, 1))
        blocks = np.where(self._is_one, 1, -(-count // (self._sets * size)))
        self._first_block = np.concatenate([[0], np.cumsum(blocks)])
        self._epochs, self._groups = _Recent(2), _Recent(4)
        self._windows, self._made = _Recent(64), _Recent(max(64, 2 * self._mixed // size))
        # every block has `_sets` sets, except the last one of a condition
        last = -(-(count - (blocks - 1) * self._sets * size) // size)
        self._last = np.where(self._is_one, self._sets, last)
        return int(((blocks - 1) * self._sets + self._last).sum())

    def set_at(self, position: int) -> CellSet:
        """Return the set at a position of the stream. It is the same for every rank."""
        epoch, block, number, slot = self._find(position)
        condition = int(self.targets[slot])
        made = self._made.get((epoch, block), lambda: self._make(epoch, block, slot))
        return CellSet(condition, self._rows.at(condition, made.target[number]), made.control[number])

    def twin_at(self, position: int) -> CellSet:
        """Return another set of the condition at ``position``, drawn at random and independently of the set there."""
        epoch, block, number, slot = self._find(position)
        condition, most = int(self.targets[slot]), int(self._block[slot])
        rng = generator(TWIN, self.seed, epoch, block, number)
        count = int(self._rows.count[condition])
        distinct = self._draw_positions(count, min(most, count), rng)
        cells = np.concatenate([distinct, rng.integers(count, size=self.set_size - len(distinct))])
        if self._is_control[condition]:
            near = self._draw_positions(count, min(count, 2 * self.set_size), rng)
            cells, control = self._own_controls(condition, distinct, rng, np.union1d(near, distinct))
        else:
            control = self._draw_controls(condition, 1, rng)[0]
        return CellSet(condition, self._rows.at(condition, cells), control)

    def _find(self, position: int) -> tuple[int, int, int, int]:
        """Return the epoch, the block, the number in it and the index of the target condition of a stream position."""
        epoch, index = divmod(position, self.sets_per_epoch)
        plan = self._epochs.get(epoch, lambda: self._plan_epoch(epoch))
        group = int(np.searchsorted(plan.first_set, index, side="right")) - 1
        mixed = self._groups.get((epoch, group), lambda: self._mix(epoch, group, plan))
        block, number = mixed[index - int(plan.first_set[group])].tolist()
        return epoch, block, number, int(np.searchsorted(self._first_block, block, side="right")) - 1

    def _sizes(self, blocks: np.ndarray) -> np.ndarray:
        """Return the number of sets in blocks."""
        slot = np.searchsorted(self._first_block, blocks, side="right") - 1
        return np.where(blocks + 1 == self._first_block[slot + 1], self._last[slot], self._sets[slot])

    def _plan_epoch(self, epoch: int) -> _Epoch:
        order = generator(ORDER, self.seed, epoch).permutation(int(self._first_block[-1])).astype(np.int32)
        sets = np.concatenate([[0], np.cumsum(self._sizes(order))])
        number = sets[:-1] * self.set_size // self._mixed
        group = np.concatenate([[0], np.flatnonzero(np.diff(number)) + 1, [len(order)]])
        return _Epoch(order, group, sets[group])

    def _mix(self, epoch: int, group: int, plan: _Epoch) -> np.ndarray:
        """Return the sets of a group in their order: block and number in it, int64 [sets, 2]."""
        blocks = plan.order[plan.group[group] : plan.group[group + 1]].astype(np.int64)
        sizes = self._sizes(blocks)
        number = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        sets = np.stack([np.repeat(blocks, sizes), number], axis=1)
        return generator(_GROUP, self.seed, epoch, group).permutation(sets)

    def _make(self, epoch: int, block: int, slot: int) -> _Block:
        """Return the sets of a block."""
        condition, most, size = int(self.targets[slot]), int(self._block[slot]), self.set_size
        count = int(self._rows.count[condition])
        rng = generator(_BLOCKS, self.seed, epoch, block)
        sets = int(self._sizes(np.array([block]))[0])
        if self._is_one[slot]:
            rows, near = rng.permutation(count), np.arange(count)
            spare = rows
        else:
            begin = (block - int(self._first_block[slot])) * int(self._sets[slot]) * size
            end = min(begin + sets * size, count)
            rows = rng.permutation(self._windowed(epoch, slot, np.arange(begin, end)))
            # the following windows fill the last set, and controls are drawn from them and from the block
            spare = self._windowed(epoch, slot, np.arange(end, begin + max(sets * size, 2 * size)) % count)
            near = np.concatenate([rows, spare])
        target = np.empty((sets, size), np.int64)
        distinct: list[np.ndarray] = []
        for i in range(sets):
            distinct.append(rows[i * most : (i + 1) * most])
            lack = size - len(distinct[i])
            # a condition with fewer cells than a set repeats cells
            fill = rng.integers(count, size=lack) if lack and count < size else spare[:lack]
            target[i, : len(distinct[i])], target[i, len(distinct[i]) :] = distinct[i], fill
        if not self._is_control[condition]:
            return _Block(target, self._draw_controls(condition, sets, rng))
        control = np.empty_like(target)
        for i in range(sets):
            target[i], control[i] = self._own_controls(condition, distinct[i], rng, near)
        return _Block(target, control)

    def _windowed(self, epoch: int, slot: int, places: np.ndarray) -> np.ndarray:
        """Return the positions in a condition at ``places`` in the sequence of its windows."""
        count, window = int(self._rows.count[self.targets[slot]]), self.window

        def laid_out() -> tuple[int, np.ndarray, np.ndarray]:
            rng = generator(_BLOCKS, self.seed, epoch, 0, 1 + slot)
            offset, order = int(rng.integers(count)), rng.permutation(-(-count // window))
            ends = np.cumsum(np.minimum(count - order * window, window))
            return offset, order, ends

        offset, order, ends = self._windows.get((epoch, slot), laid_out)
        which = np.searchsorted(ends, places, side="right")
        before = np.where(which > 0, ends[which - 1], 0)
        return (offset + order[which] * window + places - before) % count

    def _draw_positions(self, count: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return ``size`` of ``count`` positions at random: in windows if there are many, repeated if too few."""
        if count <= 2 * size:
            return rng.choice(count, size, replace=count < size)
        window = max(
            min(self.window, size // (2 * _FEWEST_WINDOWS)), min(self.window // 2, size // _FEWEST_WINDOWS), 1
        )
        chosen = rng.choice(count // window, -(-size // window), replace=False)
        places = (chosen[:, None] * window + np.arange(window)).reshape(-1)[:size]
        return rng.permutation((places + rng.integers(count)) % count)

    def _draw_controls(self, condition: int, sets: int, rng: np.random.Generator) -> np.ndarray:
        """Return control rows for the sets of a block, int64 [sets, m]. Rows of a set repeat only if too few exist."""
        pool, size = self._pools.pool(condition), self.set_size
        total = int(self._rows.count[pool].sum())
        if total >= sets * size:
            return self._rows.pooled(pool, self._draw_positions(total, sets * size, rng)).reshape(sets, size)
        drawn = [rng.choice(total, size, replace=total < size) for _ in range(sets)]
        return np.stack([self._rows.pooled(pool, positions) for positions in drawn])
