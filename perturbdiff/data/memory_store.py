"""A store held in memory: any rows at hand, without reading or decoding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perturbdiff.data.shards import ShardedReader
from perturbdiff.data.store import Store
from perturbdiff.data.stored_rows import Pieces

_VALUES_PER_READ = 1 << 24


class MemoryStore(Store):
    """A store whose column numbers and values are held in memory; see `Store`.

    Parameters
    ----------
    store
        The store on disk.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store.path)
        self.__dict__ |= {
            name: store.__dict__[name] for name in ("_pointers", "n_counts") if name in store.__dict__
        }
        self._indices = np.empty(self.n_values, self.index_dtype)
        self._data = np.empty(self.n_values, self.dtype)
        for path, base in zip(self._parts, self._pointers.base, strict=False):
            for name, values in (("indices", self._indices), ("data", self._data)):
                _fill(ShardedReader(path / "X" / name), values[base:])

    def in_memory(self) -> MemoryStore:
        """Return itself."""
        return self

    def pieces(self, rows: np.ndarray) -> Iterator[Pieces]:
        """Yield where the values of ``rows`` (int64 [n]) lie in memory."""
        begin, size = self._pointers.flat(rows)
        yield Pieces(begin, size, np.arange(len(rows)), self._indices, self._data)


def _fill(reader: ShardedReader, values: np.ndarray) -> None:
    """Read a whole array into the beginning of ``values``, in pieces that end with chunks."""
    step = max(_VALUES_PER_READ // reader.chunk, 1) * reader.chunk
    for start in range(0, reader.length, step):
        stop = min(start + step, reader.length)
        reader.read(start, stop, values[start:stop])
