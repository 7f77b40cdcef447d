"""Read the predictions of an adapter and check them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.io.derived_matrices import HIGHEST
from perturbdiff.io.opening import open_root
from perturbdiff.runtime.errors import UserError

_ROWS_PER_BLOCK = 4096


class Answer:
    """The predictions of an adapter, read block by block.

    Parameters
    ----------
    path
        AnnData as h5ad: ``X`` float [n, G], log1p, dense or CSR. Names of genes may be left out.
    method
        Name of the method, for the messages.
    genes
        Names of the genes, in the order of the columns.
    queries
        A row for each cell: ``perturbation, cell_type, batch``.
    maxima
        float32 [G]: largest training value of every gene.
    names
        Names of the control cells that predictions were made from, object [n]; None if they were not.

    Attributes
    ----------
    negative, above, largest
        Number of values below 0 (which become 0) and above the gene's training maximum, and the largest value;
        complete when all blocks have been read.

    Raises
    ------
    UserError
        If there is no such file, or its shape, format or genes are wrong.
    """

    def __init__(
        self,
        path: Path,
        method: str,
        genes: list[str],
        queries: pd.DataFrame,
        maxima: np.ndarray,
        names: np.ndarray | None,
    ) -> None:
        self._method, self._genes, self._queries = method, genes, queries
        self._maxima, self._names = maxima, names
        self.negative, self.above, self.largest = 0, 0, 0.0
        if not path.is_file():
            raise UserError(f"{method} ended well but wrote no {path.name}")
        try:
            self._file = open_root(path)
        except UserError as error:
            raise UserError(f"{method}: its predictions cannot be read: {error}") from None
        try:
            self._check()
        except BaseException:
            self._file.close()
            raise

    def _check(self) -> None:
        x: Any = self._file.get("X")
        if isinstance(x, h5py.Group) and x.attrs.get("encoding-type") != "csr_matrix":
            raise UserError(
                f"{self._method}: its predictions are stored as {x.attrs.get('encoding-type')}; X must be dense or CSR"
            )
        if x is None:
            raise UserError(f"{self._method}: its predictions have no X")
        given: Any = x.attrs["shape"] if isinstance(x, h5py.Group) else x.shape
        shape = tuple(map(int, given))
        expected = (len(self._queries), len(self._genes))
        if shape != expected:
            raise UserError(
                f"{self._method}: its predictions are {shape}, expected are {expected}: a row for each line of "
                "queries.csv, a column for each gene of train.h5ad"
            )
        if "var" in self._file:
            stored: Any = self._file["var"]
            var: Any = anndata.io.read_elem(stored)
            self._check_genes([str(name) for name in var.index])
        self._x: Any = x

    def _check_genes(self, found: list[str]) -> None:
        if len(found) != len(self._genes):
            raise UserError(
                f"{self._method}: var of its predictions has {len(found)} genes, X {len(self._genes)}"
            )
        wrong = [i for i, (a, b) in enumerate(zip(found, self._genes, strict=True)) if a != b]
        if wrong:
            raise UserError(
                f"{self._method}: column {wrong[0]} of its predictions is gene '{found[wrong[0]]}', expected is "
                f"'{self._genes[wrong[0]]}': keep the order of train.h5ad"
            )

    def cells(self) -> Iterator[tuple[pd.DataFrame, sparse.csr_matrix]]:
        """Yield obs and float32 values [n, G], ≥ 0.

        Raises
        ------
        UserError
            If a value is not finite or larger than any log1p value.
        """
        for first in range(0, len(self._queries), _ROWS_PER_BLOCK):
            rows = slice(first, min(first + _ROWS_PER_BLOCK, len(self._queries)))
            block = self._read(rows)
            self._check_values(block, first)
            block.data[block.data < 0] = 0
            block.eliminate_zeros()
            obs = self._queries.iloc[rows].reset_index(drop=True)
            yield (obs if self._names is None else obs.assign(cell=self._names[rows])), block

    def _read(self, rows: slice) -> sparse.csr_matrix:
        if isinstance(self._x, h5py.Dataset):
            return sparse.csr_matrix(np.asarray(self._x[rows], dtype=np.float32))
        pointers = np.asarray(self._x["indptr"][rows.start : rows.stop + 1], dtype=np.int64)
        values = slice(int(pointers[0]), int(pointers[-1]))
        data = np.asarray(self._x["data"][values], dtype=np.float32)
        indices, shape = np.asarray(self._x["indices"][values]), (rows.stop - rows.start, len(self._genes))
        block = sparse.csr_matrix((data, indices, pointers - pointers[0]), shape=shape)
        block.check_format()
        block.sum_duplicates()
        return block

    def _check_values(self, block: sparse.csr_matrix, first: int) -> None:
        bad = ~np.isfinite(block.data)
        if bad.any():
            place = self._place(block, bad, first)
            share = bad.sum() / max(np.prod(block.get_shape()), 1)
            raise UserError(
                f"{self._method}: its predictions are not finite (first: {place}; {share:.1%} of the values there)"
            )
        large = block.data >= HIGHEST
        if large.any():
            place, value = self._place(block, large, first), block.data.max()
            raise UserError(
                f"{self._method} has diverged: it predicts values up to {value:.3g} (first: {place}), and log1p values "
                f"of normalised counts stay below {HIGHEST:g}"
            )
        self.negative += int((block.data < 0).sum())
        self.above += int((block.data > self._maxima[block.indices] * (1 + 1e-5)).sum())
        self.largest = max(self.largest, float(block.data.max(initial=0)))

    def _place(self, block: sparse.csr_matrix, marked: np.ndarray, first: int) -> str:
        """Name the cell and the gene of the first marked value."""
        at = int(np.flatnonzero(marked)[0])
        row = int(np.searchsorted(block.indptr, at, "right")) - 1
        label = self._queries["perturbation"].iloc[first + row]
        return f"line {first + row + 2} of queries.csv, perturbation '{label}', gene '{self._genes[block.indices[at]]}'"

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
