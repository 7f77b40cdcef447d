"""Runs of one method that differ only in their seed: which they are, and what they are called together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
