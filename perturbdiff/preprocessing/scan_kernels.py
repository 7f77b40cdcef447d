"""Compiled loops of the first pass: checks of values, depth and detected genes, and sums by gene, in few passes.

`scan_counts` is fast because its checks are integer reductions that become vector instructions, each row is still in
the cache when its values are added, the sums of a gene lie side by side, and no value costs a branch.
"""

from __future__ import annotations

import numpy as np

from perturbdiff.runtime.compiled import kernel

LARGEST_FUSED = np.float32(2**24)
"""`scan_counts` takes counts up to here: all of them are whole float32 numbers and fit into int32."""


@kernel
def repeated_column(indptr: np.ndarray, indices: np.ndarray, columns: int) -> int:
    """Return the place of a value whose row has an earlier one in the same of ``columns`` columns, or -1."""
    seen = np.empty(0, np.int64)
    for i in range(len(indptr) - 1):
        ascending = True
        for k in range(indptr[i] + 1, indptr[i + 1]):
            ascending &= indices[k] > indices[k - 1]
        if ascending:
            continue
        if not len(seen):
            seen = np.full(columns, -1, np.int64)
        for k in range(indptr[i], indptr[i + 1]):
            if seen[indices[k]] == i:
                return k
            seen[indices[k]] = i
    return -1


@kernel
def highest_bits(bits: np.ndarray) -> int:
    """Return the largest of float32 values read as uint32.

    Such numbers are in the order of the values they stand for, with negative and undefined ones above them all.
    """
    top = np.uint32(0)
    for k in range(len(bits)):
        top = max(top, bits[k])
    return int(top)


@kernel
def _row_totals(data: np.ndarray) -> tuple[int, int, int]:
    """Return sum, number of positive values and whether any is fractional, of values up to 2^24."""
    total, positive, wrong = np.int64(0), np.int64(0), np.int32(0)
    for k in range(len(data)):
        whole = np.int32(data[k])
        total += whole
        positive += whole > 0
        wrong |= np.int32(np.float32(whole) != data[k])
    return int(total), int(positive), int(wrong)


@kernel
def _used_totals(data: np.ndarray, indices: np.ndarray, columns: np.ndarray, unused: int) -> tuple[int, int]:
    """Return sum and number of positive values of the used columns."""
    total, positive = np.int64(0), np.int64(0)
    for k in range(len(data)):
        whole = np.int64(data[k]) * np.int64(columns[indices[k]] != unused)
        total += whole
        positive += whole > 0
    return int(total), int(positive)


@kernel
def scan_counts(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    columns: np.ndarray,
    every: bool,  # noqa: FBT001
    group: np.ndarray,
    least: np.ndarray,
    divide: bool,  # noqa: FBT001
    depth: np.ndarray,
    detected: np.ndarray,
    sums: np.ndarray,
) -> bool:
    """Scan a block of float32 counts up to `LARGEST_FUSED`; return whether all are whole numbers.

    Parameters
    ----------
    columns
        Place of each column among G genes; G for one that is not used.
    every
        Whether all columns are used.
    group
        Group of ``sums`` for each row, -1 for none.
    least
        Fewest counts and fewest detected genes of a row that is added to the sums, float64 [2].
    divide
        Whether values are added over their row's depth; a row without counts is not added.
    depth, detected
        Written: sum of a row's used values, number of its positive ones.
    sums
        Float64 [groups, G + 1, 3]: value, its square and one are added for every positive value.
    """
    wrong, unused = np.int32(0), sums.shape[1] - 1
    for i in range(len(indptr) - 1):
        a, b = indptr[i], indptr[i + 1]
        values, places = data[a:b], indices[a:b]
        total, found, fraction = _row_totals(values)
        wrong |= fraction
        if not every:
            total, found = _used_totals(values, places, columns, unused)
        depth[i], detected[i] = total, found
        g = group[i]
        if g >= 0 and total > 0 and total >= least[0] and found >= least[1]:
            factor = 1.0 / total if divide else 1.0
            own = sums[g]
            for k in range(len(values)):
                j = np.uint32(columns[places[k]])
                value = values[k] * factor
                own[j, 0] += value
                own[j, 1] += value * value
                own[j, 2] += values[k] > 0
    return wrong == 0


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
    """Write each row's sum and number of positive values over the mapped columns (-1: not used)."""
    for i in range(len(indptr) - 1):
        total, positive = 0.0, 0
        for k in range(indptr[i], indptr[i + 1]):
            if columns[indices[k]] >= 0 and data[k] > 0:
                total += data[k]
                positive += 1
        depth[i] = total
        detected[i] = positive
