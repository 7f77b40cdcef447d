"""What is specific to a perturbation: errors weighted by change, changes from the other perturbations, directions.

Each metric is a pure function over arrays, as in `profile_metrics`. M perturbations, G genes; ``real`` and
``predicted`` are float64 [M, G] in the same order unless said otherwise. A function returns one float64 per
perturbation, NaN where the metric is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbdiff.evaluation.metrics.differential import Differential, is_rounding
from perturbdiff.evaluation.metrics.spread import Spread

PURITY = 0.9  # share of right signs that a prefix of the ranking must keep


def weighted_error(real: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return Σ w (m̂ − m)² over genes, with weights of sum 1."""
    return (weights * (predicted - real) ** 2).sum(axis=1)


def weighted_r_squared(
    real: np.ndarray, predicted: np.ndarray, reference: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return 1 − Σ w (m − m̂)² / Σ w (δ − Σ w δ)², δ = m − ``reference``; NaN where all weighted δ are equal."""
    delta = np.where(is_rounding(real, reference), 0.0, real - reference)
    total = (weights * (delta - (weights * delta).sum(axis=1, keepdims=True)) ** 2).sum(axis=1)
    error = weighted_error(real, predicted, weights)
    share = np.divide(error, total, out=np.full(len(real), np.nan), where=total > 0)
    return 1.0 - share


def pearson_from(real: np.ndarray, predicted: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Pearson correlation over genes of the real and the predicted difference from ``reference`` [M, G].

    0 where only the predicted difference is the same for all genes: a prediction of the reference itself has told
    nothing, and is no better off than one that was tried. NaN where the real one is.
    """
    x, y = (np.where(is_rounding(side, reference), 0.0, side - reference) for side in (real, predicted))
    x = x - x.mean(axis=1, keepdims=True)
    y = y - y.mean(axis=1, keepdims=True)
    own, guessed = (x * x).sum(axis=1), (y * y).sum(axis=1)
    lengths = np.sqrt(own * guessed)
    empty = np.where(own > 0, 0.0, np.nan)
    return np.divide((x * y).sum(axis=1), lengths, out=empty, where=lengths > 0)


def centroid_accuracy(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Share of the other real mean profiles that are farther from the predicted one than the own; Euclidean.

    Another profile at the same distance counts half. NaN for a single perturbation.
    """
    num = len(real)
    if num < 2:
        return np.full(num, np.nan)
    scores = np.empty(num)
    for i, guess in enumerate(predicted):
        distances = ((real - guess) ** 2).sum(axis=1)
        own = distances[i]
        scores[i] = (distances > own).sum() + 0.5 * ((distances == own).sum() - 1)
    return scores / (num - 1)


def unbiased_error(real: np.ndarray, predicted: np.ndarray, spread: Spread) -> np.ndarray:
    """Mean over genes of the squared difference of means, less what the sampling of cells adds to it.

    Subtracted is the variance of the real mean, Σ s² / n, and that of the predicted mean, but of the latter at most
    as much as of the former, so that a prediction cannot earn by spreading its cells. NaN for a single real cell.
    """
    own = spread.real.sum(axis=1) / spread.num_real
    guessed = spread.predicted_total / np.maximum(spread.num_predicted, 1)
    squared = ((predicted - real) ** 2).sum(axis=1)
    return (squared - own - np.minimum(guessed, own)) / real.shape[1]


def direction_precision(real: Differential, predicted: Differential) -> np.ndarray:
    """Share of the predicted DE genes whose predicted sign is the real one, whether or not the real change is DE.

    Genes without any real change are left out; a DE gene without a predicted sign is a miss. 0 without a predicted
    DE gene; NaN if no gene has a real change.
    """
    decided = real.log2_fold != 0
    asked = predicted.significant & decided
    right = (np.sign(real.log2_fold) == np.sign(predicted.log2_fold)) & asked
    share = right.sum(axis=1) / np.maximum(asked.sum(axis=1), 1)
    return np.where(decided.any(axis=1), share, np.nan)


def direction_reach(
    real: Differential, predicted: Differential, genes: Sequence[str], left_out: np.ndarray | None = None
) -> np.ndarray:
    """How deep the prediction's ranking of the real DE genes keeps the right signs, as a share of these genes.

    The real DE genes are ranked by predicted q, then p, then falling |log2 fold change|, then name. The reach is the
    length of the longest beginning of that ranking in which at least 90 % of the signs are right; genes without a
    real sign do not count. NaN without a real DE gene.

    Parameters
    ----------
    genes
        Names of the columns.
    left_out
        Genes that do not count, bool [M, G]: those that a perturbation targets.
    """
    names = np.argsort(np.argsort(np.asarray(genes), kind="stable"))
    reach = np.full(len(real.p), np.nan)
    for i, significant in enumerate(real.significant):
        chosen = np.flatnonzero(significant if left_out is None else significant & ~left_out[i])
        if not chosen.size:
            continue
        fold = predicted.log2_fold[i, chosen]
        order = np.lexsort((names[chosen], -np.abs(fold), predicted.p[i, chosen], predicted.q[i, chosen]))
        truth = np.sign(real.log2_fold[i, chosen])[order]
        right = (np.sign(fold)[order] == truth)[truth != 0]
        depth = np.arange(1, len(right) + 1)
        pure = np.flatnonzero(np.cumsum(right) / depth >= PURITY)
        reach[i] = (pure[-1] + 1) / len(chosen) if pure.size else 0.0
    return reach
