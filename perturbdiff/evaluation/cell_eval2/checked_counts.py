"""Raw counts of predictions and truth, checked as they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.readers.cells_by_condition import Cells, Reader
from perturbdiff.evaluation.readers.store_cells import StoreReader
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.errors import UserError

_WHOLE = 1e-6  # largest distance of a count from a whole number
_REMEDY = (
    "the definition cell-eval2 is one of raw counts: give counts (sample --values counts writes them), or choose "
    "--definition cell-eval-0.6.6, which takes log1p values"
)


@dataclass(frozen=True)
class CountReader:
    """Counts of one file or store over the shared genes.

    Attributes
    ----------
    reader
        Where the values are.
    read
        Its function from row numbers to raw values.
    columns
        Positions of the shared genes among the reader's, or None where they are the same.
    max_total
        Largest sum of a cell.
    """

    reader: Reader
    read: Callable[[np.ndarray], Sparse]
    columns: np.ndarray | None
    max_total: float

    @classmethod
    def of(cls, cells: Cells, columns: np.ndarray | None, max_total: float) -> CountReader:
        """Return the counts of ``cells``.

        Raises
        ------
        UserError
            If the values are not counts.
        """
        reader = cells.reader
        if isinstance(reader, StoreReader):
            if not reader.has_counts:
                raise UserError(
                    f"{reader.path}: the store was made from log1p values and has no counts; {_REMEDY}"
                )
            return cls(reader, reader.counts, columns, max_total)
        if cells.scale != "counts":
            raise UserError(f"{reader.path}: values are log1p; {_REMEDY}")
        return cls(reader, reader.expression, columns, max_total)

    def __call__(self, rows: np.ndarray) -> Sparse:
        """Return the counts of ``rows`` in this order, CSR float64 [len(rows), G].

        Raises
        ------
        UserError
            If a value is negative, not finite or no whole number, or a cell has too many counts.
        """
        cells: Sparse = sp.csr_matrix(self.read(rows))
        if self.columns is not None:
            cells = cells[:, self.columns]
        self._check(cells, rows)
        return sp.csr_matrix((cells.data.astype(np.float64), cells.indices, cells.indptr), shape=cells.shape)

    def _check(self, cells: Sparse, rows: np.ndarray) -> None:
        path = self.reader.path
        with np.errstate(invalid="ignore"):
            wrong = ~((cells.data >= 0) & (np.abs(cells.data - np.rint(cells.data)) <= _WHOLE))
        if wrong.any():
            k = int(np.argmax(wrong))
            row = int(rows[int(np.searchsorted(cells.indptr, k, "right")) - 1])
            column = int(cells.indices[k])
            gene = self.reader.genes[column if self.columns is None else int(self.columns[column])]
            raise UserError(
                f"{path}: X has values that are no counts (first: {cells.data[k]:g}, cell "
                f"'{self.reader.cell_name(row)}', gene '{gene}'); {_REMEDY}"
            )
        totals = np.asarray(cells.sum(axis=1, dtype=np.float64)).ravel()
        if len(totals) and totals.max() > self.max_total:
            row = int(rows[int(totals.argmax())])
            raise UserError(
                f"{path}: cell '{self.reader.cell_name(row)}' has {totals.max():g} counts, more than the "
                f"{self.max_total:g} that cell-eval2 takes; give raw counts"
            )
