"""The runs of an experiment in groups: data sets in one part, their lines and numbers, and the work behind each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.reporting.experiments.arm_design import Entry
from perturbdiff.reporting.loading.metric_columns import Column, metric_columns
from perturbdiff.reporting.loading.results import POOLED, Run, read_json
from perturbdiff.runtime.files import sha256

_ALL = "*"
_ORDER = {"model": 0, "baseline": 1, "ceiling": 2}


@dataclass(frozen=True, eq=False)
class Line:
    """An arm at a level: its runs over the data sets and seeds of a collection.

    Attributes
    ----------
    level
        NaN for none.
    kind
        model, baseline, ceiling, or failed if nothing of it was scored.
    missing
        Runs of it that failed.
    """

    arm: str
    level: float
    kind: str
    entries: tuple[Entry, ...]
    missing: int = 0

    @property
    def leveled(self) -> bool:
        """Return whether it has a place on the x axis of curves."""
        return not math.isnan(self.level)

    @property
    def label(self) -> str:
        """Return the arm, with its level if it has one."""
        return f"{self.arm}, {self.level:g}" if self.leveled else self.arm

    @property
    def seeds(self) -> list[str]:
        """Return the seeds, each once, or a single empty one where they are not known."""
        return list(dict.fromkeys(e.seed for e in self.entries))

    @property
    def datasets(self) -> list[str]:
        """Return the data sets by name."""
        return sorted({e.dataset for e in self.entries})

    @cached_property
    def tables(self) -> dict[tuple[str, str], Units]:
        """Return the values of every run by data set and seed."""
        return {(e.dataset, e.seed): units(e.run) for e in self.entries if e.run is not None}

    @cached_property
    def averaged(self) -> dict[str, Units]:
        """Return the values per data set, seeds averaged within each perturbation and condition."""
        return {
            name: _averaged([t for (d, _), t in self.tables.items() if d == name]) for name in self.datasets
        }


@dataclass(frozen=True, eq=False)
class Group:
    """One collection in one part: what stands in one table.

    Attributes
    ----------
    part
        valid, test, or empty where it is not known.
    lines
        Models in the order of the design, baselines, ceilings, each by its levels.
    """

    collection: str
    part: str
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        """Return the collection and what was predicted."""
        return f"{self.collection}, {_PARTS[self.part]}" if self.part else self.collection

    @property
    def datasets(self) -> list[str]:
        """Return the data sets by name."""
        return sorted({e.dataset for line in self.lines for e in line.entries})

    @cached_property
    def metrics(self) -> list[Column]:
        """Return the metrics that any run holds."""
        return metric_columns([e.run for line in self.lines for e in line.entries if e.run is not None])

    def reference(self, line: Line, against: str | None) -> Line | None:
        """Return the line that a line is compared with: that of the arm ``against``, or of the first arm.

        It has the same level. If that arm does not have the level, it is its line without a level, or else its first
        level. None for this line itself, and for a line without a level if the arm has several levels.
        """
        arms = list(dict.fromkeys(one.arm for one in self.lines if one.kind in _ORDER))
        arm = against if against in arms else arms[0] if arms else None
        candidates = [one for one in self.lines if one.arm == arm and one.kind in _ORDER]
        flat = [one for one in candidates if not one.leveled]
        if arm != line.arm and line.leveled:
            candidates = [*(one for one in candidates if one.level == line.level), *flat, *candidates]
        elif arm != line.arm and len(candidates) > 1:
            candidates = flat
        return None if not candidates or candidates[0] is line else candidates[0]


_PARTS = {"valid": "validation part", "test": "test part"}


@dataclass(frozen=True, eq=False)
class Units:
    """The values of a run that are averaged: metrics of profiles and genes by perturbation, of cells by condition.

    Attributes
    ----------
    tables
        A table [units × metrics], float64, for each kind of unit (pooled, condition, and one number for all).
    """

    tables: dict[str, pd.DataFrame]

    def mean(self) -> pd.Series:
        """Return every metric's mean over its units where it is defined."""
        means = {str(m): _mean(v) for table in self.tables.values() for m, v in table.items()}
        return pd.Series(means, dtype=np.float64)


def _mean(values: pd.Series) -> float:
    numbers = values.to_numpy(np.float64)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if numbers.size else math.nan


def groups(entries: Sequence[Entry]) -> list[Group]:
    """Return the groups of an experiment, in the order of its design."""
    result = []
    for part, collection in dict.fromkeys((e.part, e.collection) for e in entries):
        members = [e for e in entries if (e.part, e.collection) == (part, collection)]
        result.append(Group(collection, part, tuple(_lines(members))))
    return result


def _lines(entries: Sequence[Entry]) -> list[Line]:
    lines = []
    for arm, level in dict.fromkeys(e.key for e in entries):
        members = [e for e in entries if e.key == (arm, level)]
        scored = tuple(e for e in members if e.run is not None)
        kind = scored[0].kind if scored else "failed"
        lines.append(
            Line(arm, math.nan if level is None else level, kind, scored, missing=len(members) - len(scored))
        )
    arms = list(dict.fromkeys(line.arm for line in lines))
    kinds = {arm: min(_ORDER.get(line.kind, 0) for line in lines if line.arm == arm) for arm in arms}
    return sorted(
        lines, key=lambda x: (kinds[x.arm], arms.index(x.arm), x.leveled, x.level if x.leveled else 0.0)
    )


def units(run: Run) -> Units:
    """Return the values of a run where its means are over.

    A metric is averaged over perturbations of the whole pool where it has values there, else over conditions. A
    number for all perturbations (ES) is a unit by itself.
    """
    table = run.metrics
    kinds = table["scope_kind"].isin((POOLED[0], "condition"))
    table = table.loc[
        kinds.to_numpy(bool), ["scope_kind", "scope", "perturbation", "metric", "value"]
    ].astype({"scope_kind": str, "scope": str, "perturbation": str, "metric": str})
    pooled, single = table["scope_kind"] == POOLED[0], table["perturbation"] == _ALL
    tables: dict[str, pd.DataFrame] = {}
    seen: set[str] = set()
    for name, rows in (
        (POOLED[0], pooled & ~single),
        ("condition", ~pooled & ~single),
        (_ALL, pooled & single),
    ):
        of_kind = table.loc[(rows & ~table["metric"].isin(seen)).to_numpy(bool)]
        if len(of_kind):
            index = ["scope", "perturbation"]
            tables[name] = (
                of_kind.pivot(index=index, columns="metric", values="value").astype(np.float64).sort_index()
            )
            seen |= set(of_kind["metric"])
    return Units(tables)


def _averaged(tables: Sequence[Units]) -> Units:
    """Return means over seeds within each unit, over the seeds where it is defined."""
    if len(tables) == 1:
        return tables[0]
    averaged = {}
    for name in dict.fromkeys(n for t in tables for n in t.tables):
        stacked = pd.concat([t.tables[name] for t in tables if name in t.tables])
        averaged[name] = stacked.groupby(level=[0, 1], sort=True).mean()
    return Units(averaged)


CONVENTION = (
    "FLOPs are counted, not measured: two for each multiply-add of a matrix product in a forward pass, "
    "three times that for forward and backward, one more forward pass in the share of sets that are "
    "self-conditioned. This is multiplied by the cells of a step and by the steps until the weights that were "
    "kept. Loss, optimiser and the reading of data are left out, and so is the pretraining that a finetuned model "
    "started from."
)


@dataclass(frozen=True)
class Work:
    """Of one bundle.

    Attributes
    ----------
    parameters
        Learned numbers of the network.
    steps
        Optimiser steps until the weights in the bundle.
    flops
        Floating-point operations of these steps: two for each multiply-add of a matrix product, a backward pass as
        two forward passes. Of this training alone, without one that it started from.
    """

    parameters: int
    steps: int
    flops: float


def works(bundles: Mapping[Run, Path]) -> dict[Run, Work]:
    """Return the work behind each run, given the bundle it was drawn with.

    Networks of one architecture are built once.

    Raises
    ------
    UserError
        If a bundle is damaged.
    """
    built: dict[str, tuple[int, float]] = {}
    by_run = {}
    for run, path in bundles.items():
        record = read_json(path / "config.json")
        facts, config = record.get("training") or {}, record.get("config") or {}
        words = [sha256(path / name) for name in ("genes.json", "vocabulary.json")]
        key = repr((config.get("model"), config.get("train"), *words))
        if key not in built:
            built[key] = _counted(path)
        steps = int(facts.get("chosen_step") or facts.get("steps") or 0)
        by_run[run] = Work(built[key][0], steps, built[key][1] * steps)
    return by_run


def _counted(path: Path) -> tuple[int, float]:
    """Return parameters, and operations of a step, of the network in a bundle."""
    from perturbdiff.checkpoint.bundle import Bundle  # torch: only pages that need it load it
    from perturbdiff.training.network_size import by_group, flops_per_step

    bundle = Bundle.load(path)
    return sum(by_group(bundle.model).values()), flops_per_step(bundle.model, bundle.config)
