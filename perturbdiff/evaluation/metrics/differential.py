"""Differential expression of every perturbation against one shared set of control cells.

Two-sided Mann–Whitney U on log1p values with tie and continuity correction, Benjamini–Hochberg adjustment and
fold changes of back-transformed means, as `DEFINITIONS` says in detail. The controls are
sorted once; the perturbations then come one after the other as sparse matrices, so that memory holds the
controls and the cells of one perturbation. Tests of several perturbations can run in threads at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtr

from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.compiled import kernel

INFINITY = float("inf")
DEFAULT = "perturbdiff"
_STRIDE = 8
# A relative difference of two mean log1p values below this is what rounding to float32 leaves of two equal means.
NO_CHANGE = 1e-6


@dataclass(frozen=True)
class Definition:
    """In what one release differs from the other; `perturbdiff.evaluation.metrics.catalogue` has what they share.

    Attributes
    ----------
    name
        Name in tables and settings.
    bh_family
        Tests that Benjamini–Hochberg adjusts together: ``all`` perturbations and genes of a scope, or those of
        one ``perturbation``. With ``all``, what a perturbation scores depends on which others are scored.
    exact_below
        Where no two of a gene's values are equal and one group has fewer cells, p is exact (scipy's "auto").
        0: the normal approximation always.
    fold_limit
        Fold change reported where only the control's mean is zero; its inverse where only the perturbation's is.
    ranks
        What LFCSpear ranks: fold changes or their logarithms. The order is the same; which are equal in float32
        is not.
    score_floor
        Which q are raised to 1e-10 before AUROC and AUPRC rank by −log10 q: those that are ``zero``, so that
        1e-11 counts as stronger than 0, or all ``below`` it.
    left_out
        Genes that discrimination scores leave out: the gene that a perturbation is named after (``own``), or the
        target genes of all perturbations (``panel``), with ties in the middle and a range from 0 to 1.
    """

    name: str
    bh_family: Literal["all", "perturbation"]
    exact_below: int
    fold_limit: float
    ranks: Literal["fold", "log2_fold"]
    score_floor: Literal["zero", "below"]
    left_out: Literal["own", "panel"] = "own"


DEFINITIONS: dict[str, Definition] = {
    definition.name: definition
    for definition in (
        Definition(DEFAULT, "all", 9, 20.0, "fold", "zero", "panel"),
        Definition("cell-eval-0.6.6", "all", 9, 20.0, "fold", "zero"),  # with pdex 0.1.28 and scipy 1.16
        Definition("cell-eval-0.8.2", "perturbation", 0, INFINITY, "log2_fold", "below"),  # with pdex 0.3.0
    )
}

# With more controls per cell than this, the loop passes them in strides; with still more, it searches them.
_STRIDES, _SEARCH = 4, 512


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


class Controls:
    """The control cells, sorted per gene once and shared by all tests.

    Parameters
    ----------
    blocks
        Sparse log1p values, cells × genes, in one or several parts. Four bytes per float32 value are kept.

    Attributes
    ----------
    columns
        Their sorted columns.
    mean
        Mean of each gene, float64 [G].
    """

    def __init__(self, *blocks: Sparse) -> None:
        self.columns = Columns.of(blocks)
        self.mean, self.num_cells = self.columns.mean, self.columns.num_cells

    @classmethod
    def of_columns(cls, columns: Columns) -> Controls:
        """Return the controls whose columns have been sorted already, e.g. by `Columns.joined`."""
        controls = cls.__new__(cls)
        controls.columns, controls.mean, controls.num_cells = columns, columns.mean, columns.num_cells
        return controls

    def test(
        self, *blocks: Sparse, definition: Definition = DEFINITIONS[DEFAULT]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return p (float64 [G]) and mean (float64 [G]) of cells (sparse log1p, cells × genes, in parts).

        Raises
        ------
        ValueError
            If the gene counts differ, there is no cell, or a value is negative or NaN.
        """
        return self.test_columns(Columns.of(blocks), definition)

    def test_columns(
        self, cells: Columns, definition: Definition = DEFINITIONS[DEFAULT]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do the same for cells whose columns are sorted."""
        dtype = np.result_type(cells.values.dtype, self.columns.values.dtype)
        if self.columns.values.dtype != dtype:
            self.columns = self.columns.astype(dtype)
        p = rank_test(cells.astype(dtype), self.columns, exact_below=definition.exact_below)
        return p, cells.mean


def benjamini_hochberg(p: np.ndarray, family: str = "all") -> np.ndarray:
    """Return q values, float64 in the shape of ``p``.

    Parameters
    ----------
    p
        One row per perturbation.
    family
        ``all``: all entries are one family of tests; ``perturbation``: each row is.
    """
    p = np.asarray(p, dtype=np.float64)
    rows = p.reshape(1, -1) if family == "all" else p.reshape(-1, p.shape[-1])
    q, num = np.empty_like(rows), rows.shape[1]
    for row, found in zip(rows, q, strict=True):
        order = np.argsort(row)  # in what order equal p come makes no difference
        steps = row[order] * (num / np.arange(1, num + 1))
        found[order] = np.minimum(1.0, np.minimum.accumulate(steps[::-1])[::-1])
    return q.reshape(p.shape)


def fold_change(mean: np.ndarray, control: np.ndarray, limit: float = 20.0) -> np.ndarray:
    """Return expm1(mean) / expm1(control), float64.

    Where only the control's mean is zero it is ``limit``, where only the perturbation's is zero 1 / ``limit``,
    where both are 1.
    """
    top, bottom = np.broadcast_arrays(np.expm1(mean), np.expm1(control))
    ratio = np.divide(top, bottom, out=np.full(top.shape, limit), where=bottom != 0)
    ratio[top == 0] = 1.0 / limit
    ratio[(top == 0) & (bottom == 0)] = 1.0
    return ratio


def is_rounding(mean: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Return where ``mean`` [M, G] and ``control`` [G] differ by no more than rounding (`NO_CHANGE`), bool."""
    return (np.abs(mean - control) < NO_CHANGE * control) | (mean == control)


@dataclass(frozen=True)
class Differential:
    """Test results of M perturbations over G genes against one set of controls.

    Attributes
    ----------
    mean, control
        Mean log1p values, float64 [M, G] and [G].
    delta
        Their difference, float64 [M, G]; exactly 0 where it is rounding noise (`NO_CHANGE`).
    p, q
        Mann–Whitney p, float64, and BH-adjusted, float32 (as cell-eval compares it).
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
    def of(
        cls,
        p: np.ndarray,
        mean: np.ndarray,
        control: np.ndarray,
        *,
        definition: Definition = DEFINITIONS[DEFAULT],
        alpha: float = 0.05,
    ) -> Differential:
        """Adjust ``p`` [M, G] and derive deltas and fold changes from ``mean`` [M, G] and ``control`` [G]."""
        delta = mean - control
        still = is_rounding(mean, control)
        delta[still] = 0.0
        q = benjamini_hochberg(p, definition.bh_family).astype(np.float32)
        ratio = fold_change(np.where(still, control, mean), control, definition.fold_limit)
        fold = ratio.astype(np.float32)
        if definition.ranks == "fold":  # the logarithm of what was reported
            log2_fold = np.log2(fold)
        else:
            with np.errstate(divide="ignore"):
                log2_fold = np.log2(ratio).astype(np.float32)
        return cls(mean, control, delta, p, q, fold, log2_fold, q < np.float32(alpha))
