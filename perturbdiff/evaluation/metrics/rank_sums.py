"""The Mann–Whitney U test of sorted columns: statistic, tie correction and p."""

from __future__ import annotations

import functools

import numpy as np
from scipy.special import ndtr

from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.runtime.compiled import kernel

# Controls per cell beyond which they are walked through in strides, and beyond which they are searched.
_STRIDES, _SEARCH = 4, 512
_STRIDE = 8


@kernel
def _search(keys: np.ndarray, wanted: np.ndarray) -> int:
    """Return how many of the sorted ``keys`` lie below the key ``wanted``, in steps without branches."""
    low, length = 0, keys.size
    while length > 0:
        half = (length + 1) >> 1
        low += half if keys[low + half - 1] < wanted else 0
        length -= half
    return low


@kernel
def _below(keys: np.ndarray, wanted: np.ndarray) -> int:
    """Return how many of `_STRIDE` keys lie below ``wanted``, which the processor counts at once."""
    below = np.int32(0)
    for j in range(_STRIDE):
        below += np.int32(keys[j] < wanted)
    return int(below)


@kernel
def _rank_sums(
    keys: np.ndarray,
    starts: np.ndarray,
    cells: int,
    control_keys: np.ndarray,
    control_starts: np.ndarray,
    control_ties: np.ndarray,
    controls: int,
    statistic: np.ndarray,
    tie_sum: np.ndarray,
) -> None:
    """Fill U of the cells and Σ(t³ − t) over both groups, gene by gene."""
    for gene in range(starts.size - 1):
        i, stop = starts[gene], starts[gene + 1]
        first, last = control_starts[gene], control_starts[gene + 1]
        strides = last - first > _STRIDES * (stop - i)
        search = last - first > _SEARCH * (stop - i)
        zeros = float(cells - (stop - i))
        control_zeros = float(controls - (last - first))
        all_zeros = zeros + control_zeros
        # Twice U and every count of pairs are whole numbers, exact in float64 up to 2^53.
        u = 0.5 * zeros * control_zeros + control_zeros * (stop - i)
        ties = control_ties[gene] + (all_zeros * all_zeros * all_zeros - all_zeros)
        low = first
        while i < stop:
            key = keys[i]
            if search:
                low += _search(control_keys[low:last], key)
            if strides:
                while low + _STRIDE <= last and control_keys[low + _STRIDE - 1] < key:
                    low += _STRIDE
                if low + _STRIDE <= last:
                    low += _below(control_keys[low : low + _STRIDE], key)
            while low < last and control_keys[low] < key:
                low += 1
            copies, high = 1, low
            while i + copies < stop and keys[i + copies] == key:
                copies += 1
            while high < last and control_keys[high] == key:
                high += 1
            u += copies * float(low - first)
            if copies + high - low > 1:
                equal = float(high - low)
                both = copies + equal
                u += 0.5 * copies * equal
                ties += (both * both * both - both) - (equal * equal * equal - equal)
            low = high
            i += copies
        statistic[gene], tie_sum[gene] = u, ties


def rank_test(cells: Columns, controls: Columns, *, exact_below: int) -> np.ndarray:
    """Return the two-sided p of each gene, float64 [G].

    Normal approximation with tie and continuity correction. Where no two of a gene's values are equal and one
    group has fewer than ``exact_below`` cells, the exact distribution. 1 for a gene that is constant.
    """
    genes, n, m = len(cells.mean), cells.num_cells, controls.num_cells
    if genes != len(controls.mean):
        raise ValueError(f"{genes} genes in the cells, {len(controls.mean)} in the controls")
    u, ties = np.zeros(genes), np.zeros(genes)
    _rank_sums(cells.keys, cells.starts, n, controls.keys, controls.starts, controls.ties, m, u, ties)
    p = _normal_p(u, ties, n, m)
    if min(n, m) < exact_below:
        untied = ties == 0
        p[untied] = _exact_p(u[untied], n, m)
    return p


def _normal_p(u: np.ndarray, ties: np.ndarray, n: int, m: int) -> np.ndarray:
    """Return p in the order of operations of scipy.stats.mannwhitneyu, so that it is the same to the last bit."""
    total = n + m
    variance = n * m / 12 * ((total + 1) - ties / (total * (total - 1)))
    largest = np.maximum(u, n * m - u)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (largest - n * m / 2 - 0.5) / np.sqrt(variance)
    return np.where(variance > 0, np.minimum(1.0, 2.0 * ndtr(-z)), 1.0)


@functools.lru_cache(maxsize=8)
def _exact_tail(n: int, m: int) -> np.ndarray:
    """Return P(U ≥ u) for u = 0..nm without ties: the coefficients of a Gaussian binomial, in whole numbers."""
    small, large = min(n, m), max(n, m)
    ways = [0] * (small * large + 1)
    ways[0] = 1
    for i in range(1, small + 1):
        for u in range(len(ways) - 1, large + i - 1, -1):
            ways[u] -= ways[u - large - i]
        for u in range(i, len(ways)):
            ways[u] += ways[u - i]
    everything = sum(ways)
    tail, at_least = np.empty(len(ways)), 0
    for u in range(len(ways) - 1, -1, -1):
        at_least += ways[u]
        tail[u] = at_least / everything
    return tail


def _exact_p(u: np.ndarray, n: int, m: int) -> np.ndarray:
    if not u.size:
        return u
    largest = np.maximum(u, n * m - u).astype(np.int64)
    return np.minimum(1.0, 2.0 * _exact_tail(n, m)[largest])
