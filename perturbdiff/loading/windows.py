"""Cell sets of a store too large for memory: rows are read in windows, and several sets share what was read.

A *bundle* is some thousand rows of one condition: all of it if it is small, else windows of successive rows, cut at an
offset that is new in each epoch and taken in a new order. Its rows are shuffled and make several sets; so do its
control rows. A store is shuffled within conditions when it is written, so a window is as fair a sample as single rows,
and reading is sequential. The sets of about sixteen bundles are shuffled together. All of it is a pure function of
seed and position, and what is kept of an epoch is a few bytes per bundle.
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
"""Rows read together: two chunks of a store."""

BUNDLE = 1024
"""Rows that make sets together, and the size up to which a condition is one bundle."""

MIXED = 16 * BUNDLE
"""Rows whose sets are shuffled together."""

_FEWEST_WINDOWS = 4  # in a draw of controls
_BUNDLES, _GROUP, _CONTROLS = 11, 12, 13  # first words of the seeds, beside those of `cell_sets`

T = TypeVar("T")


class _Recent:
    """The last few results of a function of numbers."""

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
    """Order of the bundles, and the groups of successive bundles whose sets are shuffled together.

    Attributes
    ----------
    order
        int32 [bundles].
    group
        int64 [groups + 1]: first bundle in that order.
    first_set
        int64 [groups + 1]: sets of the epoch before each group.
    """

    order: np.ndarray
    group: np.ndarray
    first_set: np.ndarray


class _Bundle(NamedTuple):
    """Positions in a condition of the targets, and store rows of the controls, each [sets, m]."""

    target: np.ndarray
    control: np.ndarray


class WindowedSampler(CellSetSampler):
    """The stream of cell sets of one store, read in windows; see `CellSetSampler`, whose parameters it has.

    Parameters
    ----------
    window, bundle, mixed
        Rows read together, rows that make sets together, and rows whose sets are shuffled together.
    """

    def __init__(
        self,
        conditions: pd.DataFrame,
        use: np.ndarray,
        *,
        window: int = WINDOW,
        bundle: int = BUNDLE,
        mixed: int = MIXED,
        **options: Any,
    ) -> None:
        self.window, self._bundle_rows, self._mixed = window, bundle, mixed
        super().__init__(conditions, use, **options)

    def _number_sets(self, count: np.ndarray) -> int:
        size = self.set_size
        self._block = self._block_sizes(count)
        self._whole = np.maximum(self._bundle_rows, 2 * size) >= count
        self._sets = np.where(self._whole, -(-count // self._block), max(self._bundle_rows // size, 1))
        bundles = np.where(self._whole, 1, -(-count // (self._sets * size)))
        self._first_bundle = np.concatenate([[0], np.cumsum(bundles)])
        self._epochs, self._groups = _Recent(2), _Recent(4)
        self._windows, self._made = _Recent(64), _Recent(max(64, 2 * self._mixed // size))
        # sets of every bundle but a condition's last are `_sets`
        last = -(-(count - (bundles - 1) * self._sets * size) // size)
        self._last = np.where(self._whole, self._sets, last)
        return int(((bundles - 1) * self._sets + self._last).sum())

    def set_at(self, position: int) -> CellSet:
        """Return the set at a position of the stream, the same for every rank."""
        epoch, bundle, number, slot = self._find(position)
        condition = int(self.targets[slot])
        made = self._made.get((epoch, bundle), lambda: self._make(epoch, bundle, slot))
        return CellSet(condition, self._rows.at(condition, made.target[number]), made.control[number])

    def twin_at(self, position: int) -> CellSet:
        """Return another set of the same condition, drawn at random and independently of the one at ``position``."""
        epoch, bundle, number, slot = self._find(position)
        condition, block = int(self.targets[slot]), int(self._block[slot])
        rng = generator(TWIN, self.seed, epoch, bundle, number)
        count = int(self._rows.count[condition])
        own = self._draw_positions(count, min(block, count), rng)
        cells = np.concatenate([own, rng.integers(count, size=self.set_size - len(own))])
        if self._is_control[condition]:
            near = self._draw_positions(count, min(count, 2 * self.set_size), rng)
            cells, control = self._own_controls(condition, own, rng, np.union1d(near, own))
        else:
            control = self._draw_controls(condition, 1, rng)[0]
        return CellSet(condition, self._rows.at(condition, cells), control)

    def _find(self, position: int) -> tuple[int, int, int, int]:
        """Return epoch, bundle, number in the bundle and place of the condition for a position of the stream."""
        epoch, index = divmod(position, self.sets_per_epoch)
        plan = self._epochs.get(epoch, lambda: self._plan_epoch(epoch))
        group = int(np.searchsorted(plan.first_set, index, side="right")) - 1
        mixed = self._groups.get((epoch, group), lambda: self._mix(epoch, group, plan))
        bundle, number = mixed[index - int(plan.first_set[group])].tolist()
        return epoch, bundle, number, int(np.searchsorted(self._first_bundle, bundle, side="right")) - 1

    def _sizes(self, bundles: np.ndarray) -> np.ndarray:
        """Return how many sets bundles have."""
        slot = np.searchsorted(self._first_bundle, bundles, side="right") - 1
        return np.where(bundles + 1 == self._first_bundle[slot + 1], self._last[slot], self._sets[slot])

    def _plan_epoch(self, epoch: int) -> _Epoch:
        order = generator(ORDER, self.seed, epoch).permutation(int(self._first_bundle[-1])).astype(np.int32)
        sets = np.concatenate([[0], np.cumsum(self._sizes(order))])
        number = sets[:-1] * self.set_size // self._mixed
        group = np.concatenate([[0], np.flatnonzero(np.diff(number)) + 1, [len(order)]])
        return _Epoch(order, group, sets[group])

    def _mix(self, epoch: int, group: int, plan: _Epoch) -> np.ndarray:
        """Return the sets of a group in their order: bundle and number in it, int64 [sets, 2]."""
        bundles = plan.order[plan.group[group] : plan.group[group + 1]].astype(np.int64)
        sizes = self._sizes(bundles)
        number = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        sets = np.stack([np.repeat(bundles, sizes), number], axis=1)
        return generator(_GROUP, self.seed, epoch, group).permutation(sets)

    def _make(self, epoch: int, bundle: int, slot: int) -> _Bundle:
        """Return the sets of a bundle."""
        condition, block, size = int(self.targets[slot]), int(self._block[slot]), self.set_size
        count = int(self._rows.count[condition])
        rng = generator(_BUNDLES, self.seed, epoch, bundle)
        sets = int(self._sizes(np.array([bundle]))[0])
        if self._whole[slot]:
            rows, near = rng.permutation(count), np.arange(count)
            spare = rows
        else:
            begin = (bundle - int(self._first_bundle[slot])) * int(self._sets[slot]) * size
            end = min(begin + sets * size, count)
            rows = rng.permutation(self._windowed(epoch, slot, np.arange(begin, end)))
            # what fills the last set, and what controls are drawn from beside the bundle: the windows that follow
            spare = self._windowed(epoch, slot, np.arange(end, begin + max(sets * size, 2 * size)) % count)
            near = np.concatenate([rows, spare])
        target = np.empty((sets, size), np.int64)
        own: list[np.ndarray] = []
        for i in range(sets):
            own.append(rows[i * block : (i + 1) * block])
            lack = size - len(own[i])
            # a condition of fewer cells than a set has repeats
            fill = rng.integers(count, size=lack) if lack and count < size else spare[:lack]
            target[i, : len(own[i])], target[i, len(own[i]) :] = own[i], fill
        if not self._is_control[condition]:
            return _Bundle(target, self._draw_controls(condition, sets, rng))
        control = np.empty_like(target)
        for i in range(sets):
            target[i], control[i] = self._own_controls(condition, own[i], rng, near)
        return _Bundle(target, control)

    def _windowed(self, epoch: int, slot: int, places: np.ndarray) -> np.ndarray:
        """Return the positions in a condition that stand at ``places`` of its windows laid end to end."""
        count, window = int(self._rows.count[self.targets[slot]]), self.window

        def laid_out() -> tuple[int, np.ndarray, np.ndarray]:
            rng = generator(_BUNDLES, self.seed, epoch, 0, 1 + slot)
            offset, order = int(rng.integers(count)), rng.permutation(-(-count // window))
            ends = np.cumsum(np.minimum(count - order * window, window))
            return offset, order, ends

        offset, order, ends = self._windows.get((epoch, slot), laid_out)
        which = np.searchsorted(ends, places, side="right")
        before = np.where(which > 0, ends[which - 1], 0)
        return (offset + order[which] * window + places - before) % count

    def _draw_positions(self, count: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return ``size`` of ``count`` positions at random, in windows if there are many; repeats if too few."""
        if count <= 2 * size:
            return rng.choice(count, size, replace=count < size)
        window = max(
            min(self.window, size // (2 * _FEWEST_WINDOWS)), min(self.window // 2, size // _FEWEST_WINDOWS), 1
        )
        chosen = rng.choice(count // window, -(-size // window), replace=False)
        places = (chosen[:, None] * window + np.arange(window)).reshape(-1)[:size]
        return rng.permutation((places + rng.integers(count)) % count)

    def _draw_controls(self, condition: int, sets: int, rng: np.random.Generator) -> np.ndarray:
        """Return control rows for the sets of a bundle, int64 [sets, m]; no set has one twice if there are enough."""
        pool, size = self._pools.pool(condition), self.set_size
        total = int(self._rows.count[pool].sum())
        if total >= sets * size:
            return self._rows.pooled(pool, self._draw_positions(total, sets * size, rng)).reshape(sets, size)
        drawn = [rng.choice(total, size, replace=total < size) for _ in range(sets)]
        return np.stack([self._rows.pooled(pool, positions) for positions in drawn])
