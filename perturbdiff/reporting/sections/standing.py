"""Where a model stands on each metric: its score beside the best baseline, chance and the ceiling.

docs/report.md states the rules for readers of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import LABELS
from perturbdiff.evaluation.metrics.bounds import oriented
from perturbdiff.evaluation.scoring.intervals import bootstrap_mean
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.loading.results import POOLED, Run
from perturbdiff.reporting.sections.chapter_data import ChapterData

Relation = Literal["better", "level", "worse", "unknown"]

DRAWS = 2000


@dataclass(frozen=True)
class Score:
    """A mean with its 95 % interval, on how many of how many it is defined, and its SD over splits (NaN: unknown)."""

    value: float
    low: float = math.nan
    high: float = math.nan
    defined: int = 0
    total: int = 0
    split_sd: float = math.nan


@dataclass(frozen=True)
class Gain:
    """Mean advantage over another method on what both are scored on, positive where ours is better.

    ``wins`` and ``ties`` count the ``n`` perturbations or conditions one by one. The others are losses.
    """

    over: str
    value: float
    low: float
    high: float
    n: int
    wins: int = 0
    ties: int = 0

    @property
    def losses(self) -> int:
        """Return on how many the other method is better."""
        return self.n - self.wins - self.ties

    @property
    def relation(self) -> Relation:
        """Return better or worse if the interval leaves 0 out, level if it holds 0."""
        if math.isnan(self.low) or math.isnan(self.high):
            return "unknown"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "level"


UNKNOWN = Score(math.nan)


@dataclass(frozen=True)
class Standing:
    """Where the model stands on one metric.

    Attributes
    ----------
    best, baseline
        Name and score of the best baseline.
    gains
        Advantage over each baseline.
    chance
        Score of the predictions when they are given to other perturbations.
    ceiling
        Score of one half of the real cells against the other.
    worth, reason
        What the calibration of the data set says of the metric (keep, weak or useless), and why; empty without one.
    """

    metric: Column
    ours: Score
    best: str | None = None
    baseline: Score | None = None
    gains: tuple[Gain, ...] = ()
    chance: float = math.nan
    ceiling: Score = UNKNOWN
    worth: str = ""
    reason: str = ""

    @property
    def relation(self) -> Relation:
        """Return better only if better than each baseline, worse if worse than any, and unknown without one."""
        relations = {gain.relation for gain in self.gains}
        for relation in ("worse", "level", "unknown"):
            if relation in relations:
                return relation
        return "better" if relations else "unknown"

    @property
    def rivals(self) -> list[str]:
        """Return the baselines that the relation is about, the strongest first."""
        same = [g for g in self.gains if g.relation == self.relation]
        return [g.over for g in sorted(same, key=lambda g: g.value)]

    @property
    def over_chance(self) -> Relation:
        """Return where the interval of the score lies beside chance, or unknown without either."""
        return self._over(oriented(self.chance, self.metric.direction))

    @property
    def beside_replicate(self) -> Relation:
        """Return worse if clearly below what half of the real cells reach, else level, or unknown."""
        ends = [oriented(v, self.metric.direction) for v in (self.ceiling.low, self.ceiling.high)]
        over = self._over(min(ends))  # not a number if either is none
        return "level" if over == "better" else over

    @property
    def silent(self) -> bool:
        """Return whether the calibration says that this metric cannot tell good from bad predictions here."""
        return self.worth in ("weak", "useless") and self.metric.direction in ("higher", "lower")

    def _over(self, level: float) -> Relation:
        ends = [oriented(v, self.metric.direction) for v in (self.ours.low, self.ours.high)]
        if any(math.isnan(v) for v in (level, *ends)):
            return "unknown"
        return "better" if min(ends) > level else "worse" if max(ends) < level else "level"

    @property
    def position(self) -> float:
        """Return the place between chance (0) and ceiling (1), or NaN unless the ceiling is the better of the two."""
        return place(self.ours.value, self)


def place(value: float, standing: Standing) -> float:
    """Return where a value lies between the metric's chance (0) and ceiling (1), or NaN if these are no scale."""
    direction = standing.metric.direction
    worst, top = (oriented(v, direction) for v in (standing.chance, standing.ceiling.value))
    if direction not in ("higher", "lower") or math.isnan(worst) or math.isnan(top) or top <= worst:
        return math.nan
    return (oriented(value, direction) - worst) / (top - worst)


def gain(ours: pd.Series, theirs: pd.Series, over: str, direction: str) -> Gain:
    """Return the mean paired advantage with its bootstrap interval over perturbations or conditions.

    Parameters
    ----------
    ours, theirs
        A metric's values with the same kind of index. Only shared and defined entries count.
    over
        Name of the other method.
    direction
        See `oriented`. ``none`` gives an unknown gain.
    """
    both = pd.concat({"a": ours, "b": theirs}, axis=1, join="inner").dropna().sort_index()
    a, b = (both[c].to_numpy(np.float64) for c in ("a", "b"))
    if direction == "one":
        a, b = -np.abs(a - 1.0), -np.abs(b - 1.0)
    advantage = (b - a) if direction == "lower" else (a - b)
    if direction == "none" or not len(both) or not np.isfinite(advantage).all():
        return Gain(over, math.nan, math.nan, math.nan, len(both))
    low, high = bootstrap_mean(advantage, draws=DRAWS, seed=0)
    wins, ties = int((advantage > 0).sum()), int((advantage == 0).sum())
    return Gain(over, float(advantage.mean()), low, high, len(both), wins, ties)


def best_of(values: Mapping[str, float], direction: str) -> str | None:
    """Return the name with the best value, the first of equals, or None if none is defined."""
    rated = {name: oriented(v, direction) for name, v in values.items()}
    rated = {name: v for name, v in rated.items() if not math.isnan(v)}
    return max(rated, key=lambda name: rated[name]) if rated else None


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
