"""The catalogue of metrics: name, meaning, direction and range of everything that `evaluate` writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from perturbdiff.evaluation import metrics as m
from perturbdiff.evaluation.metrics import Comparison, Metric

_INF = float("inf")


def _discriminate(comparison: Comparison, distance: m.Distance) -> np.ndarray:
    real, predicted = comparison.real.delta, comparison.predicted.delta
    return m.discrimination(real, predicted, comparison.perturbations, comparison.genes, distance=distance)


def _discrimination(name: str, distance: m.Distance, words: str) -> Metric:
    return Metric(
        name,
        name.replace("_", " "),
        f"discrimination_score_{distance}",
        "expression",
        f"1 − rank / M of the true change among all M real changes by {words} to the predicted change; "
        "the gene the perturbation is named after is left out; 0.5 + 1/(2M) by chance",
        "higher",
        0.0,
        1.0,
        "n/a for a single perturbation",
        compute=partial(_discriminate, distance=distance),
    )


_EXPRESSION = (
    Metric(
        "R2",
        "R²",
        "",
        "expression",
        "1 − squared error of the mean profile / its variance over genes (of means, not of changes)",
        "higher",
        -_INF,
        1.0,
        compute=lambda c: m.r_squared(c.real.mean, c.predicted.mean),
    ),
    Metric(
        "PDCorr",
        "PDCorr",
        "pearson_delta",
        "expression",
        "Pearson correlation over genes of real and predicted mean change from control",
        "higher",
        -1.0,
        1.0,
        "NaN if a change is the same for all genes, e.g. a prediction equal to the control mean",
        compute=lambda c: m.pearson_delta(c.real.delta, c.predicted.delta),
    ),
    Metric(
        "MSE",
        "MSE",
        "mse",
        "expression",
        "mean over genes of the squared difference of mean log1p values",
        "lower",
        0.0,
        _INF,
        compute=lambda c: m.mean_squared_error(c.real.mean, c.predicted.mean),
    ),
    Metric(
        "MAE",
        "MAE",
        "mae",
        "expression",
        "mean over genes of the absolute difference of mean log1p values",
        "lower",
        0.0,
        _INF,
        compute=lambda c: m.mean_absolute_error(c.real.mean, c.predicted.mean),
    ),
    _discrimination("PDS_L1", "l1", "L1 distance"),
    _discrimination("PDS_L2", "l2", "Euclidean distance"),
    _discrimination("PDS_cos", "cosine", "cosine distance"),
)

_DE = (
    Metric(
        "DEOver",
        "DEOver",
        "overlap_at_N",
        "de",
        "share of the real DE genes, ranked by |log2 fold change|, among as many top predicted DE genes",
        "higher",
        0.0,
        1.0,
        "never; 0 without a real DE gene",
        compute=lambda c: m.top_overlap(c.real, c.predicted, size="real"),
    ),
    Metric(
        "DEPrec",
        "DEPrec",
        "precision_at_N",
        "de",
        "share of the predicted DE genes, ranked by |log2 fold change|, among as many top real DE genes",
        "higher",
        0.0,
        1.0,
        "never; 0 without a predicted DE gene",
        compute=lambda c: m.top_overlap(c.real, c.predicted, size="predicted"),
    ),
    Metric(
        "DirAgr",
        "DirAgr",
        "de_direction_match",
        "de",
        "share of the real DE genes whose predicted change has the true sign",
        "higher",
        0.0,
        1.0,
        "absent without a real DE gene",
        needs_real_de=True,
        compute=lambda c: m.direction_agreement(c.real, c.predicted),
    ),
    Metric(
        "LFCSpear",
        "LFCSpear",
        "de_spearman_lfc_sig",
        "de",
        "Spearman correlation of real and predicted fold changes over the real DE genes",
        "higher",
        -1.0,
        1.0,
        "absent without a real DE gene; NaN with one, or if one side is constant",
        needs_real_de=True,
        compute=lambda c: m.fold_change_spearman(c.real, c.predicted),
    ),
    Metric(
        "AUROC",
        "AUROC",
        "roc_auc",
        "de",
        "area under the ROC curve of −log10 predicted q for being a real DE gene; a q of 0 scores 10",
        "higher",
        0.0,
        1.0,
        "NaN if no gene or every gene is a real DE gene",
        compute=lambda c: m.area_under_roc(c.real, c.predicted),
    ),
    Metric(
        "AUPRC",
        "AUPRC",
        "pr_auc",
        "de",
        "average precision of −log10 predicted q for being a real DE gene; a q of 0 scores 10",
        "higher",
        0.0,
        1.0,
        "NaN if no gene or every gene is a real DE gene",
        compute=lambda c: m.average_precision(c.real, c.predicted),
    ),
    Metric(
        "ES",
        "ES",
        "de_spearman_sig",
        "de",
        "Spearman correlation over perturbations of the numbers of real and predicted DE genes; "
        "perturbations without a real DE gene are left out",
        "higher",
        -1.0,
        1.0,
        "n/a with fewer than two perturbations that have a real DE gene; NaN if a side is constant",
        per_perturbation=False,
        compute=lambda c: m.effect_size_spearman(c.real, c.predicted),
    ),
    Metric(
        "n_DE_real",
        "DE genes, real",
        "de_nsig_counts_real",
        "count",
        "genes with q < alpha, real cells against real controls",
        "none",
        0.0,
        _INF,
        compute=lambda c: c.real.significant.sum(axis=1).astype(np.float64),
    ),
    Metric(
        "n_DE_pred",
        "DE genes, predicted",
        "de_nsig_counts_pred",
        "count",
        "genes with q < alpha, predicted cells against real controls",
        "none",
        0.0,
        _INF,
        compute=lambda c: c.predicted.significant.sum(axis=1).astype(np.float64),
    ),
)

_DISTRIBUTION = (
    Metric(
        "energy_distance",
        "Energy distance",
        "",
        "distribution",
        "2E|x − y| − E|x − x'| − E|y − y'| between predicted and real cells of a condition, self-pairs left out; "
        "an unbiased estimate, so that it can be slightly negative",
        "lower",
        -_INF,
        _INF,
        "NaN with fewer than two cells on a side",
    ),
    Metric(
        "nonzero_ratio",
        "Non-zero values",
        "",
        "distribution",
        "share of non-zero values, predicted over real",
        "one",
        0.0,
        _INF,
        "NaN if all real values are zero",
    ),
    Metric(
        "gene_sd_ratio",
        "SD of genes",
        "",
        "distribution",
        "SD over cells of each gene, predicted over real; median over genes in more than 5 % of the real cells",
        "one",
        0.0,
        _INF,
        "NaN with fewer than two cells on a side or without such a gene",
    ),
    Metric(
        "cell_sd_ratio",
        "SD between cells",
        "",
        "distribution",
        "SD over cells of a cell's mean value, predicted over real",
        "one",
        0.0,
        _INF,
        "NaN with fewer than two cells on a side or equal real cells",
    ),
    Metric(
        "correlation_agreement",
        "Gene–gene correlations",
        "",
        "distribution",
        "Pearson correlation of the gene–gene correlations of predicted and real cells, over pairs of the 60 "
        "genes with the highest real mean; constant genes correlate 0",
        "higher",
        -1.0,
        1.0,
        "NaN with fewer than three cells on a side or constant correlations",
    ),
    Metric(
        "max_value",
        "Largest value",
        "",
        "distribution",
        "largest predicted log1p value",
        "none",
        0.0,
        _INF,
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*_EXPRESSION, *_DE, *_DISTRIBUTION)}
PAPER = tuple(n for n, metric in METRICS.items() if metric.family in ("expression", "de"))


def score(comparison: Comparison, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return values of the named metrics (none: all but those of the distribution) of a comparison.

    A metric's value does not depend on which others are asked for.

    Raises
    ------
    ValueError
        If a name is not one of `METRICS` or is scored on the cells of a condition.
    """
    computed = {n: metric.compute for n, metric in METRICS.items() if metric.compute is not None}
    chosen = list(computed) if names is None else list(names)
    if unknown := [n for n in chosen if n not in computed]:
        raise ValueError(f"no metric of pseudobulks or DE genes: {', '.join(unknown)}")
    return {name: computed[name](comparison) for name in chosen}
