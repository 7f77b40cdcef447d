"""Means of arms over data sets and seeds, their intervals, and paired differences to a reference arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from perturbdiff.evaluation.scoring.intervals import bootstrap_nested
from perturbdiff.report.experiments.run_groups import Group, Line, Units

DRAWS = 2000
_SEED = 0


@dataclass(frozen=True)
class Difference:
    """Mean of an arm minus its reference, on what both are scored on, with its 95 % interval; NaN if unknown."""

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
        Sample standard deviation over seeds of a seed's mean over the data sets (n − 1); NaN for fewer than two.
    lowest, highest
        Of the seeds' means.
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
        """Return a metric of a line; all unknown if no run of it holds the metric."""
        return self._found.get((line.label, metric), _UNKNOWN)

    def reference(self, line: Line) -> Line | None:
        """Return whom a line is compared with, see `Group.reference`."""
        return self.group.reference(line, self.against)

    @cached_property
    def _found(self) -> dict[tuple[str, str], Estimate]:
        found = {}
        for line in self.group.lines:
            if line.entries:
                other = self.reference(line)
                for metric, estimate in _estimates(line, other).items():
                    found[line.label, metric] = estimate
        return found


def _estimates(line: Line, reference: Line | None) -> dict[str, Estimate]:
    over = _over_units(line.averaged)
    gap = {} if reference is None else _over_units(_gaps(line.averaged, reference.averaged))
    by_seed = _by_seed(line)
    found = {}
    for metric, (mean, low, high, datasets, conditions) in over.items():
        values = by_seed[metric].dropna().to_numpy(np.float64) if metric in by_seed else np.empty(0)
        several = len(values) > 1
        found[metric] = Estimate(
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
    return found


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
    """Return differences on the units that both have, NaN where one is not defined; data sets that both have."""
    found = {}
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
        found[name] = Units(tables)
    return found


def _over_units(tables: Mapping[str, Units]) -> dict[str, tuple[float, float, float, int, int]]:
    """Return of each metric its mean over data sets, interval, and numbers of data sets and of units."""
    found = {}
    for kind in dict.fromkeys(kind for units in tables.values() for kind in units.tables):
        own = [tables[name].tables[kind] for name in sorted(tables) if kind in tables[name].tables]
        metrics = sorted({str(m) for table in own for m in table.columns})
        values = [table.reindex(columns=metrics).to_numpy(np.float64) for table in own]
        low, high = bootstrap_nested(values, draws=DRAWS, seed=_SEED)
        counts = np.stack([(~np.isnan(v)).sum(axis=0) for v in values])
        for i, metric in enumerate(metrics):
            known = [
                v[:, i][~np.isnan(v[:, i])].mean() for v, n in zip(values, counts[:, i], strict=True) if n
            ]
            if metric not in found or known:
                mean = float(np.mean(known)) if known else math.nan
                ends = float(low[i]), float(high[i])
                found[metric] = (mean, *ends, len(known), int(counts[:, i].sum()))
    return found


def frame(every: Sequence[Estimates]) -> pd.DataFrame:
    """Return a row per line and metric of all groups, with the columns `COLUMNS`; a failed line has one row."""
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
