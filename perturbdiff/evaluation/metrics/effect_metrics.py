"""The metrics of what is specific to a perturbation, one entry each: what `catalogue.METRICS` says of them."""

from __future__ import annotations

import numpy as np

from perturbdiff.evaluation.metrics import effects
from perturbdiff.evaluation.metrics.profile_metrics import Comparison, Metric

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
    return effects.unbiased_error(comparison.real.mean, comparison.predicted.mean, comparison.spread)


def _weighted_r_squared(comparison: Comparison) -> np.ndarray:
    panel = comparison.panel
    real, predicted = comparison.real.mean, comparison.predicted.mean
    return effects.weighted_r_squared(real, predicted, panel.mean, panel.weights)


def _from_others(comparison: Comparison) -> np.ndarray:
    real, predicted, panel = comparison.real.mean, comparison.predicted.mean, comparison.panel
    if panel.num < 2:
        return np.full(len(real), np.nan)
    return effects.pearson_from(real, predicted, panel.without(real))


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
        compute=lambda c: effects.weighted_error(c.real.mean, c.predicted.mean, c.panel.weights),
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
        compute=lambda c: effects.centroid_accuracy(c.real.mean, c.predicted.mean),
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
        compute=lambda c: effects.direction_precision(c.real, c.predicted),
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
        compute=lambda c: effects.direction_reach(c.real, c.predicted, c.genes, c.own_genes),
        source="cell-eval2 (direction_reach_raw)",
        uses_q=True,
    ),
)
