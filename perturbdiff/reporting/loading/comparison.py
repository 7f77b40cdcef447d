"""Comparing methods: runs that differ only in their seed, paired differences with intervals, and the collapse check."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.evaluation.metrics.bounds import Collapse, collapse, shared
from perturbdiff.reporting.loading.results import Run

_SEED = re.compile(r"(?:[\s._·#-]+(?:(?:seed|s)[\s._-]*)?\d*|seed[\s._-]*\d*)$", re.IGNORECASE)
_NUMBERED = re.compile(r"[\s._·-]+(?:(?:seed|s)[\s._-]*)?\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class SeedGroup:
    """Runs of one method on one data set, one for each seed.

    Attributes
    ----------
    name
        What their names have in common, else the recipe's or the baseline's name.
    runs
        In the order given, of equal seeds the first.
    """

    name: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> str:
        """Return the seeds for reading. Empty where the predictions do not tell them."""
        return ", ".join(found) if all(found := [seed_of(r) for r in self.runs]) else ""


def families(runs: Sequence[Run]) -> list[SeedGroup]:
    """Group the runs of one data set by method, in the order of their first runs.

    A model is known by the key of its recipe (all that determines its predictions but seeds), a baseline by its
    name, version and settings. Predictions that do not say how they were made are grouped by the method's name.
    """
    groups: dict[tuple[Any, ...], dict[Any, Run]] = {}
    for run in runs:
        members = groups.setdefault(_identity(run), {})
        members.setdefault(seed_of(run) or id(run), run)
    found = [SeedGroup(_name(list(members.values())), tuple(members.values())) for members in groups.values()]
    names = Counter(family.name for family in found)
    found = [replace(f, name=_fuller(f)) if names[f.name] > 1 else f for f in found]
    return [
        replace(f, name=f"{f.name} #{n + 1}") if (n := sum(o.name == f.name for o in found[:i])) else f
        for i, f in enumerate(found)
    ]


def seed_of(run: Run) -> str:
    """Return the seed of a run's predictions, of a model that was trained with another both. Empty if unknown."""
    seed, trained = run.made_by.seed, run.made_by.train_seed
    if trained is None or trained == seed:
        return "" if seed is None else str(seed)
    return f"{trained}/{seed}"


def stem(name: str) -> str:
    """Return a method's name without the number of a seed at its end: 'cpa-seed2' → 'cpa'."""
    return _NUMBERED.sub("", name) or name


def _identity(run: Run) -> tuple[Any, ...]:
    made_by = run.made_by
    if run.kind == "model" and made_by.recipe_key:
        return ("recipe", made_by.recipe_key)
    if run.kind == "baseline" and made_by.baseline:
        return ("baseline", made_by.baseline, made_by.version, made_by.settings, made_by.script)
    return ("name", run.kind, run.base)


def _name(runs: Sequence[Run]) -> str:
    """Return what a family is called. A single run has its own name."""
    if len(runs) == 1:
        return runs[0].method
    names = {run.base for run in runs}
    if len(names) == 1:
        return names.pop()
    first, last = min(names), max(names)  # what these two begin with, all do
    shared = _SEED.sub(
        "", first[: next((i for i, c in enumerate(first) if c != last[i : i + 1]), len(first))]
    )
    return shared or str(runs[0].baseline or runs[0].made_by.recipe or runs[0].base)


def _fuller(family: SeedGroup) -> str:
    """Return a name that tells a family from another of the same name, if the settings do."""
    settings = family.runs[0].made_by.settings
    return f"{family.name} ({settings})" if settings else family.name


_DRAWS = 2000


@dataclass(frozen=True)
class Paired:
    """How method a fares against method b on the conditions where both are scored.

    ``rate`` counts a tie as half a win. ``gain`` is the mean advantage of a, positive where a is better.
    Intervals are percentile bootstrap intervals (95 %) over conditions.
    """

    n: int
    wins: int
    ties: int
    rate: float
    rate_interval: tuple[float, float]
    gain: float
    gain_interval: tuple[float, float]


def paired(a: pd.Series, b: pd.Series) -> pd.DataFrame:
    """Return the conditions on which both are defined, with columns ``a`` and ``b``."""
    return pd.concat({"a": a, "b": b}, axis=1, join="inner").dropna().sort_index()


def compare(pairs: pd.DataFrame, *, higher: bool, seed: int = 0) -> Paired:
    """Return wins and mean advantage of ``a`` over ``b``.

    Parameters
    ----------
    pairs
        Columns ``a`` and ``b``, one row per condition, at least one.
    higher
        Whether larger values are better.
    seed
        Seed of the bootstrap over conditions (2,000 draws).
    """
    advantage = (pairs["a"] - pairs["b"]).to_numpy() * (1.0 if higher else -1.0)
    won = (advantage > 0) + 0.5 * (advantage == 0)
    rng = np.random.default_rng(seed)
    drawn = np.empty((_DRAWS, 2))
    for i in range(_DRAWS):
        rows = rng.integers(len(pairs), size=len(pairs))
        drawn[i] = won[rows].mean(), advantage[rows].mean()
    (low_rate, low_gain), (high_rate, high_gain) = np.percentile(drawn, (2.5, 97.5), axis=0)
    return Paired(
        n=len(pairs),
        wins=int((advantage > 0).sum()),
        ties=int((advantage == 0).sum()),
        rate=float(won.mean()),
        rate_interval=(float(low_rate), float(high_rate)),
        gain=float(advantage.mean()),
        gain_interval=(float(low_gain), float(high_gain)),
    )


def win_rates(values: Mapping[str, pd.Series], *, higher: bool) -> pd.DataFrame:
    """Compare every method with every other on the conditions where both are scored.

    Parameters
    ----------
    values
        One metric per condition of each method.
    higher
        Whether larger values are better.

    Returns
    -------
    DataFrame
        A row per ordered pair with a shared condition: method, against, rate (a tie is half a win), n.
    """
    methods = list(values)
    keys = pd.Index(sorted({key for column in values.values() for key in column.index}))
    matrix = np.full((len(keys), len(methods)), np.nan)
    for i, column in enumerate(values.values()):
        matrix[keys.get_indexer(pd.Index(column.index)), i] = column.to_numpy(np.float64)
    matrix *= 1.0 if higher else -1.0
    rows = []
    for i, j in np.ndindex(len(methods), len(methods)):
        both = np.isfinite(matrix[:, i]) & np.isfinite(matrix[:, j])
        if i == j or not both.any():
            continue
        gap = matrix[both, i] - matrix[both, j]
        rate = float(((gap > 0) + 0.5 * (gap == 0)).mean())
        rows.append({"method": methods[i], "against": methods[j], "rate": rate, "n": int(both.sum())})
    return pd.DataFrame(rows, columns=pd.Index(["method", "against", "rate", "n"]))


def scaled(scores: pd.DataFrame, higher: dict[str, bool]) -> pd.DataFrame:
    """Scale each metric to [0, 1] over the methods, 1 the best of them.

    Parameters
    ----------
    scores
        Methods × metrics.
    higher
        For each metric whether larger values are better.

    Returns
    -------
    DataFrame
        Same shape. A metric on which all methods are equal is 1 throughout, undefined scores stay NaN.
    """
    columns = {}
    for name in scores.columns:
        values = scores[name].to_numpy(np.float64) * (1.0 if higher[str(name)] else -1.0)
        defined = values[np.isfinite(values)]
        low, high = (defined.min(), defined.max()) if defined.size else (0.0, 0.0)
        even = np.where(np.isfinite(values), 1.0, np.nan)
        columns[name] = (values - low) / (high - low) if high > low else even
    return pd.DataFrame(columns, index=scores.index)


def ranks(scores: pd.Series, direction: str) -> pd.Series:
    """Return 1 for the best, 2 for the second, .... Equal scores share a rank, undefined ones have NaN.

    ``direction`` is higher, lower, one (closest to 1 is best) or none (no ranks).
    """
    if direction == "none":
        return pd.Series(np.nan, index=scores.index)
    if direction == "one":
        return (scores - 1.0).abs().rank(method="min")
    return scores.rank(ascending=direction == "lower", method="min")


@dataclass(frozen=True)
class Alike:
    """The collapse check of a run with its pairs by name: columns first, second, real, predicted."""

    found: Collapse
    pairs: pd.DataFrame


def alike(real: pd.DataFrame, predicted: pd.DataFrame) -> Alike | None:
    """Compare how alike predicted changes are between perturbations with how alike the real ones are.

    Parameters
    ----------
    real, predicted
        Changes [perturbations × genes], see `perturbdiff.evaluation.metrics.bounds.changes`. What both have is used.

    Returns
    -------
    Alike or None
        None with fewer than two perturbations or genes.
    """
    x, y = shared(real, predicted)
    result = collapse(x.to_numpy(np.float64), y.to_numpy(np.float64))
    if result is None:
        return None
    names, pairs = x.index.to_numpy(), result.pairs
    columns = {"first": names[pairs.first], "second": names[pairs.second]}
    return Alike(result, pd.DataFrame({**columns, "real": pairs.real, "predicted": pairs.predicted}))
