"""Any rows of a matrix on disk: straight from the file where they lie together, else from a copy sorted by group.

Of a file that is not sorted by condition a condition's rows are spread over all of it, and each would be decoded
with its whole chunk. `sorted_copy` then writes the rows once more, group by group within large pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.readers.cells_by_condition import Sparse, empty_rows
from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block, CsrMatrix, DenseMatrix, RowMatrix
from perturbdiff.runtime.files import explain_os_errors

_GAP = 32  # rows between two wanted ones that are read along rather than skipped
_PIECE = 1 << 19  # values of a piece that is sorted in memory, 4 MiB
_PIECES = 64  # of larger matrices there are so many, so that reading a group stays a matter of few reads
_AT_ONCE = 1 << 62  # the rows between two places are one block
_SMALLEST_READ = 1 << 12  # values; a read costs as much as decoding so many
_WASTE = 4  # as much may be decoded for a value that is wanted, before a sorted copy is made


def runs_of(rows: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) that hold the ascending ``rows``."""
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) > _GAP)
    starts, stops = rows[np.r_[0, cuts + 1]], rows[np.r_[cuts, len(rows) - 1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def as_csr(block: Block, columns: int) -> Sparse:
    """Return a block of rows as a matrix."""
    arrays = (block.data, block.indices, block.indptr)
    return sp.csr_matrix(arrays, shape=(block.stop - block.start, columns), copy=False)


class DiskRows:
    """Rows of a matrix on disk, read as they are asked for.

    Parameters
    ----------
    matrix
        The values.
    place
        Where each row of the file is in ``matrix``, int32; None: where it is.
    """

    def __init__(self, matrix: RowMatrix, place: np.ndarray | None = None) -> None:
        self._matrix, self._place = matrix, place

    def take(self, rows: np.ndarray) -> Sparse:
        """Return ``rows`` in the order given, as CSR."""
        places = rows if self._place is None else self._place[rows]
        wanted, back = np.unique(places, return_inverse=True)
        parts: list[Any] = [empty_rows(self._matrix.shape[1])]
        for start, stop in runs_of(wanted):
            block = self.between(start, stop)
            inside = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, stop)] - start
            parts.append(block if len(inside) == stop - start else block[inside])
        found: Any = parts[-1] if len(parts) == 2 else sp.vstack(parts, format="csr")
        return found if np.array_equal(wanted, places) else found[back]

    def between(self, start: int, stop: int) -> Sparse:
        """Return consecutive rows of the matrix."""
        limit = VALUES_PER_BLOCK if isinstance(self._matrix, DenseMatrix) else _AT_ONCE
        blocks = [as_csr(b, self._matrix.shape[1]) for b in self._matrix.blocks(start, stop, limit)]
        return blocks[0] if len(blocks) == 1 else sp.vstack(blocks, format="csr")


def scattered(groups: list[np.ndarray], ends: np.ndarray, chunk: int) -> bool:
    """Tell whether reading the rows of each group would decode far more values than are wanted.

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

    Memory is a piece and its sorted twin; the folder takes 6 or 8 bytes a value. It may be deleted at once: its files
    stay open.

    Raises
    ------
    UserError
        If the disk is full.
    """
    group_of = np.full(matrix.shape[0], -1, np.int32)
    for number, rows in enumerate(groups):
        group_of[rows] = number
    place = np.full(matrix.shape[0], -1, np.int32)
    lengths: list[np.ndarray] = []
    done = 0
    column = np.dtype(np.uint16 if matrix.shape[1] <= 1 << 16 else np.int32)
    with (
        explain_os_errors(folder),
        (folder / "data").open("wb") as data,
        (folder / "indices").open("wb") as indices,
    ):
        for start, piece in _pieces(matrix):
            own = group_of[start : start + piece.shape[0]]
            order = np.argsort(own, kind="stable")
            order = order[np.searchsorted(own[order], 0) :]
            place[start + order] = np.arange(done, done + len(order), dtype=np.int32)
            done += len(order)
            piece = piece[order]
            piece.data.astype(np.float32, copy=False).tofile(data)
            piece.indices.astype(column).tofile(indices)
            lengths.append(np.diff(piece.indptr).astype(np.int64))
    pointers = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    arrays = {
        "data": _RawArray(folder / "data", np.dtype(np.float32), int(pointers[-1])),
        "indices": _RawArray(folder / "indices", column, int(pointers[-1])),
        "indptr": pointers,
    }
    return DiskRows(CsrMatrix(arrays, (done, matrix.shape[1])), place)


def _pieces(matrix: RowMatrix) -> Iterator[tuple[int, Sparse]]:
    """Yield the first row and the rows of pieces of about `_PIECE` stored values."""
    size = max(_PIECE, matrix.num_values // _PIECES)
    waiting, values, start = [], 0, 0
    for block in matrix.blocks(limit=min(size, VALUES_PER_BLOCK)):
        waiting.append(as_csr(block, matrix.shape[1]))
        values += len(block.data)
        if values >= size:
            yield start, sp.vstack(waiting, format="csr")
            waiting, values, start = [], 0, block.stop
    if waiting:
        yield start, sp.vstack(waiting, format="csr")


class _RawArray:
    """Numbers in a plain file, read by slices. The file may be deleted meanwhile; threads may share it."""

    def __init__(self, path: Path, dtype: np.dtype, length: int) -> None:
        self._file, self.dtype, self.shape = path.open("rb", buffering=0), dtype, (length,)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(self.shape[0])
        values = np.empty(max(0, stop - start), self.dtype)
        offset, done = start * self.dtype.itemsize, 0
        while done < values.nbytes:
            rest: Any = values.view(np.uint8)[done:]
            read = os.preadv(self._file.fileno(), [rest], offset + done)
            if not read:
                raise EOFError("a temporary file ends early")
            done += read
        return values
