"""Euclidean distances and the energy distance between the rows of arrays, in float64.

Tensors have the same in `perturbdiff.diffusion.losses`.
`perturbdiff.evaluation.metrics.pairwise_distances` has its own, in float32 and fused with the MMD, since scoring a
prediction compares millions of pairs of cells.
"""

from __future__ import annotations

import numpy as np


def distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the distance of each row of ``x`` [n, G] from each row of ``y`` [m, G], float64 [n, m]."""
    x, y = x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    return from_products(x @ y.T, np.einsum("ig,ig->i", x, x), np.einsum("ig,ig->i", y, y))


def from_products(products: np.ndarray, x_squares: np.ndarray, y_squares: np.ndarray) -> np.ndarray:
    """Return the distances of rows of which the scalar products [n, m] and the squared norms [n], [m] are known."""
    squared = x_squares[:, None] + y_squares[None, :]
    squared -= 2.0 * products
    np.maximum(squared, 0.0, out=squared)
    return np.sqrt(squared, out=squared)


def mean_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean distance between the rows of ``x`` [n, G] and ``y`` [m, G]."""
    return float(distances(x, y).mean())


def mean_distance_within(x: np.ndarray) -> float:
    """Return the mean distance between two different rows of ``x`` [n, G]; n ≥ 2."""
    apart = distances(x, x)
    np.fill_diagonal(apart, 0.0)
    return float(apart.sum() / (len(x) * (len(x) - 1)))


def energy_distance(x: np.ndarray, y: np.ndarray, *, within: tuple[float, float] | None = None) -> float:
    """Return 2E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖ without pairs of a row with itself.

    The squared maximum mean discrepancy under the kernel −‖x − y‖ (Sejdinovic et al. 2013, Ann. Statist. 41:2263;
    Székely & Rizzo 2013, J. Stat. Plan. Inference 143:1249; paper, Eq. energy_distance) as a U-statistic: its
    expectation is that of infinitely many rows, whatever n and m, hence 0 for equal distributions, and single
    values can be negative.

    Parameters
    ----------
    x, y
        Cells [n, G] and [m, G], log1p; at least two each.
    within
        `mean_distance_within` of ``x`` and of ``y``, if they are known.

    Returns
    -------
    float
        In the units of the rows.
    """
    within_x, within_y = within or (mean_distance_within(x), mean_distance_within(y))
    return 2.0 * mean_distance(x, y) - within_x - within_y
