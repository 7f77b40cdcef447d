"""The scores of the method that a chapter is about, beside baselines, chance and ceiling: from runs to standings."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import LABELS
from perturbdiff.evaluation.scoring.intervals import bootstrap_mean
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.loading.results import POOLED, Run
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.standing import DRAWS, UNKNOWN, Score, Standing, best_of, gain


def standing(about: ChapterData, metric: Column) -> Standing:
    """Return where the focus stands on a metric, over all test cells pooled."""
    focus = about.focus
    others = rivals(about)
    best = best_of({r.method: r.score(metric.name)[0] for r in others}, metric.direction)
    ours = values(focus, metric.name)
    gains = (gain(ours, values(r, metric.name), r.method, metric.direction) for r in others)
    ceiling = about.ceilings[0] if about.ceilings else None
    return Standing(
        metric,
        score(focus, metric.name),
        best,
        next((score(r, metric.name) for r in others if r.method == best), None),
        tuple(g for g in gains if g.n),
        chance(focus, metric.name),
        UNKNOWN if ceiling is None else score(ceiling, metric.name),
        *about.worth.get(metric.name, ("", "")),
    )


def rivals(about: ChapterData) -> list[Run]:
    """Return the baselines of all kinds, or without any the other methods."""
    baselines = [r for r in about.ranked if r.kind == "baseline" and r is not about.focus]
    return baselines or [r for r in about.ranked if r is not about.focus]


def score(run: Run, metric: str) -> Score:
    """Return a run's mean with its interval, made here where the run holds none."""
    value, defined, total = run.score(metric)
    low, high = run.interval(metric)
    if math.isnan(low) and defined > 1:
        numbers = values(run, metric).to_numpy(np.float64)
        low, high = bootstrap_mean(numbers, draws=DRAWS, seed=0)
    return Score(value, low, high, defined, total, run.split_sd(metric))


def values(run: Run, metric: str) -> pd.Series:
    """Return what the pooled mean of a metric is over: per perturbation, or per condition (cells' metrics)."""
    table = run.metrics
    table = table.loc[((table["metric"] == metric) & (table["perturbation"] != "*")).to_numpy(bool)]
    for kind in (POOLED[0], "condition"):
        rows = table.loc[(table["scope_kind"] == kind).to_numpy(bool)]
        if len(rows):
            break
    index = pd.MultiIndex.from_arrays([rows["scope"].astype(str), rows["perturbation"].astype(str)])
    return pd.Series(rows["value"].to_numpy(np.float64), index=index).sort_index()


def chance(run: Run, metric: str) -> float:
    """Return chance as the run measured it, else as the definition of the metric gives it, or NaN if unknown."""
    measured = run.chance(metric)
    total = run.score(metric)[2]
    if np.isnan(measured) and metric.startswith("PDS") and total > 1:
        return 0.5 + 0.5 / total if run.definition.startswith("cell-eval-0.") else 0.5
    return measured


def perturbations(run: Run) -> int:
    """Return how many perturbations were scored."""
    return len(set(run.pooled["perturbation"]))


def left_out(about: ChapterData) -> tuple[int, int]:
    """Return how many of the conditions that rivals are scored on the focus leaves out, and how many these are."""
    ours, theirs = _scored(about.focus), set[tuple[str, ...]]().union(*map(_scored, rivals(about)))
    return (len(theirs - ours) if ours else 0), len(theirs)


def _scored(run: Run) -> set[tuple[str, ...]]:
    table = run.conditions
    return set() if table is None else set(table[list(LABELS)].itertuples(index=False, name=None))


def collapse_verdict(about: ChapterData) -> str:
    """Return what the collapse check says of the focus over the whole pool, empty if it was not made."""
    table = about.focus.collapse
    if table is not None and len(rows := table.loc[(table["scope_kind"] == POOLED[0]).to_numpy(bool)]):
        return str(rows["verdict"].iloc[0])
    effects = about.effects.get(about.focus.method)
    return "" if effects is None or effects.collapse is None else effects.collapse.verdict
