"""Large arrays for a while: the first ones in memory, the others in temporary files that are mapped into it.

The system writes a mapped file to the disk when memory is short, so such arrays slow a process down instead of ending
it. The files have no name, and end with their arrays.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading

import numpy as np

HELD_BYTES = 16 << 20
"""Of the arrays that are in memory."""
_SEGMENT = 64 << 20  # bytes of a file that small arrays share
_ALIGNED = 64


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


def _mapped(size: int) -> np.ndarray:
    """Return ``size`` bytes of a new temporary file."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            # reserved at once: writing to a mapped file on a full disk ends the process
            os.posix_fallocate(file.fileno(), 0, size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError:
        return np.empty(size, np.uint8)
