"""Sums over cells by batch and gene, made piece by piece, from which genes are chosen (`selection`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from perturbdiff.genes import highly_variable
from perturbdiff.io.matrices import Block
from perturbdiff.runtime.compiled import kernel

_SMALL = 32
"""Counts below this have their logarithm computed once per cell: nearly all do."""
_LEFT_OUT = -1


@kernel
def add_gene_sums(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    group: np.ndarray,
    divisor: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add each row's values over its divisor to its group's ``sums`` [group, gene, 3]; skip group -1.

    The three sums of a gene lie together, which is a third faster than three arrays.
    """
    for i in range(len(indptr) - 1):
        g = group[i]
        if g < 0 or divisor[i] <= 0:
            continue
        factor = 1.0 / divisor[i]
        of_group = sums[g]
        for k in range(indptr[i], indptr[i + 1]):
            j = columns[indices[k]]
            if j >= 0 and data[k] > 0:
                value = data[k] * factor
                of_group[j, 0] += value
                of_group[j, 1] += value * value
                of_group[j, 2] += 1.0


@kernel
def add_log_sums(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    group: np.ndarray,
    factor: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add log1p(value * factor of its row) to its group's ``sums`` [group, gene, 3]; skip group -1."""
    small = np.zeros(_SMALL)
    for i in range(len(indptr) - 1):
        g = group[i]
        if g < 0:
            continue
        small[:] = -1.0
        of_group = sums[g]
        for k in range(indptr[i], indptr[i + 1]):
            j = columns[indices[k]]
            if j >= 0 and data[k] > 0:
                count = np.int64(min(data[k], _SMALL))
                if count == data[k] and count < _SMALL:
                    if small[count] < 0:
                        small[count] = np.log1p(data[k] * factor[i])
                    value = small[count]
                else:
                    value = np.log1p(data[k] * factor[i])
                of_group[j, 0] += value
                of_group[j, 1] += value * value
                of_group[j, 2] += 1.0


@kernel
def add_clipped_sums(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    group: np.ndarray,
    limit: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add values up to ``limit`` [group, gene] to ``sums`` [group, gene, 3] and count those above it.

    Sums of whole numbers are exact in any order. A count above the limit is later replaced by the limit.
    """
    for i in range(len(indptr) - 1):
        g = group[i]
        if g < 0:
            continue
        of_group, top = sums[g], limit[g]
        for k in range(indptr[i], indptr[i + 1]):
            j = columns[indices[k]]
            if j >= 0 and data[k] > 0:
                value = np.float64(data[k])
                if value > top[j]:
                    of_group[j, 2] += 1.0
                else:
                    of_group[j, 0] += value
                    of_group[j, 1] += value * value


@kernel
def add_target_sums(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    factor: np.ndarray,
    group: np.ndarray,
    place: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add value * factor of its row to ``sums`` [group, place of the gene]; skip group -1 and place -1."""
    for i in range(len(indptr) - 1):
        g = group[i]
        if g < 0:
            continue
        for k in range(indptr[i], indptr[i + 1]):
            j = columns[indices[k]]
            if j >= 0 and place[j] >= 0:
                sums[g, place[j]] += data[k] * factor[i]


@kernel
def values_of_own_gene(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    factor: np.ndarray,
    gene: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write, for each row, the value of its own ``gene`` (-1: none) times the row's factor; 0 if it is not stored."""
    for i in range(len(indptr) - 1):
        out[i] = 0.0
        if gene[i] < 0:
            continue
        for k in range(indptr[i], indptr[i + 1]):
            if columns[indices[k]] == gene[i]:
                out[i] += data[k] * factor[i]


class GeneSums:
    """Three sums by batch and gene, and the cells of each batch: float64, 24 bytes per batch and gene.

    Adding is exact for whole numbers and depends on the order of the additions otherwise.

    Attributes
    ----------
    values
        Float64 [batches, G, 3]: of the values, of their squares, and the number of positive values.
    cells
        Int64 [batches].
    """

    def __init__(self, num_batches: int, num_genes: int) -> None:
        self.values = np.zeros((num_batches, num_genes, 3))
        self.cells = np.zeros(num_batches, np.int64)

    @property
    def positive(self) -> np.ndarray:
        """Number of cells that express each gene, int64 [batches, G]."""
        return self.values[:, :, 2].astype(np.int64)

    def add(
        self,
        block: Block,
        columns: np.ndarray,
        group: np.ndarray,
        divisor: np.ndarray | None = None,
    ) -> None:
        """Add a block's rows to the sums of their ``group`` (-1: left out), divided by ``divisor`` if given."""
        divisor = np.ones(len(group)) if divisor is None else divisor
        self.count(group)
        add_gene_sums(block.indptr, block.indices, block.data, columns, group, divisor, self.values)

    def count(self, group: np.ndarray) -> None:
        """Add the cells of each group alone."""
        self.cells += np.bincount(group[group >= 0], minlength=len(self.cells))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the batches that have cells, as arrays to save: what `add_arrays` and `from_arrays` take."""
        batches = np.flatnonzero(self.cells)
        return {
            "sums_shape": np.array(self.values.shape[:2]),
            "sums_batches": batches,
            "sums_cells": self.cells[batches],
            "sums_values": self.values[batches],
        }

    def add_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add the sums of a further piece; call it in the order of the pieces."""
        self.values[arrays["sums_batches"]] += arrays["sums_values"]
        self.cells[arrays["sums_batches"]] += arrays["sums_cells"]

    @classmethod
    def from_arrays(cls, pieces: Iterable[Mapping[str, np.ndarray]]) -> GeneSums:
        """Return the sums over all pieces, of which there is at least one, in their order."""
        whole: GeneSums | None = None
        for arrays in pieces:
            if whole is None:
                whole = cls(*(int(n) for n in arrays["sums_shape"]))
            whole.add_arrays(arrays)
        if whole is None:
            raise ValueError("no piece to merge")
        return whole

    def moments(self, batch: int, factor: float = 1.0) -> highly_variable.Moments:
        """Return mean, unbiased variance and detection of each gene in a batch, values times ``factor``."""
        total, squares, positive = self.values[batch].T
        return highly_variable.moments(
            int(self.cells[batch]), factor * total, factor**2 * squares, positive > 0
        )

    def pooled(self) -> GeneSums:
        """Return the sums over all batches as one."""
        if len(self.cells) == 1:
            return self
        one = GeneSums(1, self.values.shape[1])
        one.values[0], one.cells[0] = self.values.sum(axis=0), self.cells.sum()
        return one


def gene_groups(conditions: pd.DataFrame, look: np.ndarray, *, by_batch: bool) -> tuple[np.ndarray, int]:
    """Return the group of sums each condition's cells belong to (int32, -1: none), and how many groups there are.

    Parameters
    ----------
    conditions
        With column ``batch``.
    look
        Whether gene selection may look at each condition, bool.
    by_batch
        One group per batch, in the order of their names; otherwise one in all.
    """
    if not by_batch:
        return np.where(look, 0, _LEFT_OUT).astype(np.int32), 1
    batches = pd.Categorical(conditions["batch"])
    return np.where(look, batches.codes, _LEFT_OUT).astype(np.int32), len(batches.categories)


def group_of_cells(codes: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the group of each cell, which is its condition's; dropped cells (code -1) have none (-1)."""
    return np.where(codes >= 0, group[np.maximum(codes, 0)], _LEFT_OUT).astype(np.int32)
