"""Energy distance between samples of cells, and intervals for its mean over pairs of groups."""

from __future__ import annotations

import numpy as np

DRAWS = 2000
"""Bootstrap draws of an interval."""


def mean_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean Euclidean distance between the rows of ``x`` [n, G] and ``y`` [m, G].

    Computed in float64 through |x|² + |y|² − 2 x·y.
    """
    return float(_distances(x, y).mean())


def mean_distance_within(x: np.ndarray) -> float:
    """Return the mean distance between two different rows of ``x`` [n, G]; n ≥ 2."""
    distances = _distances(x, x)
    np.fill_diagonal(distances, 0.0)
    return float(distances.sum() / (len(x) * (len(x) - 1)))


def energy_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return 2E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖ without pairs of a cell with itself.

    The squared maximum mean discrepancy under the kernel −‖x − y‖ (Sejdinovic et al. 2013, Ann. Statist. 41:2263;
    Székely & Rizzo 2013, J. Stat. Plan. Inference 143:1249; paper, Eq. energy_distance) as a U-statistic: its
    expectation is that of infinitely many cells, whatever n and m, hence 0 for equal distributions, and single
    values can be negative.

    Parameters
    ----------
    x, y
        Cells [n, G] and [m, G], log1p; at least two each.

    Returns
    -------
    float
        In log1p units.
    """
    return 2.0 * mean_distance(x, y) - mean_distance_within(x) - mean_distance_within(y)


def _distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    squared = np.einsum("ig,ig->i", x, x)[:, None] + np.einsum("ig,ig->i", y, y)[None, :]
    squared -= 2.0 * (x @ y.T)
    np.maximum(squared, 0.0, out=squared)
    return np.sqrt(squared, out=squared)


def interval(
    values: np.ndarray, first: np.ndarray, second: np.ndarray, *, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Return a percentile bootstrap interval of the mean of values that belong to pairs of labels.

    Pairs that share a label are not independent. Labels are therefore drawn with replacement, not pairs, and a
    pair counts as often as the product of the times that its two labels were drawn (Davezies et al. 2021, Ann.
    Statist. 49:845); a pair of a label with itself as often as the label.

    Parameters
    ----------
    values
        [n].
    first, second
        Labels of the two sides, [n] each; equal where a group is compared with itself or with a reference.

    Returns
    -------
    tuple
        (nan, nan) for fewer than three labels.
    """
    labels, place = np.unique(np.concatenate([first, second]), return_inverse=True)
    if len(labels) < 3:
        return float("nan"), float("nan")
    a, b = place[: len(first)], place[len(first) :]
    rng = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    for draw in range(DRAWS):
        times = np.bincount(rng.integers(0, len(labels), len(labels)), minlength=len(labels))
        weight = np.where(a == b, times[a], times[a] * times[b])
        total = weight.sum()
        means[draw] = weight @ values / total if total else np.nan
    tail = 50.0 * (1.0 - level)
    low, high = np.nanpercentile(means, (tail, 100.0 - tail))
    return float(low), float(high)
