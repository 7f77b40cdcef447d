"""An array with an entry for each row, of which a block is read when one of its rows is first asked for.

What is never asked for takes no memory: the array's pages are untouched. A command that reads the cells of some
conditions so needs the positions and depths of these, however many cells the store has. A long array is in a temporary
file that is mapped, so that the system can take its pages back where all rows are asked for, as in training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from perturbdiff.runtime.large_arrays import long_array

Read = Callable[[int, int, np.ndarray], None]
"""Writes the entries ``start`` to ``stop`` into an array of that many."""

_BITS = 16  # a block has 2 to the power of this many entries, like a chunk of these arrays in a store


class RowBlocks:
    """Entries of a long array, read in blocks. Threads may share it.

    Parameters
    ----------
    length, dtype
        Of the array.
    read
        Reads a block. What it raises is raised where the block is asked for, each time.
    """

    def __init__(self, length: int, dtype: np.dtype, read: Read) -> None:
        self._values, self._read = long_array(length, dtype), read
        self._missing = np.ones(-(-length // (1 << _BITS)), bool)
        self._whole = not length
        self._lock = threading.Lock()

    @classmethod
    def held(cls, values: np.ndarray) -> RowBlocks:
        """Return blocks of which all were read: ``values``."""
        blocks = cls(0, values.dtype, lambda *_: None)
        blocks._values = values
        return blocks

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the entries at ``places``, int64 [n]."""
        self.need(places)
        return self._values[places]

    def need(self, places: np.ndarray) -> None:
        """Read the blocks of ``places`` (int64 [n]) that were not read yet."""
        if self._whole:
            return
        wanted = np.zeros_like(self._missing)
        wanted[places >> _BITS] = True
        self._fill(wanted)

    @property
    def every(self) -> np.ndarray:
        """All entries."""
        if not self._whole:
            self._fill(np.ones_like(self._missing))
        return self._values

    def _fill(self, wanted: np.ndarray) -> None:
        if not (wanted & self._missing).any():
            return
        with self._lock:
            for block in np.flatnonzero(wanted & self._missing).tolist():
                start, stop = block << _BITS, min((block + 1) << _BITS, len(self._values))
                self._read(start, stop, self._values[start:stop])
                self._missing[block] = False
            self._whole = not self._missing.any()
