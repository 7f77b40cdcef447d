"""What is specific to a perturbation: errors weighted by change, changes from the other perturbations, directions.

Each metric is a pure function over arrays, as in `profile_metrics`. M perturbations, G genes; ``real`` and
``predicted`` are float64 [M, G] in the same order unless said otherwise. A function returns one float64 per
perturbation, NaN where the metric is not defined. `EFFECT` holds their entries for `catalogue.METRICS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbdiff.evaluation.metrics.differential import Differential, is_rounding
from perturbdiff.evaluation.metrics.profile_metrics import Comparison, Metric
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


_INF = float("inf")
_WEIGHTS = (
    "w from the real cells: |t| of a gene between the perturbation's cells and those of all other perturbations (the "
    "controls if there are none), scaled over genes to 0 … 1, squared, and divided by its sum"
)
_NEEDLES = "Mejia et al. 2026, Needles in the Haystack (ICML; arXiv 2506.22641)"
_SYSTEMA = "Viñas Torné et al. 2025, Systema (Nature Biotechnology; doi 10.1038/s41587-025-02777-8)"


def _unbiased(comparison: Comparison) -> np.ndarray:
    if comparison.spread is None:
        return np.full(len(comparison.perturbations), np.nan)
    return unbiased_error(comparison.real.mean, comparison.predicted.mean, comparison.spread)


def _weighted_r_squared(comparison: Comparison) -> np.ndarray:
    panel = comparison.panel
    real, predicted = comparison.real.mean, comparison.predicted.mean
    return weighted_r_squared(real, predicted, panel.mean, panel.weights)


def _from_others(comparison: Comparison) -> np.ndarray:
    real, predicted, panel = comparison.real.mean, comparison.predicted.mean, comparison.panel
    if panel.num < 2:
        return np.full(len(real), np.nan)
    return pearson_from(real, predicted, panel.without(real))


EFFECT = (
    Metric(
        "MSE_unbiased",
        "MSE, unbiased",
        "",
        "effect",
        "MSE less Σ s²/n over genes / G, for the real and for the predicted cells, with s² the variance over n cells; "
        "for the predicted cells at most as much as for the real ones. 0 is expected of a perfect prediction, so that "
        "it can be slightly negative",
        "lower",
        -_INF,
        _INF,
        "NaN with a single real cell",
        compute=_unbiased,
        source="after cell-eval2 (expr_mse_unbiased_capped)",
    ),
    Metric(
        "WMSE",
        "WMSE",
        "",
        "effect",
        f"Σ w (m̂ − m)² over genes; {_WEIGHTS}",
        "lower",
        0.0,
        _INF,
        "NaN with a single real cell or if no gene differs",
        compute=lambda c: weighted_error(c.real.mean, c.predicted.mean, c.panel.weights),
        source=_NEEDLES,
        coupled=True,
    ),
    Metric(
        "R2_weighted",
        "R² of changes, weighted",
        "",
        "effect",
        "1 − Σ w (m̂ − m)² / Σ w (d − Σ w d)² over genes; d is the difference of m from the mean profile of all "
        "perturbations (of the controls if there is one), w as in WMSE",
        "higher",
        -_INF,
        1.0,
        "NaN with a single real cell or if no gene differs",
        compute=_weighted_r_squared,
        source=_NEEDLES,
        coupled=True,
    ),
    Metric(
        "PDCorr_perturbed",
        "PDCorr from other perturbations",
        "",
        "effect",
        "Pearson correlation over genes of the real and the predicted difference from the mean profile of all other "
        "perturbations; 0 if the predicted difference is the same for all genes",
        "higher",
        -1.0,
        1.0,
        "n/a for a single perturbation; NaN if the real difference is the same for all genes",
        compute=_from_others,
        source=_SYSTEMA,
        coupled=True,
    ),
    Metric(
        "centroid_accuracy",
        "Centroid accuracy",
        "",
        "effect",
        "share of the other real mean profiles that are farther from the predicted one than the own, by Euclidean "
        "distance; another at the same distance counts half",
        "higher",
        0.0,
        1.0,
        "n/a for a single perturbation",
        compute=lambda c: centroid_accuracy(c.real.mean, c.predicted.mean),
        chance="0.5",
        source=_SYSTEMA,
        coupled=True,
    ),
    Metric(
        "DirPrec",
        "Direction precision",
        "",
        "effect",
        "share of the predicted DE genes, those without any real change left out, whose predicted sign is the real "
        "one, whether or not the real change is significant; 0 without a predicted DE gene",
        "higher",
        0.0,
        1.0,
        "NaN if no gene has a real change",
        compute=lambda c: direction_precision(c.real, c.predicted),
        source="cell-eval2 (direction_precision)",
        uses_q=True,
    ),
    Metric(
        "DirReach",
        "Direction reach",
        "",
        "effect",
        "length of the longest beginning of the real DE genes, ranked by predicted q, p and |log2 fold change|, in "
        "which at least 90 % of the predicted signs are right, over their number; the perturbation's own "
        "target genes are left out",
        "higher",
        0.0,
        1.0,
        "absent without a real DE gene; NaN if there are only its own target genes",
        needs_real_de=True,
        compute=lambda c: direction_reach(c.real, c.predicted, c.genes, c.own_genes),
        source="cell-eval2 (direction_reach_raw)",
        uses_q=True,
    ),
)
