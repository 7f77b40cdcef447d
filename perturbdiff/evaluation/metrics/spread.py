"""How much the cells of a perturbation differ gene by gene, and how much sets of its cells differ from one another.

The method takes a condition for a family of distributions: sets of its cells (wells, plates) differ by more than the
draw of their cells. A method that predicts one distribution makes sets that differ by that draw alone. Nothing on sets
here looks at whether the mean is right except where said. Values are log1p; a collection is an array [S, m, G] of S
sets of m cells, all of one condition. `perturbdiff.evaluation.metrics.set_metrics` makes scores of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbdiff.conditions.cell_distances import distances as cell_distances
from perturbdiff.conditions.cell_distances import mean_distance_within
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.runtime.compiled import kernel

_ROUNDING = 1e-12  # a variance below this share of the mean square is what cancellation leaves of none


@dataclass(frozen=True)
class Spread:
    """Variances over cells of M perturbations and G genes, n − 1 in the divisor; NaN for a single cell.

    Attributes
    ----------
    real
        Of the real cells, float64 [M, G].
    predicted_total
        Sum over genes of those of the predicted cells, float64 [M]; 0 for a single cell.
    control
        Of the real controls, float64 [G].
    num_real, num_predicted
        Numbers of cells, int64 [M].
    """

    real: np.ndarray
    predicted_total: np.ndarray
    control: np.ndarray
    num_real: np.ndarray
    num_predicted: np.ndarray

    def paired(self, real: np.ndarray, predicted: np.ndarray) -> Spread:
        """Return the spread of some real perturbations beside that of as many predicted ones."""
        return Spread(
            self.real[real],
            self.predicted_total[predicted],
            self.control,
            self.num_real[real],
            self.num_predicted[predicted],
        )


@kernel
def _squares(values: np.ndarray, starts: np.ndarray, mean: np.ndarray, cells: int, out: np.ndarray) -> None:
    """Fill Σ(x − mean)² of each gene, zeros counted."""
    for gene in range(mean.size):
        centre = mean[gene]
        total = (cells - (starts[gene + 1] - starts[gene])) * centre * centre
        for i in range(starts[gene], starts[gene + 1]):
            total += (values[i] - centre) * (values[i] - centre)
        out[gene] = total


def variances(cells: Columns) -> np.ndarray:
    """Return the variance over cells of each gene, float64 [G], n − 1 in the divisor; NaN for a single cell."""
    out = np.full(len(cells.mean), np.nan)
    if cells.num_cells > 1:
        _squares(cells.values, cells.starts, cells.mean, cells.num_cells, out)
        out /= cells.num_cells - 1
    return out


def weights_of_change(mean: np.ndarray, control: np.ndarray, spread: Spread) -> np.ndarray:
    """Return how surely a perturbation changes each gene, float64 [M, G], each row of sum 1.

    A gene's score is Welch's t between the perturbation's real cells and those of all others. The variance of the
    others' mean is taken as if they were as few as the perturbation's cells (scanpy's ``t-test_overestim_var``).
    With a single perturbation, the controls are the others. The weights are the absolute scores, scaled to 0 … 1
    over genes and squared.

    Parameters
    ----------
    mean
        Real mean log1p values, float64 [M, G].
    control
        Mean of the controls, float64 [G].

    Returns
    -------
    ndarray
        Equal weights where all absolute scores are equal; NaN where they are all 0, for a perturbation of a single
        cell, and if the others are a single cell.
    """
    n = spread.num_real.astype(np.float64)
    total, squares = np.zeros(mean.shape[1]), np.zeros(mean.shape[1])
    for count, centre, variance in zip(n, mean, spread.real, strict=True):
        total += count * centre
        squares += _square_sum(count, centre, variance)
    weights = np.empty(mean.shape)
    for i, (count, centre, variance) in enumerate(zip(n, mean, spread.real, strict=True)):
        rest = n.sum() - count
        others, varied = control, spread.control
        if len(mean) > 1:
            others = (total - count * centre) / rest
            varied = _variance(rest, others, (squares - _square_sum(count, centre, variance)) / rest)
        error = np.sqrt((variance + varied) / count)
        score = np.divide(centre - others, error, out=np.zeros_like(error), where=error > 0)
        weights[i] = np.nan if np.isnan(error).any() else gene_weights(score)
    return weights


def _square_sum(count: float, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return count * mean**2 + ((count - 1) * variance if count > 1 else 0.0)


def _variance(count: float, mean: np.ndarray, mean_square: np.ndarray) -> np.ndarray:
    """Return the variance, n − 1 in the divisor, from the mean of the squares."""
    left = mean_square - mean**2
    left = np.where(left > _ROUNDING * mean_square, left, 0.0)
    return left * count / (count - 1) if count > 1 else np.full(len(mean), np.nan)


def gene_weights(scores: np.ndarray) -> np.ndarray:
    """Return weights of sum 1, float64 [G]: absolute scores, scaled to 0 … 1, squared; NaN where all are 0."""
    size = np.abs(scores)
    low, high = size.min(), size.max()
    if not high > 0:
        return np.full(len(size), np.nan)
    scaled = ((size - low) / (high - low)) ** 2 if high > low else np.ones(len(size))
    return scaled / scaled.sum()


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
