"""The catalogue of metrics: name, meaning, direction and range of everything that `evaluate` writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbdiff.evaluation.metrics.effects import EFFECT
from perturbdiff.evaluation.metrics.profile_metrics import Comparison, Metric
from perturbdiff.evaluation.metrics.table_metrics import COUNT, DE, EXPRESSION, FURTHER
from perturbdiff.runtime.errors import UserError, nearest

_INF = float("inf")

_OTHER = "measured: the same prediction against the real cells of another perturbation"
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
        chance=_OTHER,
        source="own",
    ),
    Metric(
        "mmd",
        "MMD²",
        "",
        "distribution",
        "E k(x, x') + E k(y, y') − 2E k(x, y), self-pairs left out; k(x, y) is the mean over s = ¼, ½, 1, 2, 4 of "
        "exp(−|x − y|² / (s m)), m the median squared distance of two real cells; an unbiased estimate, so that "
        "it can be slightly negative",
        "lower",
        -2.0,
        2.0,
        "NaN with fewer than two cells on a side or if half the pairs of real cells are equal",
        chance=_OTHER,
        source="own",
    ),
    Metric(
        "mmd_pc",
        "MMD², components",
        "",
        "distribution",
        "MMD² between cells in leading components, 20 or a tenth of the cells that give them: the axes along which the "
        "real cells lie farthest from the mean of the controls; m is the median of the squared distances there. Half "
        "of the real cells give the components in which the other half is compared, and the other way round. An "
        "unbiased estimate for independent cells, so that it can be slightly negative; copies of the real cells are "
        "not independent of the components",
        "lower",
        -2.0,
        2.0,
        "NaN with fewer than four real or two predicted cells or if half the pairs of real cells are equal",
        chance=_OTHER,
        source="own",
    ),
    Metric(
        "wasserstein",
        "Wasserstein per gene",
        "",
        "distribution",
        "Wasserstein-1 distance of the predicted and real log1p values of each gene; median over genes in more "
        "than 5 % of the real cells",
        "lower",
        0.0,
        _INF,
        "NaN without such a gene",
        chance=_OTHER,
        source="own",
    ),
    Metric(
        "dependence_gap",
        "Gene–gene dependence",
        "",
        "distribution",
        "squared difference of predicted and real rank correlations of two genes, less the sampling variance of both, "
        "mean over pairs of the 60 genes with the highest real mean; constant genes correlate 0. It sees dependence "
        "alone, and can be slightly negative",
        "lower",
        -4.0,
        4.0,
        "NaN with fewer than three cells on a side or fewer than two such genes that vary in the real cells",
        chance=_OTHER,
        source="own",
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
        source="own",
    ),
    Metric(
        "library_ratio",
        "Library size",
        "",
        "distribution",
        "sum over genes of expm1 of the log1p values, median over cells, predicted over real",
        "one",
        0.0,
        _INF,
        "NaN if the real median is zero",
        source="own",
    ),
    Metric(
        "library_sd_ratio",
        "SD of library sizes",
        "",
        "distribution",
        "SD over cells of log(1 + sum over genes of expm1 of the log1p values), predicted over real",
        "one",
        0.0,
        _INF,
        "NaN with fewer than two cells on a side or equal real sizes",
        source="own",
    ),
    Metric(
        "total_sd_ratio",
        "SD of cells' totals",
        "",
        "distribution",
        "SD over cells of a cell's total, the sum over genes of expm1 of the log1p values, predicted over real",
        "one",
        0.0,
        _INF,
        "NaN with fewer than two cells on a side or equal real totals, as of cells with all genes that their counts "
        "were scaled with",
        source="own",
    ),
    Metric(
        "above_depth",
        "Cells above the depth",
        "",
        "distribution",
        "share of the predicted cells whose total (sum over genes of expm1 of the log1p values) is more than 0.1 % "
        "above the depth that counts were scaled to, which no real cell can be",
        "lower",
        0.0,
        1.0,
        "NaN without predicted cells or if the depth is not known",
        source="own",
    ),
    Metric(
        "detected_sd_ratio",
        "SD of detected genes",
        "",
        "distribution",
        "SD over cells of the number of non-zero values of a cell, predicted over real",
        "one",
        0.0,
        _INF,
        "NaN with fewer than two cells on a side or equal real numbers",
        source="own",
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
        source="own",
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
        source="own",
    ),
    Metric(
        "mean_variance_gap",
        "Mean–variance trend",
        "",
        "distribution",
        "|T̂ − T| / max(T̂, T), median over the means of genes in more than 5 % of the real cells; T and T̂ are the "
        "real and predicted trends of SD over mean: medians of groups of at least 10 such genes of similar mean",
        "lower",
        0.0,
        1.0,
        "NaN with fewer than two cells on a side, fewer than 20 such genes, or no mean in the range of both",
        source="own",
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
        source="own",
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
        source="own",
    ),
    Metric(
        "effect_slope",
        "Size of the change",
        "",
        "distribution",
        "slope of predicted on true change of mean log1p values over the 50 genes that change most: Σ δ₁ (m̂ − c) over "
        "Σ δ₁ δ₂, c the mean of the controls, δ₁ and δ₂ the changes of two halves of the real cells, genes chosen by "
        "δ₁; both sums over both orders of the halves. 1: changes of the right size; 0: none",
        "one",
        -_INF,
        _INF,
        "NaN with fewer than four real cells, without predicted cells or controls, or if the halves' changes of these "
        "genes hardly agree (cosine below 0.5)",
        source="own",
    ),
)

_SETS = (
    Metric(
        "family_score",
        "Energy score of sets",
        "",
        "sets",
        "E|S − T| − ½ E|S − S'|, S and S' different sampled sets and T a true one; two sets are as far apart as the "
        "root of their energy distance with all pairs. Least, in expectation, for sets that are drawn as the true ones "
        "are, and above 0 even then: compare with the ceiling",
        "lower",
        0.0,
        _INF,
        "NaN with fewer than two sampled sets or without a true one",
        chance="measured: the same sets against the true sets of another perturbation",
        source="own",
    ),
    Metric(
        "set_variance_ratio",
        "Variance between sets",
        "",
        "sets",
        "variance component between sets, sampled over true: the variance of the means of sets less that from the "
        "draw of their cells, summed over genes. 0 for draws from one distribution, and below 0 for sets that are more "
        "alike",
        "one",
        -_INF,
        _INF,
        "NaN with fewer than two sets on a side, or if the true sets differ no more than in 19 shuffles of their cells",
        source="own",
    ),
    Metric(
        "set_range",
        "Range of sets",
        "",
        "sets",
        "share of true sets whose mean lies within the range of the sampled sets, along the direction in which the "
        "other half of the true sets differ most. Expected 1 − 2k/(S + 1) if alike, k the largest whole number up to "
        "(S + 1)/20 and at least 1: .9 for 39 or 19 sampled sets, less for fewer",
        "higher",
        0.0,
        1.0,
        "NaN with fewer than two sampled sets or four true ones",
        source="own",
    ),
    Metric(
        "set_recall",
        "Recall of sets",
        "",
        "sets",
        "share of true sets within the cloud of the sampled ones: joined to them, a true set is not among the tenth of "
        "the sets that are farthest, by their mean energy distance, from the rest. Expected ⌊.9 (S + 1)⌋/(S + 1) if "
        "alike. Higher with sampled sets that differ too much: see the precision",
        "higher",
        0.0,
        1.0,
        "NaN with fewer than two sampled sets or without a true one",
        source="own",
    ),
    Metric(
        "set_precision",
        "Precision of sets",
        "",
        "sets",
        "share of sampled sets within the cloud of the true ones, as for the recall. Higher with sampled sets that "
        "differ too little: see the recall",
        "higher",
        0.0,
        1.0,
        "NaN with fewer than two true sets or without a sampled one",
        source="own",
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*EXPRESSION, *DE, *COUNT, *FURTHER, *EFFECT, *_DISTRIBUTION, *_SETS)
}
FAMILIES = tuple(dict.fromkeys(metric.family for metric in METRICS.values()))
PAPER = tuple(n for n, m in METRICS.items() if m.family in ("expression", "de") and m.source != "own")


def chosen(names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the metrics that names or families stand for, each once, in the catalogue's order.

    Parameters
    ----------
    names
        Names of metrics or of families; empty for all.

    Raises
    ------
    UserError
        If a name is neither.
    """
    for name in names:
        if name not in METRICS and name not in FAMILIES:
            raise UserError(
                f"metric {name!r} is not known{nearest(name, [*METRICS, *FAMILIES])}; "
                f"give names of metrics or of their families: {', '.join(FAMILIES)}"
            )
    return tuple(n for n, metric in METRICS.items() if not names or n in names or metric.family in names)


def columns() -> dict[str, str]:
    """Return the name of each metric by its column in cell-eval's results."""
    return {metric.column: name for name, metric in METRICS.items() if metric.column}


def score(comparison: Comparison, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return values of the named metrics (none: all but those of the distribution) of a comparison.

    A metric's value does not depend on which others are computed.

    Returns
    -------
    dict
        float64 [M] in the order of the comparison's perturbations, [1] where there is one number for all (ES).

    Raises
    ------
    ValueError
        If a name is not one of `METRICS` or is scored on the cells of a condition.
    """
    computed = {n: metric.compute for n, metric in METRICS.items() if metric.compute is not None}
    wanted = list(computed) if names is None else list(names)
    if unknown := [n for n in wanted if n not in computed]:
        raise ValueError(f"no metric of pseudobulks or DE genes: {', '.join(unknown)}")
    return {name: computed[name](comparison) for name in wanted}
