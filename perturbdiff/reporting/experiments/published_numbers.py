"""Numbers that a paper published, set beside ours where the data set has the same name."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.reporting.experiments.experiment import Estimates
from perturbdiff.reporting.figures.number_texts import decimals_for, number, plus_minus
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.figures.svg import slug
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.tabular import read_texts

_COLUMNS = ("dataset", "method", "metric", "value")
logger = logging.getLogger(__name__)


def read_published(path: Path) -> pd.DataFrame:
    """Read published numbers.

    Parameters
    ----------
    path
        CSV with the columns dataset, method, metric (a name of our catalogue) and value (empty: not given, or
        undefined).

    Returns
    -------
    DataFrame
        These columns, value as float64.

    Raises
    ------
    UserError
        If the table cannot be read, lacks a column, names an unknown metric, repeats a line or holds no number.
    """
    table = read_texts(path, "published results", _COLUMNS, _COLUMNS)
    table = pd.DataFrame(table[list(_COLUMNS)])
    for name in dict.fromkeys(table["metric"]):
        if name not in METRICS:
            raise UserError(
                f"{path}: metric '{name}' is not known{nearest(name, METRICS)}; see docs/metrics.md"
            )
    repeated = table.duplicated(subset=list(_COLUMNS[:3]))
    if repeated.any():
        dataset, method, metric = table.loc[repeated.to_numpy(bool), list(_COLUMNS[:3])].iloc[0]
        raise UserError(f"{path}: two values of {metric} for {method} on {dataset}; leave one")
    return table.assign(value=[_value(path, text) for text in table["value"]])


def _value(path: Path, text: str) -> float:
    try:
        return float(text.strip() or "nan")
    except ValueError:
        raise UserError(f"{path}: '{text}' is not a number; leave it empty if it is not known") from None


def beside(published: pd.DataFrame, every: Sequence[Estimates]) -> list[Table]:
    """Return a table for each collection that a paper has numbers on: ours, then the published ones.

    Groups of the validation part are left out: papers publish results of tests.
    """
    names = {str(name).casefold(): str(name) for name in published["dataset"]}
    tables = []
    for estimates in every:
        group = estimates.group
        called = [group.collection, *(group.datasets if len(group.datasets) == 1 else [])]
        name = next((names[c.casefold()] for c in called if c.casefold() in names), None)
        if name is not None and group.part != "valid":
            tables.append(_table(name, pd.DataFrame(published[published["dataset"] == name]), estimates))
    if not tables:
        logger.info(
            "no published result is on a data set of this report (published: %s)", listing(names.values())
        )
    return tables


def _table(name: str, published: pd.DataFrame, estimates: Estimates) -> Table:
    held = set(published["metric"])
    columns = [m for m in estimates.group.metrics if m.name in held]
    values = published.set_index(["method", "metric"])["value"].to_dict()
    methods = list(dict.fromkeys(published["method"]))
    lines = [line for line in estimates.group.lines if line.entries and line.kind != "ceiling"]
    ours = [(line, [estimates.of(line, m.name) for m in columns]) for line in lines]
    theirs = [[float(values.get((method, m.name), math.nan)) for m in columns] for method in methods]
    digits = [
        decimals_for([*(row[i].mean for _, row in ours), *(row[i] for row in theirs)])
        for i in range(len(columns))
    ]
    rows = [
        Row(
            line.label,
            (
                Cell("here"),
                *(
                    _cell(e.mean, n, e.sd, m)
                    for e, n, m in zip(row, digits, columns, strict=True)
                ),
            ),
            line.kind,
        )
        for line, row in ours
    ]  # fmt: skip
    rows += [
        Row(
            method,
            (
                Cell("paper"),
                *(_cell(v, n, math.nan, m) for v, n, m in zip(row, digits, columns, strict=True)),
            ),
        )
        for method, row in zip(methods, theirs, strict=True)
    ]
    rows += _differences(ours, dict(zip(methods, theirs, strict=True)), columns)
    heads = ("Method", "from", *(m.heading for m in columns))
    return Table(heads, tuple(rows), f"{estimates.group.title}", name=f"published-{slug(name)}")


def _differences(
    ours: Sequence[tuple[Any, Sequence[Any]]],
    theirs: Mapping[str, Sequence[float]],
    columns: Sequence[Column],
) -> list[Row]:
    """Return how far each method is from the published one of its name, relative to the published value."""
    rows = []
    for line, row in ours:
        if line.label not in theirs:
            continue
        pairs = zip(row, theirs[line.label], columns, strict=True)
        cells = (_relative(e.mean, e.sd, value, m) for e, value, m in pairs)
        rows.append(Row(line.label, (Cell("difference"), *cells)))
    return rows


def _relative(here: float, sd: float, paper: float, metric: Column) -> Cell:
    share = (here - paper) / abs(paper) if paper else math.nan
    if math.isnan(share):
        return Cell(number(math.nan, 0), "num na", hint=metric.label, value=math.nan)
    within = not math.isnan(sd) and abs(here - paper) <= 2 * sd
    text = f"{100 * share:+.1f} %".replace("-", "−")
    return Cell(text, "num", "within 2 s.d. of the seeds" if within else "", hint=metric.label, value=share)


def _cell(value: float, digits: int, sd: float, metric: Column) -> Cell:
    if not math.isnan(value) and value != 0 and abs(value) < 10.0**-digits:
        text = f"{value:.2e}".replace("-", "−")
    else:
        text = number(value, digits)
    kind = "num na" if math.isnan(value) else "num"
    note = plus_minus(sd, digits)
    return Cell(text, kind, note, hint=metric.label, value=value)


NOTE = (
    "Published values are one run each, on the paper’s own preprocessing, split and number of predicted "
    "cells. Equal names do not make them the same test. Compare orders of methods first, then sizes. Differences are "
    "relative to the published value."
)
