"""Matrices made of another one while it is read: columns of one gene joined, or the logarithm of the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from scipy import sparse

from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block, RowMatrix, SomeColumns

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
