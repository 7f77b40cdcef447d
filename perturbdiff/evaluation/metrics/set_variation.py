"""Whether sets of cells differ from one another, and whether two collections of sets differ alike.

The method takes a condition for a family of distributions: sets of its cells (wells, plates) differ by more than the
draw of their cells. A method that predicts one distribution makes sets that differ by that draw alone. Nothing here
looks at whether the mean is right except where said. Values are log1p; a collection is an array [S, m, G] of S sets
of m cells, all of one condition. `perturbdiff.evaluation.metrics.set_metrics` makes scores of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbdiff.conditions.cell_distances import distances as cell_distances
from perturbdiff.conditions.cell_distances import mean_distance_within

Floats = NDArray[np.float64]


def between_variance(sets: NDArray[np.floating]) -> Floats:
    """Return the variance component between sets of each gene, float64 [G], squared log1p units.

    The estimator of the one-way analysis of variance with sets of equal size, (MSB − MSW) / m (Searle, Casella and
    McCulloch 1992, *Variance Components*, 3.5). It is unbiased for the covariance of two different cells of a set,
    whatever the distribution, as long as the cells of a set are exchangeable and sets are independent: 0 if cells
    are drawn from one distribution, negative if the cells of a set balance one another.

    Raises
    ------
    ValueError
        With fewer than two sets or fewer than two cells in a set.
    """
    _check(sets)
    values = np.asarray(sets, np.float64)
    return values.mean(axis=1).var(axis=0, ddof=1) - within_variance(sets) / values.shape[1]


def within_variance(sets: NDArray[np.floating]) -> Floats:
    """Return the variance of cells within their sets (MSW) of each gene, float64 [G]."""
    _check(sets)
    values = np.asarray(sets, np.float64)
    return values.var(axis=1, ddof=1).mean(axis=0)


def between_covariance(sets: NDArray[np.floating]) -> Floats:
    """Return the same component as `between_variance` for pairs of genes, float64 [G, G]."""
    _check(sets)
    values = np.asarray(sets, np.float64)
    num, size, genes = values.shape
    means = values.mean(axis=1)
    cells = (values - means[:, None]).reshape(num * size, genes)
    off = means - means.mean(axis=0)
    return off.T @ off / (num - 1) - cells.T @ cells / (num * (size - 1) * size)


def leading_axis(sets: NDArray[np.floating]) -> Floats:
    """Return the direction in which sets differ most beyond the draw of their cells, a unit vector float64 [G].

    Of the directions that the means of the sets span, so that it is found in S dimensions whatever the number of
    genes. Chosen to be large on these sets: measure other sets along it.
    """
    _check(sets)
    means = np.asarray(sets, np.float64).mean(axis=1)
    _, _, span = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
    _, vectors = np.linalg.eigh(between_covariance(np.asarray(sets) @ span.T))
    return vectors[:, -1] @ span


def within_range(values: NDArray[np.floating], others: NDArray[np.floating], *, level: float = 0.9) -> float:
    """Return the share of ``values`` [n] strictly between the k-th least and the k-th largest of ``others`` [S].

    k is the largest number for which at least the share ``level`` is expected of values like the others, at least 1:
    of up to 38 others, the range is that of the least and the largest.
    """
    if 2 * (cut := _cut(len(others), level)) > len(others):
        return 0.0
    ordered = np.sort(others)
    return float(np.mean((values > ordered[cut - 1]) & (values < ordered[-cut])))


def alike_range(num_others: int, *, level: float = 0.9) -> float:
    """Return what `within_range` expects if all come from one continuous distribution, (S + 1 − 2k) / (S + 1)."""
    return max(0.0, (num_others + 1 - 2 * _cut(num_others, level)) / (num_others + 1))


def _cut(num_others: int, level: float) -> int:
    """Return the place, from either end, of the others that bound the range."""
    return max(1, int((1.0 - level) * (num_others + 1) / 2 + 1e-9))


def distances(sets: NDArray[np.floating], others: NDArray[np.floating]) -> Floats:
    """Return the energy distance of each of ``sets`` [n, m, G] from each of ``others`` [S, m', G], float64 [n, S].

    2E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖ without self-pairs: expected 0 for two sets of one distribution.
    """
    centre = np.mean(others, axis=(0, 1), dtype=np.float64)
    sets, others = sets - centre, others - centre
    flat = others.reshape(-1, others.shape[2])
    found = np.empty((len(sets), len(others)))
    for i, cells in enumerate(sets):
        found[i] = cell_distances(cells, flat).reshape(-1, *others.shape[:2]).mean(axis=(0, 2))
    return 2.0 * found - _spread(sets)[:, None] - _spread(others)


def within_cloud(across: Floats, others: Floats, *, level: float = 0.9) -> float:
    """Return the share of sets that lie within the cloud of the others.

    A set joins the S others; each of the S + 1 has its mean distance from the rest, and the set lies within if it is
    among the ⌊level (S + 1)⌋ nearest. The rule is that of conformal prediction: if the set and the others are alike,
    the expected share is `alike_cloud`, whatever the distributions.

    Parameters
    ----------
    across
        float64 [n, S]: distances of the sets from the others (`distances`).
    others
        float64 [S, S]: distances of the others from one another; the diagonal is not looked at.
    level
        Share of the S + 1 that count as within, at most.
    """
    num = across.shape[1]
    kept = _kept(num, level)
    total = others.sum(axis=1) - np.diagonal(others)
    score = across.sum(axis=1)
    farther = (total + across > score[:, None]).sum(axis=1)
    return float(np.mean(farther >= num + 1 - kept))


def alike_cloud(num_others: int, *, level: float = 0.9) -> float:
    """Return what `within_cloud` expects of sets that are distributed like the S others."""
    return _kept(num_others, level) / (num_others + 1)


def _kept(num_others: int, level: float) -> int:
    return int(level * (num_others + 1) + 1e-9)


def _spread(sets: Floats) -> Floats:
    """Return the mean distance of two different cells of each set, float64 [n]."""
    return np.array([mean_distance_within(cells) for cells in sets])


def _check(sets: NDArray[np.floating]) -> None:
    if sets.ndim != 3 or sets.shape[0] < 2 or sets.shape[1] < 2:
        raise ValueError(f"at least two sets of at least two cells are needed, [S, m, G], got {sets.shape}")
