"""Large arrays for a while: the first ones in memory, the others in temporary files that are mapped into it.

The system writes a mapped file to the disk when memory is short, so such arrays slow a process down instead of ending
it. The files have no name, and end with their arrays.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np

HELD_BYTES = 16 << 20
"""Of the arrays that are in memory."""
LONG_BYTES = 4 << 20
"""A single array with more bytes than this is in a file."""
_SEGMENT = 64 << 20  # bytes of a file that small arrays share
_ALIGNED = 64

Key = TypeVar("Key", bound=Hashable)


class ScratchArrays:
    """Makes arrays. Threads may share it."""

    def __init__(self) -> None:
        self._segment: np.ndarray = np.empty(HELD_BYTES, np.uint8)  # pages that nobody writes take no memory
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, length: int, dtype: np.dtype) -> np.ndarray:
        """Return an array [length] whose values are undefined.

        If there is no room on the disk, it is in memory.
        """
        size = -(-length * dtype.itemsize // _ALIGNED) * _ALIGNED
        with self._lock:
            if size > len(self._segment) - self._used:
                if size > _SEGMENT // 4:
                    return _mapped(size)[: length * dtype.itemsize].view(dtype)
                self._segment, self._used = _mapped(_SEGMENT), 0
            found = self._segment[self._used : self._used + length * dtype.itemsize]
            self._used += size
        return found.view(dtype)


def long_array(length: int, dtype: np.dtype) -> np.ndarray:
    """Return an array [length] of undefined values: in memory if it is short, else in a temporary file.

    If there is no room on the disk, it is in memory.
    """
    size = length * dtype.itemsize
    return np.empty(length, dtype) if size <= LONG_BYTES else _mapped(size).view(dtype)


class PackedRows(Mapping[Key, np.ndarray]):
    """Row numbers (int64) by key, one after the other in a single `long_array`.

    Parameters
    ----------
    most
        Number of rows of all keys together, at most.
    rows
        The rows of each key.
    """

    def __init__(self, most: int, rows: Iterable[tuple[Key, np.ndarray]]) -> None:
        self._every, self._ends, end = long_array(most, np.dtype(np.int64)), {}, 0
        for key, some in rows:
            start, end = end, end + len(some)
            self._every[start:end] = some
            self._ends[key] = start, end

    def __getitem__(self, key: Key) -> np.ndarray:
        start, end = self._ends[key]
        return self._every[start:end]

    def __contains__(self, key: object) -> bool:
        return key in self._ends

    def __iter__(self) -> Iterator[Key]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)


def _mapped(size: int) -> np.ndarray:
    """Return ``size`` bytes of a new temporary file."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            # reserved at once: writing to a mapped file on a full disk ends the process
            os.posix_fallocate(file.fileno(), 0, size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError:
        return np.empty(size, np.uint8)
