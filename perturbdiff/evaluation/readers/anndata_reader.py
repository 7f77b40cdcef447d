"""An AnnData file (h5ad, Zarr v2 or v3) read by rows: CSR, CSC or dense, any number type, in bounded memory."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.readers.cells_by_condition import Sparse, empty_rows
from perturbdiff.evaluation.readers.disk_rows import DiskRows, as_csr, scattered, sorted_copy
from perturbdiff.io.columns import CheckedColumn, Column
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.layouts import find_layout
from perturbdiff.io.matrices import CscMatrix, CsrMatrix, RowMatrix
from perturbdiff.io.opening import open_root
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.files import existing

HELD_VALUES = 1 << 21
"""A matrix with at most so many stored values (16 MiB) is held in memory."""

_CHUNK_CACHE = 1 << 22  # bytes; neighbouring conditions share a chunk
_SCRATCH = "perturbdiff-"  # names of temporary folders


class AnnDataReader:
    """Rows of a file's X, its columns of obs and what it declares in ``uns["perturbdiff"]``.

    A small matrix is held in memory, sparse; of a larger one rows are read from disk as they are asked for.

    Attributes
    ----------
    path
        The file.
    genes
        Names of the genes, the columns.
    num_cells
        Number of rows.
    columns
        Names of the columns of obs.
    declared
        ``uns["perturbdiff"]``: texts, numbers and lists of texts.

    Raises
    ------
    UserError
        If the file is not AnnData, damaged, empty, has no X or a gene name twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = existing(Path(path), "AnnData file")
        self._root = open_root(self.path, cache=_CHUNK_CACHE)
        with explain_damage(self.path):
            if not ("obs" in self._root and "var" in self._root):
                raise UserError(f"{path}: is not an AnnData file; it needs obs, var and X")
            if "X" not in self._root:
                raise UserError(f"{path}: has no X; write the values to X (adata.X = adata.layers['…'])")
            self._layout = find_layout(self.path, self._root, "X")
            self.num_cells, self.genes = self._layout.n_cells, self._layout.gene_names(None)
            self.columns, self.declared = self._layout.obs_columns(), _declared(self._root)
            self._matrix = self._layout.matrix(Path())
        self._check()
        self._rows: DiskRows | None = None
        self._held: Sparse = None
        if self._matrix.num_values <= HELD_VALUES:
            with explain_damage(self.path):
                self._held = _tidy(_whole(self._matrix))

    def _check(self) -> None:
        if not self.num_cells or not self.genes:
            raise UserError(
                f"{self.path}: has {self.num_cells} cells and {len(self.genes)} genes; nothing to score"
            )
        if self._matrix.shape != (shape := (self.num_cells, len(self.genes))):
            raise UserError(f"{self.path}: X has shape {self._matrix.shape}, obs and var say {shape}")
        if len(set(self.genes)) < len(self.genes):
            names, counts = np.unique(np.array(self.genes, object).astype(str), return_counts=True)
            raise UserError(
                f"{self.path}: gene names occur twice: {listing(names[counts > 1])}; make them unique"
            )

    def column(self, name: str) -> Column:
        """Return a column of obs, to be read in pieces.

        Raises
        ------
        UserError
            If there is none of that name.
        """
        if name not in self.columns:
            hint = nearest(name, self.columns) or f"; columns: {listing(self.columns)}"
            raise UserError(f"{self.path}: no obs column '{name}'{hint}")
        with explain_damage(self.path):
            return CheckedColumn(self.path, self._layout.obs_column(name))

    def cell_name(self, row: int) -> str:
        """Return the name of a cell."""
        with explain_damage(self.path):
            return str(self._layout.cell_names(row, row + 1)[0])

    def arrange(self, groups: list[np.ndarray]) -> None:
        """Prepare for reading the rows of one group after the other, unless the matrix is held.

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
        matrix = self._matrix
        if isinstance(matrix, CscMatrix):
            matrix = CscMatrix(matrix.group, matrix.shape, self._scratch())
            matrix.prepare()
            return matrix, np.arange(self.num_cells + 1) * (matrix.num_values // self.num_cells), 1
        if isinstance(matrix, CsrMatrix):
            group = {name: matrix.group[name] for name in ("data", "indices")}
            pointers = np.asarray(matrix.group["indptr"][:], np.int64)
            chunk = (getattr(group["data"], "chunks", None) or (1,))[0]
            return CsrMatrix({**group, "indptr": pointers}, matrix.shape), pointers, int(chunk)
        width = len(self.genes)
        chunks = getattr(getattr(matrix, "array", None), "chunks", None) or (1, width)
        return matrix, np.arange(self.num_cells + 1) * width, int(chunks[0]) * width

    def _scratch(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return X's ``rows`` as CSR float32 in the order given, columns ascending, no zero stored."""
        if self._held is not None:
            return self._held[rows]
        if not len(rows):
            return empty_rows(len(self.genes))
        if self._rows is None:
            self.arrange([])
        assert self._rows is not None
        with explain_damage(self.path):
            return _tidy(self._rows.take(rows))

    def depths(self) -> np.ndarray:
        """Return the sum of each cell's values, float64."""
        if self._held is not None:
            return np.asarray(self._held.sum(axis=1, dtype=np.float64)).ravel()
        sums = np.zeros(self.num_cells)
        with explain_damage(self.path):
            for block in self._by_row[0].blocks():
                values = as_csr(block, len(self.genes))
                sums[block.start : block.stop] = np.asarray(values.sum(axis=1, dtype=np.float64)).ravel()
        return sums


def _declared(root: Any) -> dict[str, Any]:
    """Return what ``uns["perturbdiff"]`` says, of the values that are plain."""
    group = root["uns"]["perturbdiff"] if "uns" in root and "perturbdiff" in root["uns"] else {}
    found: dict[str, Any] = {}
    for name in group:
        element = group[name]
        if hasattr(element, "keys") or element.shape is None:
            continue
        value = element[()] if element.shape == () else element[:]
        values = [v.decode() if isinstance(v, bytes) else v for v in np.atleast_1d(value).tolist()]
        found[str(name)] = values[0] if element.shape == () else values
    return found


def _whole(matrix: RowMatrix) -> Sparse:
    """Return all rows of a matrix that may be held."""
    if isinstance(matrix, CscMatrix):
        arrays = tuple(np.asarray(matrix.group[name][:]) for name in ("data", "indices", "indptr"))
        if len(arrays[2]) != matrix.shape[1] + 1 or len(arrays[0]) != len(arrays[1]):
            raise ValueError("the sparse matrix has not one column pointer more than columns")
        return sp.csc_matrix(arrays, shape=matrix.shape).tocsr()
    blocks = [as_csr(b, matrix.shape[1]) for b in matrix.blocks()]
    return blocks[0] if len(blocks) == 1 else sp.vstack(blocks, format="csr")


def _tidy(values: Sparse) -> Sparse:
    """Return values as float32 with ascending columns, each once, and no zero stored."""
    values = values.astype(np.float32, copy=False)
    values.sum_duplicates()
    if values.nnz and np.count_nonzero(values.data) < values.nnz:
        values.eliminate_zeros()
    return values
