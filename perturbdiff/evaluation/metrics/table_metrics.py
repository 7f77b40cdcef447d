"""The metrics of mean profiles and of DE genes, one entry each: what `catalogue.METRICS` says of them."""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np

from perturbdiff.evaluation.metrics import profile_metrics as m
from perturbdiff.evaluation.metrics.profile_metrics import Comparison, Metric

_INF = float("inf")
_WITHOUT_DE = "absent without a real DE gene"
_ONE_LABEL = "NaN if no gene or every gene is a real DE gene"
TOP = (50, 100, 200, 500)  # the limits of k that cell-eval reports


def _discriminate(comparison: Comparison, distance: m.Distance) -> np.ndarray:
    real, predicted = comparison.real.delta, comparison.predicted.delta
    if comparison.definition.left_out == "panel":
        return m.panel_discrimination(real, predicted, comparison.target_genes, distance=distance)
    return m.discrimination(real, predicted, comparison.perturbations, comparison.genes, distance=distance)


def _discrimination(name: str, distance: m.Distance, words: str) -> Metric:
    return Metric(
        name,
        name.replace("_", " "),
        f"discrimination_score_{distance}",
        "expression",
        f"1 − k / (M − 1), k the number of the M real changes closer by {words} to the predicted change than the true "
        "one is, equally close ones counting half; target genes of all perturbations are left out. In the definitions "
        "of cell-eval 1 − rank / M without the own gene only, which predictions can exploit",
        "higher",
        0.0,
        1.0,
        "n/a for a single perturbation",
        compute=partial(_discriminate, distance=distance),
        chance="0.5; 0.5 + 1/(2M) in the definitions of cell-eval",
        coupled=True,
    )


def _overlap(
    comparison: Comparison, size: Literal["real", "predicted"], most: int | None = None
) -> np.ndarray:
    return m.top_overlap(*comparison.ranks, size=size, most=most)


def _with_enough(comparison: Comparison, size: Literal["real", "predicted"]) -> np.ndarray:
    return np.where(comparison.num_real < comparison.min_de, np.nan, _overlap(comparison, size))


def _further_overlap(column: str, size: Literal["real", "predicted"], most: int) -> Metric:
    return Metric(
        column,
        column.replace("_", " "),
        column,
        "further",
        f"{'DEOver' if size == 'real' else 'DEPrec'} of at most the top {most} genes",
        "higher",
        0.0,
        1.0,
        f"never; 0 without a {size} DE gene",
        compute=partial(_overlap, size=size, most=most),
        uses_q=True,
    )


EXPRESSION = (
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
        source="CellFlow",
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

DE = (
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
        compute=partial(_overlap, size="real"),
        uses_q=True,
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
        compute=partial(_overlap, size="predicted"),
        uses_q=True,
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
        _WITHOUT_DE,
        needs_real_de=True,
        compute=lambda c: m.direction_agreement(c.real, c.predicted),
        uses_q=True,
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
        f"{_WITHOUT_DE}; NaN with one, or if one side is constant",
        needs_real_de=True,
        compute=lambda c: m.fold_change_spearman(c.real, c.predicted, c.definition),
        uses_q=True,
    ),
    Metric(
        "AUROC",
        "AUROC",
        "roc_auc",
        "de",
        "area under the ROC curve of −log10 predicted q for being a real DE gene; "
        "a q of 0 (in 0.8.2 all below 1e-10) scores 10",
        "higher",
        0.0,
        1.0,
        _ONE_LABEL,
        compute=lambda c: c.areas[:, 0],
        chance="0.5",
        uses_q=True,
    ),
    Metric(
        "AUPRC",
        "AUPRC",
        "pr_auc",
        "de",
        "average precision of −log10 predicted q for being a real DE gene; "
        "a q of 0 (in 0.8.2 all below 1e-10) scores 10",
        "higher",
        0.0,
        1.0,
        _ONE_LABEL,
        compute=lambda c: c.areas[:, 1],
        chance="the share of genes that are real DE genes",
        uses_q=True,
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
        chance="0",
        coupled=True,
        uses_q=True,
    ),
    Metric(
        "DEOver_10",
        "DEOver, enough DE genes",
        "",
        "de",
        "DEOver over the perturbations with at least min_de (10) real DE genes",
        "higher",
        0.0,
        1.0,
        "absent with fewer real DE genes",
        compute=partial(_with_enough, size="real"),
        source="own",
        needs_min_de=True,
        uses_q=True,
    ),
    Metric(
        "DEPrec_10",
        "DEPrec, enough DE genes",
        "",
        "de",
        "DEPrec over the perturbations with at least min_de (10) real DE genes",
        "higher",
        0.0,
        1.0,
        "absent with fewer real DE genes",
        compute=partial(_with_enough, size="predicted"),
        source="own",
        needs_min_de=True,
        uses_q=True,
    ),
)

COUNT = (
    Metric(
        "n_DE_real",
        "DE genes, real",
        "de_nsig_counts_real",
        "count",
        "genes with q < alpha, real cells against real controls",
        "none",
        0.0,
        _INF,
        compute=lambda c: c.num_real.astype(np.float64),
        uses_q=True,
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
        uses_q=True,
    ),
)

FURTHER = (
    *(_further_overlap(f"overlap_at_{k}", "real", k) for k in TOP),
    *(_further_overlap(f"precision_at_{k}", "predicted", k) for k in TOP),
    Metric(
        "DE_recall",
        "Recall of DE genes",
        "de_sig_genes_recall",
        "further",
        "share of the real DE genes that are predicted DE genes",
        "higher",
        0.0,
        1.0,
        _WITHOUT_DE,
        needs_real_de=True,
        compute=lambda c: m.recall(c.real.significant, c.predicted.significant),
        uses_q=True,
    ),
    Metric(
        "MSE_delta",
        "MSE of changes",
        "mse_delta",
        "further",
        "MSE of the mean changes from control; the same as MSE where both sides share their controls",
        "lower",
        0.0,
        _INF,
        compute=lambda c: m.mean_squared_error(c.real.delta, c.predicted.delta),
    ),
    Metric(
        "MAE_delta",
        "MAE of changes",
        "mae_delta",
        "further",
        "MAE of the mean changes from control; the same as MAE where both sides share their controls",
        "lower",
        0.0,
        _INF,
        compute=lambda c: m.mean_absolute_error(c.real.delta, c.predicted.delta),
    ),
)
