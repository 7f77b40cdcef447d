"""Decoded chunks of a store, kept in one block of memory that never grows and is shared by reading threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from perturbdiff.store import row_kernels

_AWAITED, _READY, _FAILED = 0, 1, 2

Decode = Callable[[Sequence[int], Sequence[int]], None]
"""Decodes chunks (numbers, ascending) into slots of the cache."""


class ChunkCache:
    """Slots for decoded chunks: their column numbers and values.

    Parameters
    ----------
    chunks
        Chunks there are.
    length
        Values in the largest chunk.
    index_dtype, dtype
        Of column numbers and values.
    budget
        Bytes that the slots may take together.
    fewest
        Slots that there are whatever the budget.

    Attributes
    ----------
    indices, data
        [slots, length].
    slot_of
        int32 [chunks]: the slot of each chunk, -1 if it has none.
    """

    def __init__(
        self,
        chunks: int,
        length: int,
        index_dtype: np.dtype,
        dtype: np.dtype,
        *,
        budget: int,
        fewest: int,
    ) -> None:
        size = length * (index_dtype.itemsize + dtype.itemsize)
        slots = max(min(chunks, max(fewest, budget // max(size, 1))), 1)
        self.indices, self.data = np.empty((slots, length), index_dtype), np.empty((slots, length), dtype)
        self.slot_of = np.full(chunks, -1, np.int32)
        self._owner = np.full(slots, -1, np.int64)
        self._pins = np.zeros(slots, np.int32)
        self._used = np.zeros(slots, bool)
        self._state = np.full(slots, _FAILED, np.uint8)
        self._hand = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._owner)

    @contextmanager
    def lent(self, numbers: np.ndarray, decode: Decode) -> Iterator[None]:
        """Keep these chunks (ascending, at most a quarter of the slots) in their slots while the block runs.

        A chunk that another thread is decoding is waited for.
        """
        absent = np.empty(len(numbers), np.int64)
        with self._changed:
            while (count := self._take(numbers, absent)) < 0:
                self._changed.wait()
            slots, absent = self.slot_of[numbers], absent[:count]
            self._state[self.slot_of[absent]] = _AWAITED
        try:
            self._fill(absent, decode)
            with self._changed:
                self._changed.wait_for(lambda: not (self._state[slots] == _AWAITED).any())
                failed = numbers[self._state[slots] == _FAILED]
            self._fill(failed, decode)  # the thread that was to do it could not: find out why
            yield
        finally:
            with self._changed:
                self._pins[slots] -= 1
                self._changed.notify_all()

    def _take(self, numbers: np.ndarray, absent: np.ndarray) -> int:
        self._hand, count = row_kernels.take_slots(
            numbers, self.slot_of, self._owner, self._pins, self._used, self._hand, absent
        )
        return count

    def _fill(self, numbers: np.ndarray, decode: Decode) -> None:
        """Decode chunks into their slots and tell who waits for them."""
        if not len(numbers):
            return
        slots, state = self.slot_of[numbers], _FAILED
        try:
            decode(numbers.tolist(), slots.tolist())
            state = _READY
        finally:
            with self._changed:
                self._state[slots] = state
                self._changed.notify_all()
