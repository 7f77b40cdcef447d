"""Metrics and differential expression, from files (`evaluate`) or as pure functions over arrays.

From two matrices in memory to a table of metrics:

>>> import numpy as np
>>> from perturbdiff.evaluation import compare, tabulate
>>> rng = np.random.default_rng(0)
>>> labels = np.repeat(["control", "A", "B"], 30)
>>> real = np.log1p(rng.poisson(1.0 + (labels[:, None] == ["A", "B", "A", "B"])))
>>> predicted = np.log1p(rng.poisson(1.0 + (labels[:, None] == ["A", "B", "A", "B"])))
>>> comparison = compare(real, predicted, labels, labels, control="control")
>>> tabulate(comparison, ["PDCorr", "PDS_L1"]).T.round(1)
perturbation    A    B
PDCorr        0.9  1.0
PDS_L1        1.0  1.0

`METRICS` describes every metric: formula, direction, range, and when it is undefined. `DEFINITIONS` holds the
differences between the two releases of cell-eval. The functions behind the metrics are in
`perturbdiff.evaluation.metrics.profile_metrics`, those over cells in `perturbdiff.evaluation.metrics.populations`
and `perturbdiff.evaluation.metrics.pairwise_distances`, chance levels and the collapse check in
`perturbdiff.evaluation.metrics.bounds`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.evaluation.ceiling_stage import ceiling
    from perturbdiff.evaluation.evaluation_stage import evaluate
    from perturbdiff.evaluation.in_memory import compare, tabulate
    from perturbdiff.evaluation.metrics.bounds import chance, spearman_brown
    from perturbdiff.evaluation.metrics.catalogue import METRICS, chosen, score
    from perturbdiff.evaluation.metrics.differential import (
        DEFAULT,
        DEFINITIONS,
        Controls,
        Definition,
        Differential,
        benjamini_hochberg,
        fold_change,
    )
    from perturbdiff.evaluation.metrics.pairwise_distances import energy_distance, mmd
    from perturbdiff.evaluation.metrics.populations import condition_metrics, wasserstein
    from perturbdiff.evaluation.metrics.profile_metrics import Comparison, Metric
    from perturbdiff.evaluation.metrics.sorted_columns import Columns
    from perturbdiff.evaluation.scoring.intervals import bootstrap_mean, bootstrap_means

__all__ = [
    "DEFAULT",
    "DEFINITIONS",
    "METRICS",
    "Columns",
    "Comparison",
    "Controls",
    "Definition",
    "Differential",
    "Metric",
    "benjamini_hochberg",
    "bootstrap_mean",
    "bootstrap_means",
    "ceiling",
    "chance",
    "chosen",
    "compare",
    "condition_metrics",
    "energy_distance",
    "evaluate",
    "fold_change",
    "mmd",
    "score",
    "spearman_brown",
    "tabulate",
    "wasserstein",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "ceiling_stage": ("ceiling",),
        "evaluation_stage": ("evaluate",),
        "in_memory": ("compare", "tabulate"),
        "metrics.bounds": ("chance", "spearman_brown"),
        "metrics.catalogue": ("METRICS", "chosen", "score"),
        "metrics.differential": (
            "DEFAULT",
            "DEFINITIONS",
            "Controls",
            "Definition",
            "Differential",
            "benjamini_hochberg",
            "fold_change",
        ),
        "metrics.pairwise_distances": ("energy_distance", "mmd"),
        "metrics.populations": ("condition_metrics", "wasserstein"),
        "metrics.profile_metrics": ("Comparison", "Metric"),
        "metrics.sorted_columns": ("Columns",),
        "scoring.intervals": ("bootstrap_mean", "bootstrap_means"),
    },
)
