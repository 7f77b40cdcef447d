"""An AnnData file (h5ad, Zarr v2 or v3) read by rows: CSR, CSC or dense, any number type, in bounded memory."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from perturbdiff.io.columns import row_ranges
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.derived_matrices import CscMatrix
from perturbdiff.io.input_file import InputFile
from perturbdiff.io.matrices import VALUES_PER_BLOCK, CsrMatrix, DenseMatrix, FileArray, RowMatrix, Sparse
from perturbdiff.io.opening import open_root
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.files import existing, explain_os_errors
from perturbdiff.runtime.large_arrays import long_array

_GAP = 32  # rows between two wanted ones that are read along rather than skipped
_PIECE = 1 << 21  # values of a piece that is sorted in memory, 16 MiB
_PIECES = 64  # of a larger matrix, so that a group is still read in few reads
_AT_ONCE = 1 << 62  # no limit: the rows between two places are one block
_SMALLEST_READ = 1 << 12  # values; a read costs as much as decoding this many
_WASTE = 4  # values decoded for each one that is wanted, above which a sorted copy is made
HELD_VALUES = 1 << 21
"""A matrix with at most this many stored values (16 MiB) is held in memory."""
_CHUNK_CACHE = 1 << 22  # bytes; neighbouring conditions share a chunk
_SCRATCH = "perturbdiff-"  # names of temporary folders


def runs_of(rows: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) that hold the ascending ``rows``."""
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) > _GAP)
    starts, stops = rows[np.r_[0, cuts + 1]], rows[np.r_[cuts, len(rows) - 1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


class DiskRows:
    """Rows of a matrix on disk, read on demand.

    Parameters
    ----------
    matrix
        The values.
    place
        Row of ``matrix`` that holds each row of the file, int32; None: the same row.
    """

    def __init__(self, matrix: RowMatrix, place: np.ndarray | None = None) -> None:
        self._matrix, self._place = matrix, place

    def take(self, rows: np.ndarray) -> Sparse:
        """Return ``rows`` in the order given, as CSR."""
        places = rows if self._place is None else self._place[rows]
        wanted, back = np.unique(places, return_inverse=True)
        parts: list[Any] = [_no_rows(self._matrix.shape[1])]
        for start, stop in runs_of(wanted):
            block = self.between(start, stop)
            inside = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, stop)] - start
            parts.append(block if len(inside) == stop - start else block[inside])
        ascending: Any = parts[-1] if len(parts) == 2 else sp.vstack(parts, format="csr")
        return ascending if np.array_equal(wanted, places) else ascending[back]

    def between(self, start: int, stop: int) -> Sparse:
        """Return consecutive rows of the matrix."""
        limit = VALUES_PER_BLOCK if isinstance(self._matrix, DenseMatrix) else _AT_ONCE
        blocks = [b.as_csr(self._matrix.shape[1]) for b in self._matrix.blocks(start, stop, limit)]
        return blocks[0] if len(blocks) == 1 else sp.vstack(blocks, format="csr")


def scattered(groups: list[np.ndarray], ends: np.ndarray, chunk: int) -> bool:
    """Return whether reading the rows of each group would decode far more values than are wanted.

    Parameters
    ----------
    groups
        Ascending rows of each group.
    ends
        Stored values before each row and, at the end, in all: int64 [rows + 1].
    chunk
        Values that the file decodes at once.
    """
    chunk = max(chunk, _SMALLEST_READ)
    wanted, decoded = 0, 0
    for rows in groups:
        cuts = np.flatnonzero(np.diff(rows) > _GAP)
        first, last = ends[rows[np.r_[0, cuts + 1]]], ends[rows[np.r_[cuts, len(rows) - 1]] + 1]
        wanted += int((ends[rows + 1] - ends[rows]).sum())
        decoded += int((-(-last // chunk) - first // chunk).sum()) * chunk
    return decoded > _WASTE * max(wanted, len(groups) * chunk)


def sorted_copy(matrix: RowMatrix, groups: list[np.ndarray], folder: Path) -> DiskRows:
    """Write the rows of ``groups`` to ``folder``, those of a group together within each piece of the matrix.

    Memory holds a piece and its sorted copy; the folder takes 6 or 8 bytes a value. It may be deleted at once, because
    its files stay open.

    Raises
    ------
    UserError
        If the disk is full.
    """
    group_of, place = (long_array(matrix.shape[0], np.dtype(np.int32)) for _ in range(2))
    group_of[:] = place[:] = -1
    for number, rows in enumerate(groups):
        group_of[rows] = number
    pointers, num_written = long_array(sum(map(len, groups)) + 1, np.dtype(np.int64)), 0
    pointers[0] = 0
    column = np.dtype(np.uint16 if matrix.shape[1] <= 1 << 16 else np.int32)
    with (
        explain_os_errors(folder),
        (folder / "data").open("wb") as data,
        (folder / "indices").open("wb") as indices,
    ):
        for start, piece in _pieces(matrix):
            groups_here = group_of[start : start + piece.shape[0]]
            order = np.argsort(groups_here, kind="stable")
            order = order[np.searchsorted(groups_here[order], 0) :]
            place[start + order] = np.arange(num_written, num_written + len(order), dtype=np.int32)
            piece = piece[order]
            ends = pointers[num_written] + piece.indptr[1:].astype(np.int64)
            num_written += len(order)
            pointers[num_written - len(order) + 1 : num_written + 1] = ends
            piece.data.astype(np.float32, copy=False).tofile(data)
            piece.indices.astype(column).tofile(indices)
    pointers = pointers[: num_written + 1]
    arrays = {
        "data": FileArray(folder / "data", np.dtype(np.float32), int(pointers[-1])),
        "indices": FileArray(folder / "indices", column, int(pointers[-1])),
        "indptr": pointers,
    }
    return DiskRows(CsrMatrix(arrays, (num_written, matrix.shape[1])), place)


def _pieces(matrix: RowMatrix) -> Iterator[tuple[int, Sparse]]:
    """Yield the first row and the rows of pieces of about `_PIECE` stored values."""
    size = max(_PIECE, matrix.num_values // _PIECES)
    waiting, values, start = [], 0, 0
    for block in matrix.blocks(limit=min(size, VALUES_PER_BLOCK)):
        waiting.append(block.as_csr(matrix.shape[1]))
        values += len(block.data)
        if values >= size:
            yield start, sp.vstack(waiting, format="csr")
            waiting, values, start = [], 0, block.stop
    if waiting:
        yield start, sp.vstack(waiting, format="csr")


class RowFile(InputFile):
    """An AnnData file whose rows are read by their numbers.

    A small matrix is held in memory, sparse; rows of a larger one are read from disk on demand.

    Raises
    ------
    UserError
        If the file is not AnnData, damaged, empty, has no X or a gene name twice.
    """

    def __init__(self, path: Path) -> None:
        path = existing(Path(path), "AnnData file")
        root = open_root(path, cache=_CHUNK_CACHE)
        with explain_damage(path):
            if not ("obs" in root and "var" in root):
                raise UserError(f"{path}: is not an AnnData file; it needs obs, var and X")
            if "X" not in root:
                raise UserError(f"{path}: has no X; write the values to X (adata.X = adata.layers['…'])")
        super().__init__(path, root)
        self._rows: DiskRows | None = None
        self._held: Sparse = None
        if self.matrix.num_values <= HELD_VALUES:
            with explain_damage(path):
                self._held = _tidy(_whole(self.matrix))

    def arrange(self, groups: list[np.ndarray]) -> None:
        """Prepare to read the rows of one group after the other, unless the matrix is held in memory.

        If a group's rows lie all over the file, they are copied, sorted, to temporary files.
        """
        if self._held is not None:
            return
        with explain_damage(self.path):
            matrix, ends, chunk = self._by_row
            if scattered(groups, ends, chunk):
                with tempfile.TemporaryDirectory(prefix=_SCRATCH) as folder:
                    self._rows = sorted_copy(matrix, groups, Path(folder))
            else:
                self._rows = DiskRows(matrix)

    @cached_property
    def _by_row(self) -> tuple[RowMatrix, np.ndarray, int]:
        """Return the matrix by rows, the stored values before each row, and the values decoded at once."""
        matrix = self.matrix
        if isinstance(matrix, CscMatrix):
            matrix = CscMatrix(matrix.group, matrix.shape, self._scratch())
            matrix.prepare()
            return matrix, np.arange(self.n_cells + 1) * (matrix.num_values // self.n_cells), 1
        if isinstance(matrix, CsrMatrix):
            group = {name: matrix.group[name] for name in ("data", "indices")}
            stored = matrix.group["indptr"]
            pointers = long_array(stored.shape[0], np.dtype(np.int64))
            for start, stop in row_ranges(len(pointers)):
                pointers[start:stop] = stored[start:stop]
            chunk = (getattr(group["data"], "chunks", None) or (1,))[0]
            return CsrMatrix({**group, "indptr": pointers}, matrix.shape), pointers, int(chunk)
        width = len(self.genes)
        chunks = getattr(getattr(matrix, "array", None), "chunks", None) or (1, width)
        return matrix, np.arange(self.n_cells + 1) * width, int(chunks[0]) * width

    def _scratch(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return X's ``rows`` as CSR float32 in the order given, columns ascending, no zero stored."""
        if self._held is not None:
            return self._held[rows]
        if not len(rows):
            return _no_rows(len(self.genes))
        if self._rows is None:
            self.arrange([])
        assert self._rows is not None
        with explain_damage(self.path):
            return _tidy(self._rows.take(rows))

    def depths(self) -> np.ndarray:
        """Return the sum of each cell's values, float64."""
        if self._held is not None:
            return np.asarray(self._held.sum(axis=1, dtype=np.float64)).ravel()
        sums = long_array(self.n_cells, np.dtype(np.float64))
        with explain_damage(self.path):
            for block in self._by_row[0].blocks():
                values = block.as_csr(len(self.genes))
                sums[block.start : block.stop] = np.asarray(values.sum(axis=1, dtype=np.float64)).ravel()
        return sums


def _no_rows(columns: int) -> Sparse:
    return sp.csr_matrix((0, columns), dtype=np.float32)


def _whole(matrix: RowMatrix) -> Sparse:
    """Return all rows of a matrix that fits into memory."""
    if isinstance(matrix, CscMatrix):
        arrays = tuple(np.asarray(matrix.group[name][:]) for name in ("data", "indices", "indptr"))
        if len(arrays[2]) != matrix.shape[1] + 1 or len(arrays[0]) != len(arrays[1]):
            raise ValueError("the sparse matrix has not one column pointer more than columns")
        return sp.csc_matrix(arrays, shape=matrix.shape).tocsr()
    blocks = [b.as_csr(matrix.shape[1]) for b in matrix.blocks()]
    return blocks[0] if len(blocks) == 1 else sp.vstack(blocks, format="csr")


def _tidy(values: Sparse) -> Sparse:
    """Return values as float32 with ascending columns, each once, and no zero stored."""
    values = values.astype(np.float32, copy=False)
    values.sum_duplicates()
    if values.nnz and np.count_nonzero(values.data) < values.nnz:
        values.eliminate_zeros()
    return values
