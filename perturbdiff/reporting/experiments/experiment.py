"""An experiment as figures and tables see it: groups with their estimates, looks of arms, and what sizes are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from perturbdiff.evaluation.scoring.intervals import bootstrap_nested
from perturbdiff.reporting.experiments.arm_design import Entry
from perturbdiff.reporting.experiments.run_groups import Group, Line, Units, Work, groups
from perturbdiff.reporting.figures.svg import Look, looks
from perturbdiff.reporting.loading.metric_columns import Column, metric_columns
from perturbdiff.reporting.loading.results import Run
from perturbdiff.runtime.errors import UserError, listing

DRAWS = 2000
_SEED = 0
COLUMNS = (
    "collection",
    "part",
    "arm",
    "level",
    "metric",
    "mean",
    "sd",
    "low",
    "high",
    "datasets",
    "conditions",
    "seeds",
    "reference",
    "difference",
    "difference_low",
    "difference_high",
)


@dataclass(frozen=True)
class Difference:
    """Mean of an arm minus its reference, on what both are scored on, with its 95 % interval, or NaN if unknown."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def clear(self) -> bool:
        """Return whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Estimate:
    """One metric of a line.

    Attributes
    ----------
    mean
        Over data sets of their means over perturbations or conditions, seeds averaged within each of these.
    sd
        Sample standard deviation over seeds of a seed's mean over the data sets (n − 1), or NaN for fewer than two.
    lowest, highest
        Lowest and highest mean of a seed.
    low, high
        95 % bootstrap interval of ``mean`` over data sets and their perturbations or conditions.
    datasets, conditions
        Numbers of data sets, and of perturbations or conditions in them, where the metric is defined.
    seeds
        Number of seeds that the mean is over.
    difference
        To the reference.
    """

    mean: float = math.nan
    sd: float = math.nan
    lowest: float = math.nan
    highest: float = math.nan
    low: float = math.nan
    high: float = math.nan
    datasets: int = 0
    conditions: int = 0
    seeds: int = 0
    difference: Difference = Difference()


_UNKNOWN = Estimate()


@dataclass(frozen=True, eq=False)
class Estimates:
    """Everything that tables and figures need of a group.

    Attributes
    ----------
    against
        The arm asked for as reference.
    """

    group: Group
    against: str | None = None

    def of(self, line: Line, metric: str) -> Estimate:
        """Return a metric of a line. All unknown if no run of it holds the metric."""
        return self._found.get((line.label, metric), _UNKNOWN)

    def reference(self, line: Line) -> Line | None:
        """Return whom a line is compared with, see `Group.reference`."""
        return self.group.reference(line, self.against)

    @cached_property
    def _found(self) -> dict[tuple[str, str], Estimate]:
        estimates = {}
        for line in self.group.lines:
            if line.entries:
                other = self.reference(line)
                for metric, estimate in _estimates(line, other).items():
                    estimates[line.label, metric] = estimate
        return estimates


def _estimates(line: Line, reference: Line | None) -> dict[str, Estimate]:
    over = _over_units(line.averaged)
    gap = {} if reference is None else _over_units(_gaps(line.averaged, reference.averaged))
    by_seed = _by_seed(line)
    estimates = {}
    for metric, (mean, low, high, datasets, conditions) in over.items():
        values = by_seed[metric].dropna().to_numpy(np.float64) if metric in by_seed else np.empty(0)
        several = len(values) > 1
        estimates[metric] = Estimate(
            mean,
            float(values.std(ddof=1)) if several else math.nan,
            float(values.min()) if values.size else mean,
            float(values.max()) if values.size else mean,
            low,
            high,
            datasets,
            conditions,
            len({seed for _, seed in line.tables}),
            Difference(*gap[metric][:3]) if metric in gap else Difference(),
        )
    return estimates


def _by_seed(line: Line) -> pd.DataFrame:
    """Return each seed's means over the data sets [seeds × metrics].

    NaN for a seed that lacks a data set where others have the metric: its mean would be over something else.
    """
    means = pd.DataFrame({place: table.mean() for place, table in line.tables.items()})
    found = {}
    for metric, values in means.iterrows():
        by_dataset = pd.Series(values).unstack(level=1).dropna(axis=0, how="all")
        found[str(metric)] = by_dataset.mean(axis=0, skipna=False)
    return pd.DataFrame(found)


def _gaps(ours: Mapping[str, Units], theirs: Mapping[str, Units]) -> dict[str, Units]:
    """Return differences on the units that both have, NaN where one is not defined, and data sets that both have."""
    gaps = {}
    for name in ours:
        if name not in theirs:
            continue
        tables = {}
        for kind, table in ours[name].tables.items():
            other = theirs[name].tables.get(kind)
            if other is not None:
                rows, columns = (
                    table.index.intersection(other.index),
                    table.columns.intersection(other.columns),
                )
                tables[kind] = (table.loc[rows, columns] - other.loc[rows, columns]).sort_index()
        gaps[name] = Units(tables)
    return gaps


def _over_units(tables: Mapping[str, Units]) -> dict[str, tuple[float, float, float, int, int]]:
    """Return of each metric its mean over data sets, interval, and numbers of data sets and of units."""
    means = {}
    for kind in dict.fromkeys(kind for units in tables.values() for kind in units.tables):
        of_kind = [tables[name].tables[kind] for name in sorted(tables) if kind in tables[name].tables]
        metrics = sorted({str(m) for table in of_kind for m in table.columns})
        values = [table.reindex(columns=metrics).to_numpy(np.float64) for table in of_kind]
        low, high = bootstrap_nested(values, draws=DRAWS, seed=_SEED)
        counts = np.stack([(~np.isnan(v)).sum(axis=0) for v in values])
        for i, metric in enumerate(metrics):
            known = [
                v[:, i][~np.isnan(v[:, i])].mean() for v, n in zip(values, counts[:, i], strict=True) if n
            ]
            if metric not in means or known:
                mean = float(np.mean(known)) if known else math.nan
                ends = float(low[i]), float(high[i])
                means[metric] = (mean, *ends, len(known), int(counts[:, i].sum()))
    return means


def frame(every: Sequence[Estimates]) -> pd.DataFrame:
    """Return a row per line and metric of all groups, with the columns `COLUMNS`. A failed line has one row."""
    rows = []
    for estimates in every:
        group = estimates.group
        for line in group.lines:
            head = (group.collection, group.part, line.arm, line.level)
            if not line.entries:
                rows.append((*head, "", *(math.nan,) * 4, 0, 0, 0, "", *(math.nan,) * 3))
                continue
            other = estimates.reference(line)
            for metric in group.metrics:
                e = estimates.of(line, metric.name)
                numbers = (e.mean, e.sd, e.low, e.high, e.datasets, e.conditions, e.seeds)
                gap = (e.difference.value, e.difference.low, e.difference.high)
                rows.append((*head, metric.name, *numbers, "" if other is None else other.label, *gap))
    return pd.DataFrame(rows, columns=pd.Index(COLUMNS))


@dataclass(frozen=True, eq=False)
class Experiment:
    """All groups of an experiment.

    Attributes
    ----------
    groups
        Collections × parts, in the order of the design.
    look
        How arms are drawn, by name.
    works
        Parameters and operations behind runs, where their bundles were given.
    chapters
        Data sets, and of each what its chapter on the page holds: words and anchors.
    """

    groups: Sequence[Estimates]
    look: Mapping[str, Look]
    works: Mapping[Run, Work] = field(default_factory=dict)
    chapters: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> list[Column]:
        """Return the metrics that any run holds, in the catalogue's order."""
        return metric_columns([e.run for _, line in self.lines for e in line.entries if e.run is not None])

    def name(self, estimates: Estimates) -> str:
        """Return what a group is called in figures: its collection, with the part only where there are both."""
        parts = {one.group.part for one in self.groups}
        return estimates.group.title if len(parts) > 1 else estimates.group.collection

    @property
    def lines(self) -> Iterator[tuple[Estimates, Line]]:
        """Yield every line with its group."""
        for estimates in self.groups:
            for line in estimates.group.lines:
                yield estimates, line


def experiment(
    entries: Sequence[Entry],
    against: str | None = None,
    works: Mapping[Run, Work] | None = None,
    chapters: Mapping[str, Sequence[tuple[str, str]]] | None = None,
) -> Experiment:
    """Return the experiment that a design's entries make.

    Parameters
    ----------
    entries
        See `read_design`.
    against
        The arm that differences are to. Default: the first one of each group.
    works, chapters
        See `Experiment`.

    Raises
    ------
    UserError
        If no arm is called ``against``.
    """
    found = [Estimates(group, against) for group in groups(entries)]
    lines = [line for estimates in found for line in estimates.group.lines]
    arms = list(dict.fromkeys(line.arm for line in lines))
    if against is not None and against not in arms:
        raise UserError(f"no arm '{against}' to compare with; arms: {listing(arms)}")
    order = sorted(arms, key=lambda arm: any(x.kind == "baseline" for x in lines if x.arm == arm))
    ceilings = [arm for arm in arms if any(x.kind == "ceiling" for x in lines if x.arm == arm)]
    look = looks([arm for arm in order if arm not in ceilings], ceilings)
    return Experiment(found, look, works or {}, chapters or {})
