"""Matrices made of another one while it is read: by rows instead of columns, columns of one gene joined, logarithms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from scipy import sparse

from perturbdiff.io.matrices import (
    VALUES_PER_BLOCK,
    Block,
    CsrMatrix,
    FileArray,
    RowMatrix,
    SomeColumns,
    checked_columns,
)
from perturbdiff.runtime import files
from perturbdiff.runtime.compiled import kernel

_SORTED_AT_ONCE = 4_000_000
"""Entries that are sorted in memory."""
_MOST_RANGES = 4096


@kernel
def order_by_group(group: np.ndarray, starts: np.ndarray, order: np.ndarray) -> None:
    """Write the positions of each group's members, kept in their order, from ``starts``, which move on."""
    for k in range(len(group)):
        order[starts[group[k]]] = k
        starts[group[k]] += 1


class CscMatrix:
    """A compressed sparse column matrix, turned into row order once, in bounded memory.

    Columns are read in blocks and their entries spilled to one file per range of rows; each range is then
    small enough to be sorted by row in memory, and is appended to plain CSR arrays that any process can read.

    Parameters
    ----------
    group
        The group of ``data``, ``indices`` and ``indptr``.
    shape
        Rows and columns.
    scratch
        Folder for the arrays, which appear there whole or not at all.
    """

    def __init__(self, group: Any, shape: tuple[int, int], scratch: Path) -> None:
        self.group, self.shape, self._folder = group, shape, scratch / "by-row"

    @property
    def num_values(self) -> int:
        """Number of stored values."""
        return int(self.group["data"].shape[0])

    def prepare(self) -> None:
        """Convert the matrix unless that was done before; an interrupted conversion starts over."""
        if self._folder.exists():
            return
        partial = files.temporary_name(self._folder)
        files.remove(partial)
        partial.mkdir(parents=True)
        try:
            self._gather(partial, self._scatter(partial))
        except BaseException:
            files.remove(partial)
            raise
        files.replace(partial, self._folder)

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive row blocks of the converted matrix.

        Raises
        ------
        RuntimeError
            If `prepare` was not called.
        """
        if not self._folder.exists():
            raise RuntimeError("a CSC matrix is read by rows only after prepare()")
        arrays = {name: _saved_array(self._folder / f"{name}.npy") for name in ("data", "indices", "indptr")}
        return CsrMatrix(arrays, self.shape).blocks(start, stop, limit)

    def _scatter(self, folder: Path) -> list[Path]:
        """Send the entries to one file per range of rows, in the order of their columns."""
        ranges = int(np.clip(-(-self.num_values // _SORTED_AT_ONCE), 1, _MOST_RANGES))
        self._rows = max(1, -(-self.shape[0] // ranges))
        value = np.dtype(self.group["data"].dtype).newbyteorder("=")
        self._entry = np.dtype([("row", np.int32), ("column", np.int32), ("value", value)])
        paths = [folder / f"rows-{k:04d}.bin" for k in range(-(-self.shape[0] // self._rows))]
        for path in paths:
            path.touch()
        indptr = np.asarray(self.group["indptr"][:], np.int64)
        if len(indptr) != self.shape[1] + 1 or (np.diff(indptr) < 0).any() or indptr[0] != 0:
            raise ValueError(
                "the sparse matrix has column pointers that do not ascend or are not one for each"
            )
        for start in range(0, int(indptr[-1]), _SORTED_AT_ONCE):
            entries = self._entries(indptr, start, min(start + _SORTED_AT_ONCE, int(indptr[-1])))
            which = entries["row"] // self._rows
            entries["row"] -= which * self._rows
            order, ends = _order(which, len(paths))
            entries = entries[order]
            for path, a, b in zip(paths, [0, *ends[:-1]], ends, strict=True):
                if a < b:
                    with path.open("ab") as handle:
                        entries[a:b].tofile(handle)
        return paths

    def _entries(self, indptr: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the stored entries ``start`` to ``stop``, which may begin and end within a column."""
        rows, values = self.group["indices"][start:stop], self.group["data"][start:stop]
        if len(rows) != stop - start or len(values) != stop - start:
            raise ValueError("the sparse matrix has fewer values than its column pointers say")
        inside = np.clip(indptr, start, stop)
        entries = np.empty(stop - start, self._entry)
        entries["row"] = checked_columns(rows, self.shape[0])
        entries["column"] = np.repeat(np.arange(self.shape[1], dtype=np.int32), np.diff(inside))
        entries["value"] = values
        return entries

    def _gather(self, folder: Path, paths: list[Path]) -> None:
        """Sort each range by row, append it to the arrays and delete its file."""
        ends = [np.zeros(1, np.int64)]
        stored = sum(path.stat().st_size for path in paths) // self._entry.itemsize
        with (folder / "data.npy").open("wb") as data, (folder / "indices.npy").open("wb") as indices:
            _header(data, self._entry["value"], stored)
            _header(indices, np.dtype(np.int32), stored)
            for number, path in enumerate(paths):
                entries = np.fromfile(path, self._entry)
                path.unlink()
                rows = min(self._rows, self.shape[0] - number * self._rows)
                order, rows_end = _order(np.ascontiguousarray(entries["row"]), rows)
                entries["value"][order].tofile(data)
                entries["column"][order].tofile(indices)
                ends.append(rows_end + ends[-1][-1])
        np.save(folder / "indptr.npy", np.concatenate(ends))


def _order(group: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a stable order by group and where each group ends in it."""
    ends = np.cumsum(np.bincount(group, minlength=count))
    starts, order = np.concatenate([[0], ends[:-1]]), np.empty(len(group), np.int32)
    order_by_group(group, starts, order)
    return order, ends


def _saved_array(path: Path) -> FileArray:
    """Return the one-dimensional array of an ``.npy`` file."""
    with path.open("rb") as handle:
        npy.read_magic(handle)
        shape, _, dtype = npy.read_array_header_1_0(handle)
        return FileArray(path, dtype, shape[0], handle.tell())


def _header(handle: Any, dtype: np.dtype, length: int) -> None:
    npy.write_array_header_1_0(
        handle, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    )


Duplicates = Literal["error", "sum", "first"]

HIGHEST = 15.0
"""No log1p of normalised counts is as large: it would be 3 million of a cell's counts in one gene.

Predictions with such a value, or one that is not finite, are refused where they are made and where they are scored.
"""


class _Derived:
    """A matrix with the rows of another one.

    Attributes
    ----------
    source
        The other one.
    shape
        Rows and columns.
    """

    def __init__(self, source: RowMatrix, columns: int) -> None:
        self.source, self.shape = source, (source.shape[0], columns)

    @property
    def num_values(self) -> int:
        """Number of stored values of the source: what reading it costs."""
        return self.source.num_values

    def prepare(self) -> None:
        """Prepare the source."""
        self.source.prepare()


class SummedColumns(_Derived):
    """The sums of columns that belong to one gene; values of a row in ascending columns."""

    def __init__(self, source: RowMatrix, place: np.ndarray) -> None:
        """``place`` is the column of the result to which each column of the source is added, int32."""
        if len(place) != source.shape[1]:
            raise ValueError(f"the matrix has {source.shape[1]} columns, but {len(place)} are named")
        super().__init__(source, int(place.max(initial=-1)) + 1)
        self._place = place

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive row blocks; a sum that float32 cannot hold makes its block float64."""
        for block in self.source.blocks(start, stop, limit):
            rows = (block.stop - block.start, self.shape[1])
            sums = sparse.csr_matrix(
                (block.data.astype(np.float64), self._place[block.indices], block.indptr), shape=rows
            )
            sums.sum_duplicates()
            small = sums.data.astype(np.float32)
            exact = block.data.dtype == np.float32 and bool((small == sums.data).all())
            fractions = block.data.dtype == np.float32 and bool((sums.data != np.floor(sums.data)).any())
            data = small if exact or fractions else sums.data
            indptr, indices = np.asarray(sums.indptr, np.int64), np.asarray(sums.indices, np.int32)
            yield Block(block.start, block.stop, indptr, indices, data)


class LogValues(_Derived):
    """log1p of the values."""

    def __init__(self, source: RowMatrix) -> None:
        super().__init__(source, source.shape[1])

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive row blocks; a value below 0 becomes one that is refused (negative or nan)."""
        for block in self.source.blocks(start, stop, limit):
            with np.errstate(invalid="ignore", divide="ignore"):
                yield replace(block, data=np.log1p(block.data))


def one_column_per_gene(
    genes: Sequence[str], matrix: RowMatrix, how: Duplicates
) -> tuple[list[str], RowMatrix]:
    """Return each gene once, in the order of first appearance, and the matrix with a column for each.

    Parameters
    ----------
    genes
        Names of the columns.
    matrix
        The values.
    how
        ``sum`` adds up the columns of one name, ``first`` takes the first of them, ``error`` changes nothing.
    """
    names = list(dict.fromkeys(genes))
    if how == "error" or len(names) == len(genes):
        return list(genes), matrix
    number = {name: k for k, name in enumerate(names)}
    place = np.array([number[name] for name in genes], np.int32)
    if how == "sum":
        return names, SummedColumns(matrix, place)
    first = np.zeros(len(genes), bool)
    first[np.unique(place, return_index=True)[1]] = True
    return names, SomeColumns(matrix, first)


def innermost(matrix: RowMatrix) -> RowMatrix:
    """Return the matrix on disk that a matrix is made of."""
    while isinstance(matrix, _Derived | SomeColumns):
        matrix = matrix.source
    return matrix
