"""Reads a few rows, or consecutive rows, of a store of any size in constant memory.

`Store` keeps the position and the depth of every cell, 12 bytes for each, because the loader reads random rows all the
time. Code that goes through a store once, or takes a small sample, reads them in windows of rows instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from scipy import sparse

from perturbdiff.runtime.errors import UserError
from perturbdiff.store import row_kernels
from perturbdiff.store.store import Store, reading, value_factors
from perturbdiff.store.zarr_shards import ShardedReader

_WINDOW = 65_536
"""Number of rows whose positions and depths are kept: one chunk of these arrays in a store."""

_GAP_ROWS = 64  # rows further apart than this are read separately


@dataclass(frozen=True)
class Located:
    """Positions of rows in a store.

    Attributes
    ----------
    part, start, length
        Partition of the store, position of the row's first value in it, and number of values, int64 [n].
    depth
        float32 [n].
    """

    part: np.ndarray
    start: np.ndarray
    length: np.ndarray
    depth: np.ndarray

    def take(self, index: np.ndarray) -> Located:
        """Return some of the rows."""
        return Located(self.part[index], self.start[index], self.length[index], self.depth[index])


class RowReader:
    """Reads rows of a store as log1p values. It keeps the positions of at most 65,536 rows.

    Parameters
    ----------
    store
        An open store. No complete column of it is read.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._parts, self.edges = store.parts, store.edges
        self._window: tuple[int, int, np.ndarray, np.ndarray] = -1, -1, np.empty(0), np.empty(0)
        self._matrices: dict[int, tuple[ShardedReader, ShardedReader]] = {}
        self._columns: dict[tuple[int, str], Any] = {}

    def depth(self, start: int, stop: int) -> np.ndarray:
        """Return the depth of rows ``start`` to ``stop`` over all genes of the input, float32."""
        pieces = [np.empty(0, np.float32)]
        for part, (low, high) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True)):
            if start < high and stop > low:
                depth = self._column(
                    part, "obs/n_counts", int(max(start, low) - low), int(min(stop, high) - low)
                )
                pieces.append(depth.astype(np.float32, copy=False))
        return np.concatenate(pieces)

    def stretch(self, start: int, stop: int) -> sparse.csr_matrix:
        """Return log1p values of rows ``start`` to ``stop``, float32 CSR [n, G]."""
        return self.expression(np.arange(start, stop, dtype=np.int64))

    def expression(self, rows: np.ndarray) -> sparse.csr_matrix:
        """Return log1p values (natural logarithm, not divided by ``scale``) of ascending rows.

        Parameters
        ----------
        rows
            Row numbers of the store, int64 [n], ascending.

        Returns
        -------
        scipy.sparse.csr_matrix
            float32 [n, G].
        """
        return self.read(self.locate(rows))

    def locate(self, rows: np.ndarray) -> Located:
        """Return the positions of ascending rows. It reads each window of rows once, so ask for many rows at a time.

        Raises
        ------
        UserError
            If row pointers or depths are damaged.
        """
        part = np.searchsorted(self.edges, rows, "right") - 1
        place = rows - self.edges[part]
        start, length = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        depth = np.empty(len(rows), np.float32)
        number = place // _WINDOW
        cuts = np.flatnonzero((np.diff(part) != 0) | (np.diff(number) != 0)) + 1
        for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            if last > first:
                pointers, depths = self._open_window(int(part[first]), int(number[first]))
                local = place[first:last] % _WINDOW
                start[first:last] = pointers[local]
                length[first:last] = pointers[local + 1] - pointers[local]
                depth[first:last] = depths[local]
        return Located(part, start, length, depth)

    def read(self, rows: Located) -> sparse.csr_matrix:
        """Return log1p values of located rows in ascending order, float32 CSR [n, G]."""
        indptr = np.concatenate([[0], np.cumsum(rows.length)])
        indices, data = np.empty(int(indptr[-1]), np.int32), np.empty(int(indptr[-1]), np.float32)
        gap = _GAP_ROWS * max(1, self.store.n_values // max(1, self.store.n_cells))
        apart = np.diff(rows.part) != 0
        apart |= rows.start[1:] - (rows.start[:-1] + rows.length[:-1]) > gap
        cuts = np.flatnonzero(apart) + 1
        for first, last in zip([0, *cuts], [*cuts, len(rows.start)], strict=True):
            if last > first:
                run = rows.take(np.arange(first, last))
                out = slice(int(indptr[first]), int(indptr[last]))
                self._read_run(run, indptr[first:last] - indptr[first], indices[out], data[out])
        shape = (len(rows.start), self.store.n_genes)
        return sparse.csr_matrix((data, indices, indptr), shape=shape)

    def _read_run(
        self, rows: Located, offset: np.ndarray, out_indices: np.ndarray, out_data: np.ndarray
    ) -> None:
        """Read rows that lie close together in one partition."""
        low, high = int(rows.start[0]), int(rows.start[-1] + rows.length[-1])
        stored_indices, stored_data = self._matrix(int(rows.part[0]))
        indices, data = np.empty(high - low, stored_indices.dtype), np.empty(high - low, stored_data.dtype)
        stored_indices.read(low, high, indices)
        stored_data.read(low, high, data)
        pieces = (rows.start - low, rows.length, np.arange(len(rows.start)), indices, data)
        scale = self.store.input_scale
        if scale == "log1p":
            row_kernels.take_values(*pieces, offset, out_indices, out_data)
        else:
            factors = value_factors(rows.depth, self.store.target_sum, scale)
            row_kernels.take_log1p(*pieces, factors, offset, out_indices, out_data)

    def _open_window(self, part: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the rows' first values in a window, int64 [n + 1], and the depths, float32 [n]."""
        if self._window[:2] != (part, number):
            low = number * _WINDOW
            high = min(low + _WINDOW, int(self.edges[part + 1] - self.edges[part]))
            pointers = self._column(part, "X/indptr", low, high + 1).astype(np.int64, copy=False)
            depth = self._column(part, "obs/n_counts", low, high).astype(np.float32, copy=False)
            sizes = np.diff(pointers)
            # zarr reads a chunk whose file is missing as zeros
            if (sizes < 0).any() or (depth[sizes > 0] <= 0).any():
                raise UserError(f"{self._parts[part]}: is damaged; run preprocess again with --force")
            self._window = part, number, pointers, depth
        return self._window[2], self._window[3]

    def _column(self, part: int, name: str, start: int, stop: int) -> np.ndarray:
        with reading(self._parts[part]):
            if (part, name) not in self._columns:
                self._columns[part, name] = zarr.open_array(self._parts[part] / name, mode="r")
            return np.asarray(self._columns[part, name][start:stop])

    def _matrix(self, part: int) -> tuple[ShardedReader, ShardedReader]:
        if part not in self._matrices:
            with reading(self._parts[part]):
                x = self._parts[part] / "X"
                self._matrices[part] = ShardedReader(x / "indices"), ShardedReader(x / "data")
        return self._matrices[part]
