"""Compiled loops over rows of CSR matrices. They hold neither the interpreter lock nor any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile ``function`` on first use; keep the machine code where a cache folder can be written."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no writable place for the cache, e.g. in a read-only container
        return cast(F, numba.njit(nogil=True)(function))


@kernel
def are_counts(data: np.ndarray) -> tuple[bool, float]:
    """Return whether all values are whole and not negative, and the largest; without a branch per value."""
    wrong, largest = False, data.dtype.type(0)
    for k in range(len(data)):
        value = data[k]
        wrong |= (value < 0) | (value != np.floor(value))
        largest = value if value > largest else largest
    return not wrong, largest


@kernel
def find_faults(data: np.ndarray) -> tuple[int, int, int]:
    """Return the first positions of a negative, a non-finite and a fractional value (-1: none)."""
    negative, broken, fraction = -1, -1, -1
    for k in range(len(data)):
        value = data[k]
        if not np.isfinite(value):
            if broken < 0:
                broken = k
        elif value < 0:
            if negative < 0:
                negative = k
        elif fraction < 0 and value != np.floor(value):
            fraction = k
    return negative, broken, fraction


@kernel
def row_totals(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    depth: np.ndarray,
    detected: np.ndarray,
) -> None:
    """Write each row's sum and number of positive values over the mapped columns."""
    for i in range(len(indptr) - 1):
        total, positive = 0.0, 0
        for k in range(indptr[i], indptr[i + 1]):
            if columns[indices[k]] >= 0 and data[k] > 0:
                total += data[k]
                positive += 1
        depth[i] = total
        detected[i] = positive


@kernel
def add_gene_sums(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    group: np.ndarray,
    divisor: np.ndarray,
    total: np.ndarray,
    squares: np.ndarray,
    positive: np.ndarray,
) -> None:
    """Add each row's values over its divisor, and their squares, to its group's gene sums; skip group -1."""
    for i in range(len(indptr) - 1):
        g = group[i]
        if g < 0 or divisor[i] <= 0:
            continue
        factor = 1.0 / divisor[i]
        for k in range(indptr[i], indptr[i + 1]):
            j = columns[indices[k]]
            if j >= 0 and data[k] > 0:
                value = data[k] * factor
                total[g, j] += value
                squares[g, j] += value * value
                positive[g, j] += 1


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
    """Copy the positive values of kept rows in mapped columns, ascending by column; return how many."""
    end = 0
    for i in range(len(indptr) - 1):
        begin = end
        if keep[i]:
            for k in range(indptr[i], indptr[i + 1]):
                j = columns[indices[k]]
                if j >= 0 and data[k] > 0:
                    # an insertion sort: input rows are nearly always sorted already
                    place = end
                    while place > begin and out_indices[place - 1] > j:
                        out_indices[place] = out_indices[place - 1]
                        out_data[place] = out_data[place - 1]
                        place -= 1
                    out_indices[place] = j
                    out_data[place] = data[k]
                    end += 1
        lengths[i] = end - begin
    return end


@kernel
def take_rows(
    starts: np.ndarray,
    lengths: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """Copy the rows that begin at ``starts``, in that order, one after another."""
    end = 0
    for i in range(len(starts)):
        for k in range(starts[i], starts[i] + lengths[i]):
            out_indices[end] = indices[k]
            out_data[end] = data[k]
            end += 1


@kernel
def take_log1p(
    starts: np.ndarray,
    lengths: np.ndarray,
    factors: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """`take_rows` with each value replaced by log1p(value * factor of its row), in float32."""
    end = 0
    for i in range(len(starts)):
        factor = np.float32(factors[i])
        for k in range(starts[i], starts[i] + lengths[i]):
            out_indices[end] = indices[k]
            out_data[end] = np.log1p(np.float32(data[k]) * factor)
            end += 1


@kernel
def dense_log1p(
    starts: np.ndarray,
    lengths: np.ndarray,
    factors: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write rows densely into ``out``, which is zeroed here, as log1p(value * factor of the row)."""
    for i in range(len(starts)):
        factor = np.float32(factors[i])
        for j in range(out.shape[1]):
            out[i, j] = 0.0
        for k in range(starts[i], starts[i] + lengths[i]):
            out[i, indices[k]] = np.log1p(np.float32(data[k]) * factor)


@kernel
def dense_values(
    starts: np.ndarray, lengths: np.ndarray, indices: np.ndarray, data: np.ndarray, out: np.ndarray
) -> None:
    """Write rows densely into ``out``, which is zeroed here."""
    for i in range(len(starts)):
        for j in range(out.shape[1]):
            out[i, j] = 0.0
        for k in range(starts[i], starts[i] + lengths[i]):
            out[i, indices[k]] = data[k]


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
