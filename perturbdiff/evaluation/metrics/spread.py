"""How much the cells of a perturbation differ, gene by gene, and which genes a perturbation changes for sure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
