"""Differential expression of every perturbation against one shared set of control cells.

Two-sided Mann–Whitney U on log1p values with tie and continuity correction, one Benjamini–Hochberg family over
all perturbations and genes, fold changes of back-transformed means: the definitions of cell-eval 0.6.6 with
pdex 0.1.28. The controls are sorted once; the perturbations then come one after the other as sparse matrices,
so that memory holds the controls and the cells of one perturbation. Values must not be negative: what a sparse
matrix does not store is the smallest value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import erfc

from perturbdiff.data.kernels import kernel

Sparse = Any  # a scipy.sparse matrix or array; scipy ships no types for them

# Smaller groups get the exact distribution where no two values are equal, as scipy's "auto".
EXACT_BELOW = 9
NO_CHANGE = 1e-6  # a difference of two mean log1p values below this is rounding noise and counts as none
FOLD_LIMIT = 20.0  # the fold change reported where one of the two means is zero


@kernel
def _count(data: np.ndarray, indices: np.ndarray, counts: np.ndarray) -> float:
    """Add the number of non-zero values of each gene to ``counts``; return the lowest value, at most 0."""
    lowest = 0.0
    for i in range(indices.size):
        counts[indices[i]] += data[i] != 0
        lowest = min(lowest, data[i])
    return lowest


@kernel
def _scatter(data: np.ndarray, indices: np.ndarray, place: np.ndarray, out: np.ndarray) -> None:
    """Write each non-zero value to its gene's next place in ``out``: columns of a CSR matrix, rows forgotten."""
    for i in range(indices.size):
        if data[i] != 0:
            out[place[indices[i]]] = data[i]
            place[indices[i]] += 1


@kernel
def _sort_columns(data: np.ndarray, indptr: np.ndarray, ties: np.ndarray, sums: np.ndarray) -> None:
    """Sort each column in place; note its sum and Σ(t³ − t) over its runs of equal values."""
    for gene in range(indptr.size - 1):
        start, stop = indptr[gene], indptr[gene + 1]
        data[start:stop].sort()
        run, total, added = 0, 0.0, 0.0
        for i in range(start, stop):
            added += data[i]
            run += 1
            if i + 1 == stop or data[i + 1] != data[i]:
                total += float(run) ** 3 - run
                run = 0
        ties[gene], sums[gene] = total, added


@kernel
def _bound(values: np.ndarray, start: int, stop: int, wanted: Any, right: bool) -> int:  # noqa: FBT001
    """Return where ``wanted`` goes into the sorted ``values[start:stop]``, left or right of its equals."""
    while start < stop:
        middle = (start + stop) // 2
        if values[middle] < wanted or (right and values[middle] == wanted):
            start = middle + 1
        else:
            stop = middle
    return start


@kernel
def _rank_sums(
    data: np.ndarray,
    indptr: np.ndarray,
    cells: int,
    control_data: np.ndarray,
    control_indptr: np.ndarray,
    control_ties: np.ndarray,
    controls: int,
    statistic: np.ndarray,
    tie_sum: np.ndarray,
) -> None:
    """Fill U of the perturbed cells and Σ(t³ − t) over both groups, gene by gene, from two sorted CSC matrices."""
    for gene in range(indptr.size - 1):
        start, stop = indptr[gene], indptr[gene + 1]
        first, last = control_indptr[gene], control_indptr[gene + 1]
        zeros = float(cells - (stop - start))
        control_zeros = float(controls - (last - first))
        all_zeros = zeros + control_zeros
        u = 0.5 * zeros * control_zeros
        ties = control_ties[gene] + all_zeros**3 - all_zeros
        low, i = first, start
        while i < stop:
            value = data[i]
            copies = 1
            while i + copies < stop and data[i + copies] == value:
                copies += 1
            low = _bound(control_data, low, last, value, False)
            high = _bound(control_data, low, last, value, True)
            equal = float(high - low)
            u += copies * (control_zeros + (low - first) + 0.5 * equal)
            both = copies + equal
            ties += (both**3 - both) - (equal**3 - equal)
            low = high
            i += copies
        statistic[gene], tie_sum[gene] = u, ties


@dataclass(frozen=True)
class _Columns:
    """The non-zero values of each gene, sorted: all that a rank test needs of a set of cells.

    ``values[starts[g]:starts[g + 1]]`` are those of gene g; ``ties`` is Σ(t³ − t) over equal ones, ``mean`` the
    mean over all cells.
    """

    values: np.ndarray
    starts: np.ndarray
    ties: np.ndarray
    mean: np.ndarray
    num_cells: int

    @classmethod
    def of(cls, blocks: Sequence[Sparse]) -> _Columns:
        num_cells = sum(block.shape[0] for block in blocks)
        if not num_cells:
            raise ValueError("a rank test needs at least one cell on either side")
        blocks = [sp.csr_matrix(block) for block in blocks]
        counts, lowest = np.zeros(blocks[0].shape[1], np.int64), 0.0
        for block in blocks:
            block.sum_duplicates()
            lowest = min(lowest, _count(block.data, block.indices, counts))
        if lowest < 0:
            raise ValueError("negative values: a rank test on sparse cells needs log1p values, at least 0")
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        values, place = np.empty(starts[-1], np.result_type(*(b.dtype for b in blocks))), starts[:-1].copy()
        for block in blocks:
            _scatter(block.data, block.indices, place, values)
        ties, sums = np.zeros(len(counts)), np.zeros(len(counts))
        _sort_columns(values, starts, ties, sums)
        return cls(values, starts, ties, sums / num_cells, num_cells)


class Controls:
    """The control cells, sorted per gene once and shared by all tests.

    Parameters
    ----------
    blocks
        Sparse log1p values, cells × genes, in one or several parts. Four bytes per value are kept.

    Attributes
    ----------
    mean
        Mean of each gene, float64 [G].
    """

    def __init__(self, *blocks: Sparse) -> None:
        self._columns = _Columns.of(blocks)
        self.mean, self.num_cells = self._columns.mean, self._columns.num_cells

    def test(self, *blocks: Sparse) -> tuple[np.ndarray, np.ndarray]:
        """Return p (float64 [G]) and mean (float64 [G]) of cells (sparse log1p, cells × genes, in parts).

        The normal approximation with tie and continuity correction; where no two of a gene's values are equal
        and one group has at most 8 cells, the exact distribution.

        Raises
        ------
        ValueError
            If the gene counts differ, there is no cell or a value is negative.
        """
        cells, controls = _Columns.of(blocks), self._columns
        genes, n, m = len(cells.mean), cells.num_cells, controls.num_cells
        if genes != len(controls.mean):
            raise ValueError(f"{genes} genes in the cells, {len(controls.mean)} in the controls")
        u, ties = np.zeros(genes), np.zeros(genes)
        values = cells.values.astype(controls.values.dtype, copy=False)
        _rank_sums(values, cells.starts, n, controls.values, controls.starts, controls.ties, m, u, ties)
        p = _normal_p(u, ties, n, m)
        if min(n, m) < EXACT_BELOW:
            untied = ties == 0
            p[untied] = _exact_p(u[untied], n, m)
        return p, cells.mean


def _normal_p(u: np.ndarray, ties: np.ndarray, n: int, m: int) -> np.ndarray:
    total = n + m
    variance = n * m / 12.0 * ((total + 1.0) - ties / (total * (total - 1.0)))
    largest = np.maximum(u, n * m - u)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (largest - n * m / 2.0 - 0.5) / np.sqrt(variance)
    return np.where(variance > 0, np.minimum(1.0, erfc(z / np.sqrt(2.0))), 1.0)


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


def benjamini_hochberg(p: np.ndarray) -> np.ndarray:
    """Return q values, float64 in the shape of ``p``: all its entries are one family of tests."""
    flat = np.asarray(p, dtype=np.float64).ravel()
    order = np.argsort(flat, kind="stable")
    steps = flat[order] * (flat.size / np.arange(1, flat.size + 1))
    q = np.empty(flat.size)
    q[order] = np.minimum(1.0, np.minimum.accumulate(steps[::-1])[::-1])
    return q.reshape(np.shape(p))


def fold_change(mean: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Return expm1(mean) / expm1(control), float32, as cell-eval 0.6.6 reports it.

    Where only the control's mean is zero it is 20, where only the perturbation's is zero 1/20, where both are 1.
    """
    top, bottom = np.broadcast_arrays(np.expm1(mean), np.expm1(control))
    ratio = np.divide(top, bottom, out=np.full(top.shape, FOLD_LIMIT), where=bottom != 0)
    ratio = np.where(top == 0, 1.0 / FOLD_LIMIT, ratio)
    return np.where((top == 0) & (bottom == 0), 1.0, ratio).astype(np.float32)


@dataclass(frozen=True)
class Differential:
    """Test results of M perturbations over G genes against one set of controls.

    Attributes
    ----------
    mean, control
        Mean log1p values, float64 [M, G] and [G].
    delta
        Their difference, float64 [M, G]; exactly 0 where it is below `NO_CHANGE`.
    p, q
        Mann–Whitney p, float64, and BH-adjusted over all M × G tests, float32 (as cell-eval compares it).
    fold, log2_fold
        Fold change of back-transformed means and its logarithm, float32 [M, G].
    significant
        q < alpha, bool [M, G].
    """

    mean: np.ndarray
    control: np.ndarray
    delta: np.ndarray
    p: np.ndarray
    q: np.ndarray
    fold: np.ndarray
    log2_fold: np.ndarray
    significant: np.ndarray

    @classmethod
    def of(cls, p: np.ndarray, mean: np.ndarray, control: np.ndarray, *, alpha: float = 0.05) -> Differential:
        """Adjust ``p`` [M, G] and derive deltas and fold changes from ``mean`` [M, G] and ``control`` [G]."""
        delta = mean - control
        still = np.abs(delta) < NO_CHANGE
        delta = np.where(still, 0.0, delta)
        q = benjamini_hochberg(p).astype(np.float32)
        fold = fold_change(np.where(still, control, mean), control)
        return cls(mean, control, delta, p, q, fold, np.log2(fold), q < np.float32(alpha))
