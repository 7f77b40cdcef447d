"""Differential expression of every perturbation against one shared set of control cells.

Two-sided Mann–Whitney U on log1p values with tie and continuity correction, Benjamini–Hochberg adjustment and
fold changes of back-transformed means, as `perturbdiff.evaluation.metrics.definitions` says in detail. The controls are
sorted once; the perturbations then come one after the other as sparse matrices, so that memory holds the
controls and the cells of one perturbation. Tests of several perturbations can run in threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbdiff.evaluation.metrics.definitions import DEFAULT, DEFINITIONS, Definition
from perturbdiff.evaluation.metrics.rank_sums import rank_test
from perturbdiff.evaluation.metrics.sorted_columns import Columns, Sparse

# A relative difference of two mean log1p values below this is what rounding to float32 leaves of two equal means.
NO_CHANGE = 1e-6

__all__ = [
    "Columns",
    "Controls",
    "Differential",
    "Sparse",
    "benjamini_hochberg",
    "fold_change",
    "is_rounding",
]


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
