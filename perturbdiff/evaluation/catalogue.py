"""The catalogue of metrics: name, meaning, direction and range of everything that `evaluate` writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbdiff.errors import UserError, nearest
from perturbdiff.evaluation.metrics import Comparison, Metric
from perturbdiff.evaluation.table_metrics import COUNT, DE, EXPRESSION, FURTHER

_INF = float("inf")

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

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*EXPRESSION, *DE, *COUNT, *FURTHER, *_DISTRIBUTION)
}
FAMILIES = tuple(dict.fromkeys(metric.family for metric in METRICS.values()))
PAPER = tuple(n for n, m in METRICS.items() if m.family in ("expression", "de") and m.source != "own")


def chosen(names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the metrics that names or families stand for, each once, in the catalogue's order.

    Parameters
    ----------
    names
        Names of metrics or of families; none stands for all.

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

    A metric's value does not depend on which others are asked for.

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
