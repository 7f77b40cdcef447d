"""Compiled loops that turn dense and column-wise matrices into rows."""

from __future__ import annotations

import numpy as np

from perturbdiff.runtime.compiled import kernel


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
    """Write column and value of all that is not 0, row by row; the last place of the outputs is for scratch."""
    end = 0
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            # written always and kept by moving on: without a branch that depends on the data
            indices[end] = j
            data[end] = values[i, j]
            end += values[i, j] != 0


@kernel
def order_by_group(group: np.ndarray, starts: np.ndarray, order: np.ndarray) -> None:
    """Write the positions of each group's members, kept in their order, from ``starts``, which move on."""
    for k in range(len(group)):
        order[starts[group[k]]] = k
        starts[group[k]] += 1
