"""Row blocks of a matrix on disk: CSR, dense or CSC, in HDF5 or Zarr, never the whole matrix at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy import sparse

from perturbdiff.runtime.compiled import kernel

Sparse = Any  # a scipy.sparse matrix or array; scipy ships no types for them

VALUES_PER_BLOCK = 1 << 20
"""Stored values read at once, 8 to 12 MB: they fit into the processor's cache."""
_POINTERS_PER_READ = 1 << 18
_EXACT_IN_FLOAT32 = 1 << 24
_STRIPES_PER_BLOCK = 16
_BORDER_SHARE = 16
"""Chunks above this share of a block are read whole: a chunk at a border is otherwise decoded twice."""


@kernel
def count_stored(values: np.ndarray, counts: np.ndarray) -> None:
    """Write the number of values of each row that are not 0 (NaN is not)."""
    for i in range(values.shape[0]):
        total = 0
        for j in range(values.shape[1]):
            total += values[i, j] != 0
        counts[i] = total


@kernel
def pack_rows(values: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
    """Write column and value of all that is not 0, row by row; the outputs have one place more than that."""
    end = 0
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            # Each value is written, and kept only if `end` moves on: a branch on the data would be slow.
            indices[end] = j
            data[end] = values[i, j]
            end += values[i, j] != 0


@dataclass(frozen=True)
class Block:
    """Rows ``start`` to ``stop`` as CSR: ``indptr`` int64 from 0, ``indices`` int32, ``data`` float32 or 64.

    The arrays are the block's own: a consumer may keep a block while it asks for the next.
    """

    start: int
    stop: int
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray

    def as_csr(self, columns: int) -> Sparse:
        """Return the block as a matrix with this number of columns, without a copy."""
        shape = (self.stop - self.start, columns)
        return sparse.csr_matrix((self.data, self.indices, self.indptr), shape=shape, copy=False)


_SLICES = 16


def some_values(element: Any, most: int = 200_000) -> np.ndarray:
    """Return stored values from several places of a matrix, float64, to see what kind of values it holds.

    Parameters
    ----------
    element
        A matrix on disk (an array, or the group of a sparse matrix) or in memory (an array or a sparse matrix).
    most
        About the largest number of values.
    """
    if hasattr(element, "keys"):
        values, width = element["data"], 1
    elif sparse.issparse(element):
        values, width = element.data, 1
    else:
        values, width = element, max(1, int(element.shape[1]))
    length = max(1, most // width // _SLICES)
    starts = np.unique(np.linspace(0, max(0, values.shape[0] - length), _SLICES).astype(np.int64)).tolist()
    pieces = [np.asarray(values[start : start + length]).ravel() for start in starts]
    return np.concatenate(pieces).astype(np.float64)


class RowMatrix(Protocol):
    """A matrix that is read by ranges of rows.

    Attributes
    ----------
    shape
        Rows and columns.
    """

    shape: tuple[int, int]

    @property
    def num_values(self) -> int:
        """Stored values, a dense matrix's zeros among them: what reading it costs."""
        ...

    def prepare(self) -> None:
        """Do what must be done once before `blocks`, in any process."""
        ...

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive blocks of rows ``start`` to ``stop`` with about ``limit`` stored values each."""
        ...


def checked_block(
    start: int, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, columns: int
) -> Block:
    """Check a block and bring it to the promised types; int32 columns and float32 values are not copied."""
    first, last = int(indptr[0]), int(indptr[-1])
    if len(indices) != last - first or len(data) != len(indices):
        raise ValueError("the sparse matrix has fewer values than its row pointers say")
    return Block(
        start, start + len(indptr) - 1, indptr - first, checked_columns(indices, columns), _values(data)
    )


def checked_columns(indices: np.ndarray, columns: int) -> np.ndarray:
    """Return column numbers as int32; a ValueError if one is no whole number from 0 to ``columns`` - 1."""
    indices = np.asarray(indices)
    if indices.dtype.kind not in "iu":
        raise ValueError("the sparse matrix has column numbers that are not whole numbers")
    if not indices.dtype.isnative:
        indices = indices.astype(indices.dtype.newbyteorder("="))
    # read as unsigned, a negative number is a large one: one pass finds both
    if len(indices) and indices.view(f"u{indices.dtype.itemsize}").max() >= columns:
        raise ValueError("the sparse matrix has an entry outside its shape")
    return np.ascontiguousarray(indices, np.int32)


def _values(data: np.ndarray) -> np.ndarray:
    """Return values as float32 where that is exact by their type or, for integers, their size; else float64."""
    data = np.asarray(data)
    if data.dtype.kind not in "biuf":
        raise ValueError(f"the matrix has values that are not numbers ({data.dtype})")
    if data.dtype == np.float32 or data.dtype.itemsize <= 2:
        exact = True
    elif data.dtype.kind == "f":
        exact = data.dtype.itemsize == 4
    else:
        exact = not len(data) or (data.max() <= _EXACT_IN_FLOAT32 and data.min() >= -_EXACT_IN_FLOAT32)
    return np.ascontiguousarray(data, np.float32 if exact else np.float64)


class CsrMatrix:
    """A compressed sparse row matrix: the group of ``data``, ``indices`` and ``indptr``."""

    def __init__(self, group: Mapping[str, Any] | Any, shape: tuple[int, int]) -> None:
        self.group, self.shape = group, shape

    @property
    def num_values(self) -> int:
        """Number of stored values."""
        return int(self.group["data"].shape[0])

    def prepare(self) -> None:
        """Do nothing: the matrix can be read as it is."""

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive row blocks; row pointers are read in pieces as well."""
        pointers = self.group["indptr"]
        indices, data = (_in_whole_chunks(self.group[k], limit) for k in ("indices", "data"))
        if int(pointers.shape[0]) != self.shape[0] + 1:
            raise ValueError("the sparse matrix has not one row pointer more than rows")
        row, end = start, self.shape[0] if stop is None else stop
        while row < end:
            indptr = np.asarray(pointers[row : min(row + _POINTERS_PER_READ, end) + 1], np.int64)
            sizes = np.diff(indptr)
            if indptr[0] < 0 or (sizes < 0).any():
                raise ValueError("the sparse matrix has descending row pointers")
            if (sizes > 2 * self.shape[1]).any():  # a block holds at least a row
                raise ValueError("the sparse matrix has a row with more values than columns")
            a = 0
            while a < len(indptr) - 1:
                b = max(a + 1, int(np.searchsorted(indptr, indptr[a] + limit, "right")) - 1)
                span = slice(int(indptr[a]), int(indptr[b]))
                yield checked_block(row + a, indptr[a : b + 1], indices[span], data[span], self.shape[1])
                a = b
            row += len(indptr) - 1


def check_pointers(group: Mapping[str, Any] | Any, shape: tuple[int, int]) -> None:
    """Raise if a sparse matrix has more or fewer values than its pointers say, or than it has places for.

    Raises
    ------
    ValueError
        In words.
    """
    pointers = group["indptr"]
    for name in ("indptr", "indices"):
        if group[name].dtype.kind not in "iu":
            raise ValueError(f"'{name}' of the sparse matrix is {group[name].dtype}, not whole numbers")
    sizes = {int(group[name].shape[0]) for name in ("data", "indices")}
    if pointers.shape[0] == 0 or sizes != {int(pointers[-1:][0])} or int(pointers[:1][0]):
        raise ValueError("the sparse matrix has more or fewer values than its pointers say")
    if int(group["data"].shape[0]) > 2 * shape[0] * shape[1]:
        raise ValueError("the sparse matrix has more values than rows times columns")


class SomeColumns:
    """A matrix without some of its columns; the others are numbered anew."""

    def __init__(self, matrix: RowMatrix, keep: np.ndarray) -> None:
        self.source = matrix
        if len(keep) != matrix.shape[1]:
            raise ValueError(f"the matrix has {matrix.shape[1]} columns, but {len(keep)} are named")
        self.shape = (matrix.shape[0], int(keep.sum()))
        self._place = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)

    @property
    def num_values(self) -> int:
        """Number of stored values, of the columns left out as well."""
        return self.source.num_values

    def prepare(self) -> None:
        """Prepare the whole matrix."""
        self.source.prepare()

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive row blocks of the kept columns."""
        for block in self.source.blocks(start, stop, limit):
            place = self._place[block.indices]
            kept = place >= 0
            before = np.concatenate([[0], np.cumsum(kept)])
            yield Block(block.start, block.stop, before[block.indptr], place[kept], block.data[kept])


def _in_whole_chunks(array: Any, limit: int) -> Any:
    """Return a view that decodes each chunk once if it is read from front to back; small chunks need none."""
    chunk = (getattr(array, "chunks", None) or (1,))[0]
    return _ChunkReader(array, int(chunk)) if chunk * _BORDER_SHARE > limit else array


class _ChunkReader:
    """Reads an array from front to back by whole chunks and keeps the rest of the last one for the next slice."""

    def __init__(self, array: Any, chunk: int) -> None:
        self._array, self._chunk = array, chunk
        self._first, self._left = 0, np.empty(0, array.dtype)

    def __getitem__(self, span: slice) -> np.ndarray:
        if not self._first <= span.start <= self._first + len(self._left):
            self._first, self._left = span.start, self._left[:0]
        end = self._first + len(self._left)
        values = self._left
        if span.stop > end:
            whole = -(-span.stop // self._chunk) * self._chunk
            values = np.concatenate([values, self._array[end:whole]])
        a, b = span.start - self._first, span.stop - self._first
        self._first, self._left = span.stop, values[b:].copy()
        return values[a:b]


class DenseMatrix:
    """A dense two-dimensional array."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, (int(array.shape[0]), int(array.shape[1]))
        height, width = getattr(array, "chunks", None) or (1, self.shape[1])
        self._chunks = (int(height), max(1, int(width)))

    @property
    def num_values(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]

    def prepare(self) -> None:
        """Do nothing: the matrix can be read as it is."""

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield row blocks with the zeros left out, cut where ``limit`` entries are reached or a chunk ends.

        Chunks may be high and narrow; they are then read from left to right in slabs of ``limit`` entries
        that keep only what is not zero, so that no chunk is decoded again for each few rows of it.
        """
        width = max(1, self.shape[1])
        rows = max(1, limit // width)
        height = self._chunks[0]
        if rows < height:
            rows = min(height, max(1, limit * _STRIPES_PER_BLOCK // width))
        else:
            rows -= rows % height
        row, end = start, self.shape[0] if stop is None else stop
        while row < end:
            last = min(row - row % rows + rows, end)
            part = self._stripe(row, last, limit)
            yield checked_block(row, part.indptr.astype(np.int64), part.indices, part.data, self.shape[1])
            row = last

    def _stripe(self, start: int, stop: int, limit: int) -> sparse.csr_matrix:
        step = max(1, limit // (stop - start) // self._chunks[1]) * self._chunks[1]
        slabs = [
            _packed(_values(self.array[start:stop, c : c + step])) for c in range(0, self.shape[1], step)
        ]
        return slabs[0] if len(slabs) == 1 else sparse.csr_matrix(sparse.hstack(slabs, "csr"))


def _packed(values: np.ndarray) -> sparse.csr_matrix:
    """Return a dense block without its zeros."""
    counts = np.empty(len(values), np.int64)
    count_stored(values, counts)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices, data = np.empty(indptr[-1] + 1, np.int32), np.empty(indptr[-1] + 1, values.dtype)
    pack_rows(values, indices, data)
    return sparse.csr_matrix((data[:-1], indices[:-1], indptr), shape=values.shape)


class FileArray:
    """One-dimensional numbers in a file, from the byte ``offset`` on, read by slices.

    The file may be deleted meanwhile; threads may share the array.
    """

    def __init__(self, path: Path, dtype: np.dtype, length: int, offset: int = 0) -> None:
        self._file, self._offset = path.open("rb", buffering=0), offset
        self.dtype, self.shape = dtype, (length,)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(self.shape[0])
        values = np.empty(max(0, stop - start), self.dtype)
        offset, done = self._offset + start * self.dtype.itemsize, 0
        while done < values.nbytes:
            rest: Any = values.view(np.uint8)[done:]
            read = os.preadv(self._file.fileno(), [rest], offset + done)
            if not read:
                raise EOFError("a temporary file ends early")
            done += read
        return values
