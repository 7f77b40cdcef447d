"""How large predicted changes are beside the true ones."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from perturbdiff.io.matrices import Sparse

TOP = 50  # genes that change most
AGREE = 0.5  # least cosine of the halves' changes: below it, chance decides
Halves = tuple[np.ndarray, np.ndarray]
"""Mean log1p values of two halves of the real cells of a condition, float64 [G] each."""


def mean_of(cells: Sparse) -> np.ndarray:
    """Return the mean of each gene, float64 [G]; NaN without cells."""
    total = np.asarray(sp.csr_matrix(cells).sum(axis=0, dtype=np.float64)).ravel()
    return total / cells.shape[0] if cells.shape[0] else np.full(cells.shape[1], np.nan)


def halves_of(cells: Sparse, *, seed: int) -> Halves:
    """Return the means of two random halves of cells [n, G]."""
    order, cells = np.random.default_rng(seed).permutation(cells.shape[0]), sp.csr_matrix(cells)
    return mean_of(cells[order[::2]]), mean_of(cells[order[1::2]])


def sums_of(predicted: np.ndarray, halves: Halves, control: np.ndarray) -> tuple[float, float, float]:
    """Return Σ δ₁ p and Σ δ₁ δ₂ over the genes that change most, and the cosine of δ₁ and δ₂ there.

    δ₁ and δ₂ are the changes of the halves and p is the predicted change, all from ``control`` [G]. Each half in turn
    is the first, which chooses the genes. Its noise is not in p and not in the other half, so that neither the
    choice nor the noise changes the ratio of the sums: a prediction of s times the true change has the ratio s.
    """
    p, changes = predicted - control, [half - control for half in halves]
    above, below, lengths = 0.0, 0.0, 0.0
    for first, second in (changes, changes[::-1]):
        top = np.argsort(-np.abs(first), kind="stable")[:TOP]
        above += float(first[top] @ p[top])
        below += float(first[top] @ second[top])
        lengths += float(np.linalg.norm(first[top]) * np.linalg.norm(second[top]))
    return above, below, below / lengths if lengths > 0 else 0.0


def effect_slope(predicted: np.ndarray, real: Sparse, control: np.ndarray, *, seed: int = 0) -> float:
    """Return the slope of predicted on true change over the genes that change most.

    Parameters
    ----------
    predicted, control
        Mean log1p values of the predicted and of the control cells, float64 [G].
    real
        Cells of one condition, sparse log1p [n, G].
    seed
        Of the halves.

    Returns
    -------
    float
        1: changes of the right size. NaN with fewer than four real cells, without predicted cells, or if the changes
        of the halves hardly agree.
    """
    if real.shape[0] < 4:
        return float("nan")
    above, below, cosine = sums_of(predicted, halves_of(real, seed=seed), control)
    return above / below if cosine > AGREE else float("nan")
