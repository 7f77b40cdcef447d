"""A store held in memory: any rows at hand, without reading or decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from perturbdiff.store.zarr_shards import ShardedReader
from perturbdiff.runtime.shared_memory import Node
from perturbdiff.store.store import Store
from perturbdiff.store.stored_rows import Pieces, RowPointers

_VALUES_PER_READ = 1 << 24
_ALIGNED = 64


class MemoryStore(Store):
    """A store whose column numbers and values are held in memory; see `Store`.

    Parameters
    ----------
    store
        The store on disk.
    node
        Hold one copy together with the other processes of a node; all of them have to do so.
    """

    def __init__(self, store: Store, node: Node | None = None) -> None:
        super().__init__(store.path)
        if node is None:
            pointers, depth = store._pointers, store.n_counts
            self._indices = np.empty(self.n_values, self.index_dtype)
            self._data = np.empty(self.n_values, self.dtype)
            self._read_values(pointers)
        else:
            pointers, depth = self._share(node, store)
        # cached properties of `Store`
        self.__dict__ |= {"_pointers": pointers, "n_counts": depth}

    def in_memory(self, node: Node | None = None) -> MemoryStore:
        """Return itself."""
        return self

    def pieces(self, rows: np.ndarray) -> Iterator[Pieces]:
        """Yield where the values of ``rows`` (int64 [n]) lie in memory."""
        begin, size = self._pointers.flat(rows)
        yield Pieces(begin, size, np.arange(len(rows)), self._indices, self._data)

    def _share(self, node: Node, store: Store) -> tuple[RowPointers, np.ndarray]:
        """Lay all arrays into one block; return the row pointers and depths there."""
        pointer = RowPointers.dtype_for(self.n_values)
        kinds = [
            (self.n_values, self.index_dtype),
            (self.n_values, self.dtype),
            (self.n_cells + len(self._parts), pointer),
            (self.n_cells, np.dtype(np.float32)),
        ]
        places = np.cumsum([0, *(-(-n * dtype.itemsize // _ALIGNED) * _ALIGNED for n, dtype in kinds)])

        def cut(block: np.ndarray) -> list[np.ndarray]:
            return [
                block[a : a + n * dtype.itemsize].view(dtype)
                for a, (n, dtype) in zip(places, kinds, strict=False)
            ]

        def fill(block: np.ndarray) -> None:
            self._indices, self._data, rows, depth = cut(block)
            rows[:], depth[:] = store._pointers.places, store.n_counts
            self._read_values(store._pointers)

        key = str(Path(self.path).resolve())
        self._indices, self._data, rows, depth = cut(node.share(key, int(places[-1]), fill))
        return RowPointers(self._parts, self._edges, self.n_values, rows), depth

    def _read_values(self, pointers: RowPointers) -> None:
        for path, base in zip(self._parts, pointers.base, strict=False):
            for name, values in (("indices", self._indices), ("data", self._data)):
                _fill(ShardedReader(path / "X" / name), values[base:])


def _fill(reader: ShardedReader, values: np.ndarray) -> None:
    """Read a whole array into the beginning of ``values``, in pieces that end with chunks."""
    step = max(_VALUES_PER_READ // reader.chunk, 1) * reader.chunk
    for start in range(0, reader.length, step):
        stop = min(start + step, reader.length)
        reader.read(start, stop, values[start:stop])
