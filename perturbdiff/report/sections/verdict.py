"""The answer on the first screen: whether a model is good, by fixed rules on the numbers of a few metrics.

Nothing here reads files. docs/report.md states the rules for readers of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from perturbdiff.evaluation.scoring.intervals import bootstrap_mean
from perturbdiff.report.loading.metric_columns import ENERGY, PDCORR, Column

Relation = Literal["better", "level", "worse", "unknown"]
Level = Literal["good", "mixed", "level", "poor", "unknown"]

CORE = (ENERGY, PDCORR)  # whole populations, and mean changes: a verdict rests on both
FEWEST = 5  # perturbations below which no verdict is given
DRAWS = 2000
_BROKEN = ("no change predicted", "hardly any change predicted", "collapsed: nearly one answer for all")


@dataclass(frozen=True)
class Score:
    """A mean with its 95 % interval (NaN if unknown), and on how many of how many it is defined."""

    value: float
    low: float = math.nan
    high: float = math.nan
    defined: int = 0
    total: int = 0


@dataclass(frozen=True)
class Gain:
    """Mean advantage over another method on what both are scored on, positive where ours is better."""

    over: str
    value: float
    low: float
    high: float
    n: int

    @property
    def relation(self) -> Relation:
        """Return better or worse if the interval leaves 0 out, level if it holds 0."""
        if math.isnan(self.low) or math.isnan(self.high):
            return "unknown"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "level"


@dataclass(frozen=True)
class Standing:
    """Where the model stands on one metric: beside the best baseline, chance and the ceiling."""

    metric: Column
    ours: Score
    best: str | None = None
    baseline: Score | None = None
    gains: tuple[Gain, ...] = ()
    chance: float = math.nan
    ceiling: float = math.nan

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
        """Return where the interval lies beside chance, or unknown without either."""
        ends = [oriented(v, self.metric.direction) for v in (self.ours.low, self.ours.high)]
        chance = oriented(self.chance, self.metric.direction)
        if any(math.isnan(v) for v in (*ends, chance)):
            return "unknown"
        return "better" if min(ends) > chance else "worse" if max(ends) < chance else "level"

    @property
    def position(self) -> float:
        """Return the place between chance (0) and ceiling (1), or NaN unless the ceiling is the better of the two."""
        return place(self.ours.value, self)


@dataclass(frozen=True)
class Verdict:
    """What the rules say: a level, a title of a few words, a sentence, and one line per core metric."""

    level: Level
    title: str
    sentence: str = ""
    lines: tuple[str, ...] = ()


def oriented(value: float, direction: str) -> float:
    """Return a value so that more is better: as it is, negated, or minus its distance from 1, else NaN."""
    return {"higher": value, "lower": -value, "one": -abs(value - 1.0)}.get(direction, math.nan)


def place(value: float, standing: Standing) -> float:
    """Return where a value lies between the metric's chance (0) and ceiling (1), or NaN if these are no scale."""
    direction = standing.metric.direction
    worst, top = (oriented(v, direction) for v in (standing.chance, standing.ceiling))
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
    return Gain(over, float(advantage.mean()), low, high, len(both))


def best_of(values: Mapping[str, float], direction: str) -> str | None:
    """Return the name with the best value, the first of equals, or None if none is defined."""
    rated = {name: oriented(v, direction) for name, v in values.items()}
    rated = {name: v for name, v in rated.items() if not math.isnan(v)}
    return max(rated, key=lambda name: rated[name]) if rated else None


def judge(standings: Iterable[Standing], perturbations: int, collapse: str = "") -> Verdict:
    """Return the verdict. The first rule that applies names it.

    Parameters
    ----------
    standings
        Standings in the key metrics. The rules use those of `CORE`, and the sentence uses all.
    perturbations
        How many perturbations were scored.
    collapse
        What the collapse check says, if it was made.
    """
    every = list(standings)
    core = [s for s in every if s.metric.name in CORE and not math.isnan(s.ours.value)]
    lines = tuple(line(s) for s in core)
    level, title = _ruled(core, perturbations, collapse)
    return Verdict(level, title, tally(every), lines)


def _ruled(core: Sequence[Standing], perturbations: int, collapse: str) -> tuple[Level, str]:
    if not core:
        return "unknown", "Cannot be judged: neither energy distance nor PDCorr is defined"
    if perturbations < FEWEST:
        count = f"{perturbations} perturbation{'s' * (perturbations != 1)}"
        return "unknown", f"Cannot be judged: {count}, and at least {FEWEST} are needed"
    if collapse in _BROKEN:
        words = {
            _BROKEN[0]: "Predicts no change at all",
            _BROKEN[1]: "Predicts hardly any change",
            _BROKEN[2]: "Collapsed: nearly the same answer for every perturbation",
        }
        return "poor", words[collapse]
    if chance := [s for s in core if s.over_chance in ("level", "worse")]:
        return "poor", f"No better than chance in {_names(chance)}"
    if not any(s.gains for s in core):
        return "unknown", "Not compared: the report holds no baseline"
    return _against_baselines(core)


def _against_baselines(core: Sequence[Standing]) -> tuple[Level, str]:
    by = {r: [s for s in core if s.relation == r] for r in ("better", "level", "worse", "unknown")}
    if len(by["better"]) == len(core):
        missing = [n for n, name in ((ENERGY, "energy distance"), (PDCORR, "PDCorr")) if not _has(core, n)]
        if missing:
            return (
                "mixed",
                f"Better than every baseline in {_names(core)}, the only one of two metrics scored",
            )
        return "good", f"Better than every baseline in {_names(core)}"
    parts = []
    if by["better"]:
        parts.append(f"better than every baseline in {_names(by['better'])}")
    if by["worse"]:
        parts.append(f"worse than {_rivals(by['worse'])} in {_names(by['worse'])}")
    if by["level"]:
        word = "no better than" if not by["better"] and not by["worse"] else "not told apart from"
        parts.append(f"{word} {_rivals(by['level'])} in {_names(by['level'])}")
    if by["unknown"]:
        parts.append(f"no interval for {_names(by['unknown'])}")
    title = ", ".join(parts)
    level: Level = (
        "mixed" if by["better"] else "poor" if by["worse"] else "level" if by["level"] else "unknown"
    )
    return level, title[0].upper() + title[1:]


def _has(core: Sequence[Standing], name: str) -> bool:
    return any(s.metric.name == name for s in core)


def _names(standings: Sequence[Standing]) -> str:
    return _listed([_spoken(s.metric) for s in standings])


def _spoken(metric: Column) -> str:
    return "energy distance" if metric.name == ENERGY else metric.label


def _rivals(standings: Sequence[Standing]) -> str:
    """Name the strongest rival of each metric. How many more there are stands in the table."""
    return _listed(list(dict.fromkeys(s.rivals[0] for s in standings)))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def tally(standings: Sequence[Standing]) -> str:
    """Count the key metrics by relation, in a sentence. Empty without a baseline."""
    ranked = [s for s in standings if s.metric.direction in ("higher", "lower")]
    known = [s for s in ranked if s.gains and s.relation != "unknown"]
    if not known:
        return ""
    words = {
        "better": "better than every baseline on",
        "level": "not told apart from the strongest on",
        "worse": "worse than one on",
    }
    counts = {r: sum(s.relation == r for s in known) for r in words}
    said = ", ".join(f"{words[r]} {'all' if n == len(known) else n}" for r, n in counts.items() if n)
    return f"Of {len(known)} key metrics: {said}."


def line(standing: Standing) -> str:
    """Say in a line where the model stands on one metric."""
    digits = _digits(standing)
    words = [f"{_capital(_spoken(standing.metric))} {_text(standing.ours.value, digits)}"]
    gain = next((g for g in standing.gains if g.over == standing.best), None)
    if standing.baseline is not None:
        words.append(f", best baseline {standing.best} {_text(standing.baseline.value, digits)}")
    if gain is not None and gain.relation != "unknown":
        low, high = (_text(v, digits) for v in (gain.low, gain.high))
        words.append(f" (advantage {_text(gain.value, digits)}, 95 % interval {low} to {high})")
    if not math.isnan(standing.position):
        share = round(100 * standing.position)
        words.append(f"; {share} % of the way from chance to ceiling".replace("-", "−"))
    return f"{''.join(words)}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _digits(standing: Standing) -> int:
    size = abs(standing.ours.value)
    return int(np.clip(2 - math.floor(math.log10(size)), 1, 5)) if math.isfinite(size) and size else 3


def _text(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")
