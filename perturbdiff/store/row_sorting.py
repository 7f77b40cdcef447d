"""Compiled loops that move rows: choosing columns, putting rows in order, keys to order them by."""

from __future__ import annotations

import numpy as np

from perturbdiff.runtime.compiled import kernel


@kernel
def select_columns(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    keep: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """Copy the positive values of kept rows in mapped columns, ascending by column; return how many.

    Every value is written and the next one over it unless it counts: no branch to mispredict. So ``out_*`` need room
    for one value more than there are.
    """
    end = 0
    for i in range(len(indptr) - 1):
        begin = end
        if keep[i]:
            places, values = indices[indptr[i] : indptr[i + 1]], data[indptr[i] : indptr[i + 1]]
            for k in range(len(places)):
                j = columns[places[k]]
                out_indices[end] = j
                out_data[end] = values[k]
                end += (j >= 0) & (values[k] > 0)
            ascending = True
            for k in range(begin + 1, end):
                ascending &= out_indices[k] > out_indices[k - 1]
            if not ascending:
                order = np.argsort(out_indices[begin:end])
                out_indices[begin:end] = out_indices[begin:end][order]
                out_data[begin:end] = out_data[begin:end][order]
        lengths[i] = end - begin
    return end


@kernel
def place_rows(
    starts: np.ndarray,
    lengths: np.ndarray,
    places: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """Copy the rows that begin at ``starts`` to where they belong: row i to ``places[i]`` on."""
    for i in range(len(starts)):
        a, b, n = starts[i], places[i], lengths[i]
        out_indices[b : b + n] = indices[a : a + n]
        out_data[b : b + n] = data[a : a + n]


@kernel
def column_maximum(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, factors: np.ndarray, out: np.ndarray
) -> None:
    """Raise ``out`` to the largest value * factor of its row seen in each column, in float32."""
    for i in range(len(indptr) - 1):
        factor = np.float32(factors[i])
        for k in range(indptr[i], indptr[i + 1]):
            out[indices[k]] = max(out[indices[k]], np.float32(data[k]) * factor)


@kernel
def shuffle_keys(seed: int, first: int, out: np.ndarray) -> None:
    """Write a 64-bit key for each of the rows from ``first``: SplitMix64 of seed and row.

    Sorting by these keys is a random order that depends on the seed and the row's number alone, not on how
    the rows were cut into blocks or buckets.
    """
    for i in range(len(out)):
        z = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(first + i + 1) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out[i] = z ^ (z >> np.uint64(31))
