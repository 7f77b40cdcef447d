"""One side of a comparison: cells as log1p values over the shared genes, every value checked as it is read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.readers.cells_by_condition import Condition, Reader, Sparse
from perturbdiff.runtime.errors import UserError

HIGHEST = 15.0
"""No log1p of normalised counts is as large: it would be 3 million of a cell's counts in one gene."""

_WHOLE = 1e-3  # counts may be off by this
_ENOUGH = 200  # non-zero values that are not all whole numbers by chance


@dataclass
class ExpressionView:
    """Reads cells in the shared gene order and checks every value. Threads may share it.

    Attributes
    ----------
    reader
        Where the values are.
    rows
        Rows of each condition.
    columns
        Positions of the shared genes among the reader's, or None where they are the same.
    depth
        Counts are normalised to this depth and log1p-ed; None: the values are log1p.
    highest
        Largest log1p value seen so far.
    """

    reader: Reader
    rows: Mapping[Condition, np.ndarray]
    columns: np.ndarray | None = None
    depth: float | None = None
    highest: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def cells(self, rows: np.ndarray) -> Sparse:
        """Return log1p values of ``rows`` over the shared genes, float32 CSR without stored zeros.

        Raises
        ------
        UserError
            If a value is negative, not finite, or no log1p value though it should be.
        """
        cells: Sparse = sp.csr_matrix(self.reader.expression(rows))
        cells = cells.astype(np.float32, copy=False)  # equal on both sides, so that equal values stay ties
        if cells.nnz:
            self._check(cells, rows)
            if self.depth is not None:
                cells = log_normalised(cells, self.depth)
            highest = float(cells.data.max())
            with self._lock:
                self.highest = max(self.highest, highest)
        return cells if self.columns is None else cells[:, self.columns]

    def _check(self, cells: Sparse, rows: np.ndarray) -> None:
        low, high = float(cells.data.min()), float(cells.data.max())
        if not np.isfinite(low + high):
            place = self._place(cells, rows, ~np.isfinite(cells.data))
            raise UserError(
                f"{self.reader.path}: X has values that are not finite (first: {place}); mend or drop these cells"
            )
        if low < 0:
            place = self._place(cells, rows, cells.data < 0)
            raise UserError(
                f"{self.reader.path}: X has negative values (first: {place}); expression is at least 0, clip it there"
            )
        if self.depth is not None:
            if (wrong := np.abs(cells.data - np.rint(cells.data)) > _WHOLE).any():
                place = self._place(cells, rows, wrong)
                raise UserError(
                    f"{self.reader.path}: X has values that are not whole numbers (first: {place}), but is said to be "
                    "counts; if they are log1p of normalised counts, say so (--scale log1p, or declare it in uns)"
                )
            return
        remedy = "if these are counts, say so: --scale counts, or uns['perturbdiff']['scale'] = 'counts'"
        if high >= HIGHEST:
            place = self._place(cells, rows, cells.data >= HIGHEST)
            raise UserError(
                f"{self.reader.path}: X has values too large for log1p of normalised counts (first: {place}, at most "
                f"{HIGHEST:g}); {remedy}"
            )
        if _whole(cells.data):
            raise UserError(
                f"{self.reader.path}: X has only whole numbers, which log1p values are not; {remedy}"
            )

    def _place(self, cells: Sparse, rows: np.ndarray, wrong: np.ndarray) -> str:
        """Say value, cell and gene of the first wrong value."""
        k = int(np.argmax(wrong))
        row = int(rows[int(np.searchsorted(cells.indptr, k, "right")) - 1])
        gene = self.reader.genes[int(cells.indices[k])]
        return f"{cells.data[k]:g}, cell '{self.reader.cell_name(row)}', gene '{gene}'"


def log_normalised(counts: Sparse, depth: float) -> Sparse:
    """Return log1p of counts scaled to ``depth`` in each cell; a cell without counts stays zero."""
    sums = np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel()
    factor = (depth / np.where(sums > 0, sums, 1.0)).astype(np.float32)
    values = np.log1p(counts.data * np.repeat(factor, np.diff(counts.indptr)))
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def median_depth(reader: Reader) -> float:
    """Return the median of the cells' sums, those without any value left out.

    Raises
    ------
    UserError
        If no cell has a value.
    """
    sums = reader.depths()
    if not (sums > 0).any():
        raise UserError(f"{reader.path}: no cell has a count; there is no depth to normalise to")
    return float(np.median(sums[sums > 0]))


def _whole(values: np.ndarray) -> bool:
    """Tell whether there are enough values and all are whole numbers."""
    if len(values) < _ENOUGH:
        return False
    first = values[:_ENOUGH]
    return bool((first == np.rint(first)).all()) and bool((values == np.rint(values)).all())
