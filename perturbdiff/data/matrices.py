"""Row blocks of a matrix on disk: CSR, dense or CSC, in HDF5 or Zarr, never the whole matrix at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy import sparse

VALUES_PER_BLOCK = 4_000_000
"""Stored values read at once: some 32 to 48 MB of int32 columns and float values."""

_POINTERS_PER_READ = 1 << 18


@dataclass(frozen=True)
class Block:
    """Rows ``start`` to ``stop`` as CSR: ``indptr`` int64 from 0, ``indices`` int32, ``data`` float32 or 64."""

    start: int
    stop: int
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


class RowMatrix(Protocol):
    """A matrix that is read from the first row to the last."""

    shape: tuple[int, int]

    def blocks(self, limit: int = VALUES_PER_BLOCK) -> Iterator[Block]:
        """Yield consecutive row blocks of about ``limit`` stored values."""
        ...


def _block(start: int, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, columns: int) -> Block:
    indptr = np.asarray(indptr, np.int64)
    if len(indices) != indptr[-1] - indptr[0] or len(data) != len(indices):
        raise ValueError("the sparse matrix has fewer values than its row pointers say")
    if len(indices) and (indices.min() < 0 or indices.max() >= columns):
        raise ValueError("the sparse matrix has an entry outside its shape")
    exact = np.float32 if data.dtype == np.float32 or data.dtype.itemsize <= 2 else np.float64
    return Block(
        start,
        start + len(indptr) - 1,
        indptr - indptr[0],
        np.ascontiguousarray(indices, np.int32),
        np.ascontiguousarray(data, exact),
    )


class CsrMatrix:
    """A compressed sparse row matrix: the group of ``data``, ``indices`` and ``indptr``."""

    def __init__(self, group: Any, shape: tuple[int, int]) -> None:
        self.group, self.shape = group, shape

    def blocks(self, limit: int = VALUES_PER_BLOCK) -> Iterator[Block]:
        """Yield consecutive row blocks; row pointers are read in pieces as well."""
        pointers, indices, data = (self.group[k] for k in ("indptr", "indices", "data"))
        row = 0
        while row < self.shape[0]:
            indptr = np.asarray(pointers[row : row + _POINTERS_PER_READ + 1], np.int64)
            if (np.diff(indptr) < 0).any():
                raise ValueError("the sparse matrix has descending row pointers")
            a = 0
            while a < len(indptr) - 1:
                b = max(a + 1, int(np.searchsorted(indptr, indptr[a] + limit, "right")) - 1)
                span = slice(int(indptr[a]), int(indptr[b]))
                yield _block(row + a, indptr[a : b + 1], indices[span], data[span], self.shape[1])
                a = b
            row += len(indptr) - 1


class DenseMatrix:
    """A dense two-dimensional array."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, (int(array.shape[0]), int(array.shape[1]))

    def blocks(self, limit: int = VALUES_PER_BLOCK) -> Iterator[Block]:
        """Yield row blocks of about ``limit`` entries, with the zeros left out."""
        rows = max(1, limit // max(1, self.shape[1]))
        for start in range(0, self.shape[0], rows):
            part = sparse.csr_matrix(np.asarray(self.array[start : start + rows]))
            yield _block(start, part.indptr, part.indices, part.data, self.shape[1])


class CscMatrix:
    """A compressed sparse column matrix, turned into row order once, in bounded memory.

    Columns are read in blocks and their entries spilled to one file per range of rows; each range is then
    small enough to be sorted by row in memory.
    """

    _ENTRY = np.dtype([("row", np.uint32), ("column", np.uint32), ("value", np.float64)])

    def __init__(self, group: Any, shape: tuple[int, int], scratch: Path) -> None:
        self.group, self.shape, self.scratch = group, shape, scratch
        stored = int(group["data"].shape[0])
        ranges = int(np.clip(-(-stored // VALUES_PER_BLOCK), 1, 512))
        self._rows = max(1, -(-shape[0] // ranges))
        self._files: list[Path] | None = None

    def blocks(self, limit: int = VALUES_PER_BLOCK) -> Iterator[Block]:
        """Yield the ranges of rows; the first call converts the matrix."""
        del limit
        if self._files is None:
            self._files = self._convert()
        for number, file in enumerate(self._files):
            start = number * self._rows
            rows = min(self._rows, self.shape[0] - start)
            entries = np.fromfile(file, self._ENTRY)
            coordinates = (entries["row"].astype(np.int32), entries["column"].astype(np.int32))
            part = sparse.csr_matrix((entries["value"], coordinates), shape=(rows, self.shape[1]))
            yield _block(start, part.indptr, part.indices, part.data, self.shape[1])

    def _convert(self) -> list[Path]:
        self.scratch.mkdir(parents=True, exist_ok=True)
        ranges = -(-self.shape[0] // self._rows)
        paths = [self.scratch / f"rows-{k:04d}.bin" for k in range(ranges)]
        for path in paths:
            path.write_bytes(b"")
        columns = CsrMatrix(self.group, (self.shape[1], self.shape[0]))  # a CSC is the CSR of the transpose
        for block in columns.blocks():
            entries = np.empty(len(block.data), self._ENTRY)
            which = block.indices // self._rows
            entries["row"] = block.indices - which * self._rows
            entries["column"] = np.repeat(np.arange(block.start, block.stop), np.diff(block.indptr))
            entries["value"] = block.data
            order = np.argsort(which, kind="stable")
            edges = np.searchsorted(which[order], np.arange(ranges + 1))
            for k in np.flatnonzero(np.diff(edges)):
                with paths[k].open("ab") as handle:
                    entries[order[edges[k] : edges[k + 1]]].tofile(handle)
        return paths
