"""Reading a few rows, or a stretch of rows, of a store of any size in constant memory.

`Store` keeps the place and the depth of every cell, 12 bytes each, since the loader asks for random rows all the
time. What goes through a store once, or takes a small sample, reads these per window of rows instead.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr
from scipy import sparse

from perturbdiff.data import row_kernels
from perturbdiff.data.shards import ShardedReader
from perturbdiff.data.store import Store, value_factors
from perturbdiff.errors import UserError

_WINDOW = 65_536
"""Rows whose places and depths are kept together: a chunk of these arrays in a store."""

_WINDOWS_KEPT = 8
_GAP_ROWS = 64


@dataclass(frozen=True)
class _Window:
    """Places of the first values of rows within their part, int64 [n + 1], and depths, float32 [n]."""

    pointers: np.ndarray
    depth: np.ndarray


class RowReader:
    """Rows of a store as log1p values; holds a few windows of 65,536 rows at a time.

    Parameters
    ----------
    store
        A store that was opened; none of its whole columns are read.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        parts = json.loads((store.path / "manifest.json").read_text())["results"]["store"]["parts"]
        self._parts = [store.path / str(part["name"]) for part in parts]
        self.edges = np.cumsum([0, *(int(part["n_cells"]) for part in parts)])
        self._windows: OrderedDict[tuple[int, int], _Window] = OrderedDict()
        self._matrices: dict[int, tuple[ShardedReader, ShardedReader]] = {}

    def depth(self, start: int, stop: int) -> np.ndarray:
        """Return the depth of rows ``start`` to ``stop`` over all genes of the input, float32."""
        pieces = [np.empty(0, np.float32)]
        for part, low, high in self._pieces(start, stop):
            with _explained(self._parts[part]):
                array = zarr.open_array(self._parts[part] / "obs" / "n_counts", mode="r")
                pieces.append(np.asarray(array[low:high], np.float32))
        return np.concatenate(pieces)

    def stretch(self, start: int, stop: int) -> sparse.csr_matrix:
        """Return log1p values of rows ``start`` to ``stop``, float32 CSR [n, G]."""
        return self.expression(np.arange(start, stop, dtype=np.int64))

    def expression(self, rows: np.ndarray) -> sparse.csr_matrix:
        """Return log1p values (natural logarithm, not divided by the scale) of ascending rows.

        Parameters
        ----------
        rows
            Row numbers of the store, int64 [n], ascending.

        Returns
        -------
        scipy.sparse.csr_matrix
            float32 [n, G].
        """
        part = np.searchsorted(self.edges, rows, "right") - 1
        place = rows - self.edges[part]
        lengths, indices, data = [], [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        cuts = np.flatnonzero((np.diff(part) != 0) | (np.diff(place // _WINDOW) != 0)) + 1
        for own in np.split(np.arange(len(rows)), cuts):
            if len(own):
                found = self._take(int(part[own[0]]), place[own])
                for all_, one in zip((lengths, indices, data), found, strict=True):
                    all_.append(one)
        indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]))])
        shape = (len(rows), self.store.n_genes)
        return sparse.csr_matrix((np.concatenate(data), np.concatenate(indices), indptr), shape=shape)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield part, first and last row within it, of a stretch of the store."""
        for part, (low, high) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True)):
            if start < high and stop > low:
                yield part, int(max(start, low) - low), int(min(stop, high) - low)

    def _take(self, part: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return lengths, column numbers and log1p values of rows of one window of one part."""
        window = self._window(part, int(rows[0]) // _WINDOW)
        local = rows % _WINDOW
        starts = window.pointers[local]
        lengths = window.pointers[local + 1] - starts
        matrix = self._matrix(part)
        out_indices = np.empty(int(lengths.sum()), np.int32)
        out_data = np.empty(len(out_indices), np.float32)
        scale = self.store.input_scale
        factors = value_factors(window.depth[local], self.store.target_sum, scale)
        end = 0
        for own in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(local) > _GAP_ROWS) + 1):
            low, high = int(starts[own[0]]), int(starts[own[-1]] + lengths[own[-1]])
            indices = np.empty(high - low, matrix[0].dtype)
            data = np.empty(high - low, matrix[1].dtype)
            matrix[0].read(low, high, indices)
            matrix[1].read(low, high, data)
            size = int(lengths[own].sum())
            at, into, out = starts[own] - low, out_indices[end : end + size], out_data[end : end + size]
            row, offset = np.arange(len(own)), np.cumsum(lengths[own]) - lengths[own]
            found = (at, lengths[own], row, indices, data)
            if scale == "log1p":
                row_kernels.take_values(*found, offset, into, out)
            else:
                row_kernels.take_log1p(*found, factors[own], offset, into, out)
            end += size
        return lengths, out_indices, out_data

    def _window(self, part: int, number: int) -> _Window:
        key = (part, number)
        if key not in self._windows:
            start = int(self.edges[part]) + number * _WINDOW
            stop = min(start + _WINDOW, int(self.edges[part + 1]))
            with _explained(self._parts[part]):
                array = zarr.open_array(self._parts[part] / "X" / "indptr", mode="r")
                low = number * _WINDOW
                pointers = np.asarray(array[low : low + stop - start + 1], np.int64)
            depth = self.depth(start, stop)
            # zarr reads a chunk whose file is gone as zeros
            if (np.diff(pointers) < 0).any() or (depth[np.diff(pointers) > 0] <= 0).any():
                raise UserError(f"{self._parts[part]}: is damaged; run preprocess again with --force")
            self._windows[key] = _Window(pointers, depth)
            if len(self._windows) > _WINDOWS_KEPT:
                self._windows.popitem(last=False)
        self._windows.move_to_end(key)
        return self._windows[key]

    def _matrix(self, part: int) -> tuple[ShardedReader, ShardedReader]:
        if part not in self._matrices:
            with _explained(self._parts[part]):
                x = self._parts[part] / "X"
                self._matrices[part] = ShardedReader(x / "indices"), ShardedReader(x / "data")
        return self._matrices[part]


@contextlib.contextmanager
def _explained(part: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{part}: is damaged ({reason}); run preprocess again with --force") from error
