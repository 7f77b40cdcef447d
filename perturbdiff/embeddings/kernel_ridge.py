"""Kernel ridge regression from frozen vectors to changes of expression, its settings chosen by leaving one out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

WIDTHS = (0.5, 1.0, 2.0, 8.0)
"""Widths of the kernel, as multiples of the median distance of two vectors. The last is as good as a linear kernel."""
PENALTIES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e6)
"""Penalties, as multiples of the mean eigenvalue of the kernel. With the last, every prediction is the mean change."""
LEAST = 3
"""Fewer vectors than this cannot tell a good setting from a bad one."""


@dataclass(frozen=True, eq=False)
class KernelRidge:
    """A fitted regression with a Gaussian kernel and an intercept without penalty.

    Attributes
    ----------
    vectors
        float64 [n, e]: different vectors that it was fitted to.
    weights
        float64 [n, G]: weight of each vector's kernel in the prediction.
    intercept
        float64 [G].
    distance
        Width of the kernel, in the units of the vectors.
    left_out
        float64 [rows, G]: prediction for each row that was given, by the regression without its vector.
    explained
        How much of the squared error of the mean of the other vectors' changes it takes away, when each vector is
        predicted without itself: 0 to 1. Vectors that tell nothing have 0.
    """

    vectors: np.ndarray
    weights: np.ndarray
    intercept: np.ndarray
    distance: float
    left_out: np.ndarray
    explained: float

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Predict the changes of vectors [m, e]: float64 [m, G]."""
        squares = squared_distances(np.asarray(vectors, np.float64), self.vectors)
        return self.intercept + _kernel(squares, self.distance) @ self.weights


def fit(vectors: np.ndarray, changes: np.ndarray) -> KernelRidge:
    """Fit changes to vectors.

    Width and penalty are those with the smallest squared error over vectors and genes when each vector is predicted
    without itself. With fewer than `LEAST` different vectors, every prediction is the mean change.

    Parameters
    ----------
    vectors
        [rows, e], one row for each perturbation. Equal vectors (doses of a drug) count once, with their mean change.
    changes
        [rows, G].
    """
    known, row = np.unique(np.asarray(vectors, np.float64), axis=0, return_inverse=True)
    row = row.reshape(-1)
    sums = np.zeros((len(known), changes.shape[1]))
    np.add.at(sums, row, changes)
    found = _fit(known, sums / np.bincount(row)[:, None])
    return replace(found, left_out=found.left_out[row])


def _fit(vectors: np.ndarray, changes: np.ndarray) -> KernelRidge:
    """Fit the changes of different vectors."""
    number, mean = len(vectors), changes.mean(axis=0)
    centred = changes - mean
    others = mean - centred / max(number - 1, 1)
    if number < LEAST:
        return KernelRidge(vectors, np.zeros_like(changes), mean, 1.0, others, 0.0)
    squares = squared_distances(vectors, vectors)
    scale = float(np.sqrt(np.median(squares[~np.eye(number, dtype=bool)])))
    distance, ridge = _best(squares, scale, centred @ centred.T)
    values, axes = _decompose(squares, distance)
    weights = axes @ ((axes.T @ centred) / (values + ridge)[:, None])
    intercept = mean - _kernel(squares, distance).mean(axis=0) @ weights
    residual = centred - axes @ (values[:, None] * (axes.T @ weights))
    left_out = changes - residual / (1 - _leverage(values, axes, ridge))[:, None]
    error, of_mean = (float(np.sum((changes - found) ** 2)) for found in (left_out, others))
    explained = max(0.0, 1 - error / of_mean) if of_mean > 0 else 0.0
    return KernelRidge(vectors, weights, intercept, distance, left_out, explained)


def _best(squares: np.ndarray, scale: float, gram: np.ndarray) -> tuple[float, float]:
    """Return the width and the penalty with the smallest error, in the units of the vectors and of the kernel."""
    best = (np.inf, scale, 0.0)
    for width in WIDTHS:
        values, axes = _decompose(squares, width * scale)
        for penalty in PENALTIES:
            ridge = penalty * values.mean()
            best = min(best, (_error(gram, values, axes, ridge), width * scale, ridge))
    return best[1:]


def squared_distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the squared distances of vectors [m, e] and [n, e], float64 [m, n]."""
    found = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * one @ other.T
    return np.maximum(found, 0)


def _kernel(squares: np.ndarray, distance: float) -> np.ndarray:
    return np.exp(-squares / (2 * distance**2))


def _decompose(squares: np.ndarray, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors of the kernel matrix, centred in the space of features."""
    kernel = _kernel(squares, distance)
    kernel = kernel - kernel.mean(axis=0) - kernel.mean(axis=1)[:, None] + kernel.mean()
    values, axes = np.linalg.eigh(kernel)
    return np.maximum(values, 0), axes


def _leverage(values: np.ndarray, axes: np.ndarray, ridge: float) -> np.ndarray:
    """Return how much each change takes part in its own prediction, below 1; the intercept has a share of 1 / n."""
    return np.minimum(1 / len(values) + axes**2 @ (values / (values + ridge)), 1 - 1e-9)


def _error(gram: np.ndarray, values: np.ndarray, axes: np.ndarray, ridge: float) -> float:
    """Return the sum of squared errors when each vector is predicted without itself, from the changes' Gram matrix.

    The error of a vector left out is its residual / (1 - leverage). This is exact for a quadratic penalty.
    """
    residuals = axes * (ridge / (values + ridge)) @ axes.T
    squares = np.einsum("ij,jk,ik->i", residuals, gram, residuals, optimize=True)
    return float(np.sum(squares / (1 - _leverage(values, axes, ridge)) ** 2))
