"""Mean and standard deviation over seeds: of one method's runs on one data set, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures.number_texts import decimals_for, number, plus_minus
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table, aligned
from perturbdiff.reporting.loading.comparison import SeedGroup, families, stem
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.loading.results import Run
from perturbdiff.runtime.errors import one_line

COLUMNS = ("dataset", "method", "kind", "n", "seeds", "failed", "metric", "mean", "sd", "n_defined")
ABOUT = (
    "Mean ± standard deviation over runs that differ by their seeds alone (n − 1 in the denominator, none for a single "
    "run). It is the spread of one method from seed to seed on the same test cells. The intervals above tell how well "
    "one run's mean is known."
)


@dataclass(frozen=True)
class Spread:
    """A metric over the seeds of a method: mean and sample standard deviation of its defined values."""

    mean: float
    sd: float
    n: int


@dataclass(frozen=True)
class Line:
    """A method over its seeds, without runs if all of them failed.

    Attributes
    ----------
    failed
        Number of its runs that failed.
    """

    dataset: str
    name: str
    kind: str
    runs: tuple[Run, ...]
    seeds: str = ""
    failed: int = 0

    def spread(self, metric: str) -> Spread:
        """Return a metric's mean and standard deviation, or NaN where it is not defined."""
        values = np.array([run.score(metric)[0] for run in self.runs], dtype=np.float64)
        values = values[np.isfinite(values)]
        mean = float(values.mean()) if values.size else math.nan
        return Spread(mean, float(values.std(ddof=1)) if values.size > 1 else math.nan, int(values.size))

    @property
    def count(self) -> str:
        """Return the number of runs, and of those that failed."""
        return f"{len(self.runs)}{f' ({self.failed} failed)' if self.failed else ''}"


def lines(runs: Sequence[Run], absent: Sequence[FailedRun]) -> list[Line]:
    """Return the methods of one data set over their seeds, ceilings last, then those of which every run failed."""
    left = list(absent)
    methods = []
    for family in families([r for r in runs if r.kind != "ceiling"]):
        failures = [one for one in left if stem(one.method) in _names(family)]
        left = [one for one in left if one not in failures]
        kind, dataset = family.runs[0].kind_words, family.runs[0].dataset
        methods.append(Line(dataset, family.name, kind, family.runs, family.seeds, len(failures)))
    methods += [Line(r.dataset, r.method, r.kind, (r,)) for r in runs if r.kind == "ceiling"]
    for name in dict.fromkeys(stem(one.method) for one in left):
        failures = [one for one in left if stem(one.method) == name]
        called = failures[0].method if len(failures) == 1 else name
        methods.append(Line(failures[0].dataset, called, "failed", (), "", len(failures)))
    return methods


def _names(family: SeedGroup) -> set[str]:
    return {stem(name) for run in family.runs for name in (run.base, run.method)} | {family.name}


def repeated(methods: Sequence[Line]) -> bool:
    """Return whether any method was run with several seeds."""
    return any(len(line.runs) > 1 for line in methods)


def table(methods: Sequence[Line], columns: Sequence[Column], name: str) -> Table:
    """Return methods × metrics, mean with its standard deviation below."""
    digits = _digits(methods, columns)
    rows = []
    for line in methods:
        cells = [Cell(line.count, "num", line.seeds and f"seeds {line.seeds}", value=float(len(line.runs)))]
        for metric in columns:
            spread = line.spread(metric.name)
            text = _lost(line, metric, columns) or number(spread.mean, digits[metric.name])
            note = plus_minus(spread.sd, digits[metric.name])
            fewer = f"{spread.n} of {len(line.runs)}" if 0 < spread.n < len(line.runs) else ""
            kind = "num" if line.runs else "num na"
            cells.append(Cell(text, kind, note, value=spread.mean, count=fewer))
        rows.append(Row(line.name, tuple(cells), "ceiling" if line.kind == "ceiling" else ""))
    return Table(("Method", "runs", *(c.heading for c in columns)), tuple(rows), name=name)


def _digits(methods: Sequence[Line], columns: Sequence[Column]) -> dict[str, int]:
    """Return the decimals of each metric: three digits of a typical mean."""
    chosen = {}
    for metric in columns:
        spreads = [line.spread(metric.name) for line in methods]
        chosen[metric.name] = decimals_for([s.mean for s in spreads])
    return chosen


def _lost(line: Line, metric: Column, columns: Sequence[Column]) -> str:
    """Return what stands in a field of a method without any run. Empty for the others."""
    return "" if line.runs else "failed" if metric is columns[0] else "–"


def text(methods: Sequence[Line], columns: Sequence[Column]) -> str:
    """Return the same for a terminal, one data set."""
    return aligned([[methods[0].dataset, "n", *(c.heading for c in columns)], *_texts(methods, columns)])


def _texts(methods: Sequence[Line], columns: Sequence[Column]) -> list[list[str]]:
    digits = _digits(methods, columns)
    rows = []
    for line in methods:
        fields = [line.name, line.count]
        for metric in columns:
            spread, places = line.spread(metric.name), digits[metric.name]
            mean = f"{number(spread.mean, places)} {plus_minus(spread.sd, places)}".strip()
            fields.append(_lost(line, metric, columns) or mean)
        rows.append(fields)
    return rows


def markdown(methods: Sequence[Line], columns: Sequence[Column]) -> str:
    """Return the same as a table in Markdown, one data set."""
    heads = ["", "runs", *(c.heading for c in columns)]
    return markdown_table(heads, _texts(methods, columns))


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. What a label holds ends no field and is no HTML."""
    ruled = [heads, ["---"] * len(heads), *rows]
    fields = [" | ".join(_field(field) for field in row) for row in ruled]
    return "".join(f"| {line} |\n" for line in fields)


def _field(text: str) -> str:
    """Return a text that ends neither its field nor its line, and that no reader takes for HTML."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def frame(methods: Sequence[Line], columns: Sequence[Column]) -> pd.DataFrame:
    """Return a row per method and metric, with the columns `COLUMNS`."""
    rows = []
    for line in methods:
        for metric in columns if line.runs else columns[:1]:
            spread = line.spread(metric.name)
            who = (line.dataset, line.name, line.kind, len(line.runs), line.seeds, line.failed)
            rows.append((*who, metric.name if line.runs else "", spread.mean, spread.sd, spread.n))
    return pd.DataFrame(rows, columns=pd.Index(COLUMNS))
