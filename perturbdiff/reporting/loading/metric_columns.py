"""The metrics as columns of tables and figures: names, directions, which belong together, what the main ones ask."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from perturbdiff.evaluation.calibration.verdicts import QUESTIONS
from perturbdiff.evaluation.cell_eval2.metrics import METRICS as COUNT_METRICS
from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.metrics.profile_metrics import Metric
from perturbdiff.reporting.loading.results import POOLED, Run, Scope

PDCORR, ENERGY = "PDCorr", "energy_distance"


@dataclass(frozen=True)
class Column:
    """A metric as a column of the score tables. ``direction`` is higher, lower, one (best at 1) or none."""

    name: str
    label: str
    direction: str
    family: str = "other"
    meaning: str = ""

    @property
    def higher(self) -> bool:
        """Return whether larger values are better (only for directions higher and lower)."""
        return self.direction != "lower"

    @property
    def arrow(self) -> str:
        """Return the arrow that points where better is."""
        return {"higher": "↑", "lower": "↓", "one": "→ 1"}.get(self.direction, "")

    @property
    def heading(self) -> str:
        """Return the label with its arrow."""
        return f"{self.label} {self.arrow}".strip()


def metric_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the metrics that any run holds: the catalogue's in its order, then others by name."""
    pairs = (zip(r.aggregate["metric"], r.aggregate["direction"], strict=True) for r in runs)
    directions = {str(name): str(direction) for run in pairs for name, direction in run}
    known = [
        Column(m.name, m.label, m.direction, m.family, _meaning(m))
        for m in METRICS.values()
        if m.name in directions
    ]
    others = sorted(set(directions) - set(METRICS))
    return known + [
        Column(
            name, name, directions[name], meaning=COUNT_METRICS[name].meaning if name in COUNT_METRICS else ""
        )
        for name in others
    ]


def _meaning(metric: Metric) -> str:
    rule = metric.undefined.removeprefix("never").removeprefix("; ")
    return f"{metric.formula} ({rule})" if rule else metric.formula


def main_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of the score tables: the paper's 14 metrics and the energy distance."""
    return [c for c in columns if c.family in ("expression", "de") or c.name == ENERGY]


REALISM = (
    "nonzero_ratio",
    "gene_sd_ratio",
    "cell_sd_ratio",
    "library_ratio",
    "library_sd_ratio",
    "mean_variance_gap",
    "correlation_agreement",
)
NO_SPREAD = (
    "SD of library sizes is not defined where all real cells sum to the same, as in data scaled to one total over "
    "these very genes. There is no spread to compare with. SD between cells, of a cell’s mean log1p value, is defined "
    "there too."
)


def realism_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics that ask whether predicted cells look like cells: zeros, spread, correlations."""
    return [m for name in REALISM if (m := named(columns, name)) is not None]


def set_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics that ask whether sampled sets of cells differ as true sets do."""
    return [c for c in columns if c.family == "sets"]


def further_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that are neither main nor of realism or sets: distances, counts, cell-eval's others."""
    main = {c.name for c in (*main_columns(columns), *realism_columns(columns), *set_columns(columns))}
    return [c for c in columns if c.name not in main]


_KEY = ("PDCorr", "MSE", "PDS_cos", "DEOver", "DirAgr", "LFCSpear", "AUPRC", "ES", ENERGY)
_RADAR = (
    "R2",
    "PDCorr",
    "PDS_L1",
    "PDS_L2",
    "PDS_cos",
    "DEOver",
    "DEPrec",
    "DirAgr",
    "LFCSpear",
    "AUROC",
    "AUPRC",
    "ES",
)


def key_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics that figures compare: one or two of each kind, in the catalogue's order."""
    return [c for c in columns if c.name in _KEY] or list(main_columns(columns) or columns)[: len(_KEY)]


def radar_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics of the paper's radar: the 12 of which more is better."""
    return [c for c in columns if c.name in _RADAR]


def table_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the paper's 14 metrics and the energy distance: each aspect once, for radars and mean win rates."""
    return [c for c in columns if c.name in (*_RADAR, "MSE", "MAE", ENERGY)]


def named(columns: Sequence[Column], name: str) -> Column | None:
    """Return the metric of that name, if it was scored."""
    return next((c for c in columns if c.name == name), None)


def score_table(runs: Sequence[Run], columns: Sequence[Column], scope: Scope = POOLED) -> pd.DataFrame:
    """Return mean scores [methods × metric names] in a scope. NaN: undefined."""
    rows = {r.method: [r.score(m.name, scope)[0] for m in columns] for r in runs}
    names = pd.Index([m.name for m in columns])
    return pd.DataFrame.from_dict(rows, orient="index", columns=names, dtype=np.float64)


CORE = (*QUESTIONS["populations"], *QUESTIONS["changes"])
"""Whole populations and mean changes: a verdict rests on one metric of each."""


@dataclass(frozen=True)
class KeyMetric:
    """One line of the first screen.

    Attributes
    ----------
    names
        Metrics in order of preference: the first that was scored stands there.
    question
        What it asks of the predictions.
    skill
        What a method that scores well is good at, after "at".
    """

    names: tuple[str, ...]
    question: str
    skill: str


KEY = (
    KeyMetric(QUESTIONS["populations"], "Are the cells one population?", "whole populations"),
    KeyMetric(QUESTIONS["changes"], "Is the mean change right?", "mean changes"),
    KeyMetric(QUESTIONS["discrimination"], "Is it the right perturbation?", "telling perturbations apart"),
    KeyMetric(QUESTIONS["de_genes"], "Are the most changed genes found?", "finding the most changed genes"),
    KeyMetric(QUESTIONS["de_ranking"], "Do the changed genes come first?", "ranking the changed genes first"),
    KeyMetric(QUESTIONS["direction"], "Is the direction right?", "directions of change"),
    KeyMetric(("nonzero_ratio",), "Are there as many zeros?", "numbers of zeros"),
)


def key_metrics(columns: Sequence[Column], kept: Collection[str] = ()) -> list[Column]:
    """Return the metrics of the first screen: for each question the first that is kept, else the first that was scored.

    Parameters
    ----------
    columns
        All metrics that were scored.
    kept
        Those that mean something on this data set.
    """
    chosen = []
    for key in KEY:
        scored = [column for name in key.names if (column := named(columns, name)) is not None]
        chosen += [*(c for c in scored if c.name in kept), *scored][:1]
    return chosen


def question(metric: Column) -> str:
    """Return what a key metric asks. Empty for other metrics."""
    return next((key.question for key in KEY if metric.name in key.names), "")


def skill(metric: Column) -> str:
    """Return what a method that scores well is good at. For other metrics their name."""
    return next((key.skill for key in KEY if metric.name in key.names), metric.label)


def caption(metric: Column) -> str:
    """Return what a key metric asks, and where better is, to stand below a figure of it."""
    where = {"higher": "Higher is better.", "lower": "Lower is better.", "one": "1 is best."}
    return f"{question(metric) or metric.label + '.'} {where.get(metric.direction, '')}".strip()
