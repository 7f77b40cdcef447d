"""The report's tables as plain data that the template lays out, and the same scores as text for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from perturbdiff.reporting.figures.number_texts import (
    amount,
    decimals_for,
    duration,
    interval,
    memory,
    number,
    plus_minus,
)
from perturbdiff.reporting.figures.svg import Look, slug
from perturbdiff.reporting.loading.comparison import ranks
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.metric_columns import Column, metric_columns, score_table
from perturbdiff.reporting.loading.results import POOLED, Run, Scope

_TERMINAL = ("R2", "PDCorr", "MSE", "PDS_cos", "DEOver", "LFCSpear", "AUPRC", "ES", "energy_distance")


@dataclass(frozen=True)
class Scale:
    """Places on a line from chance (0) to the ceiling (1): ours with its interval, and the best baseline's."""

    ours: float
    low: float
    high: float
    baseline: float
    color: str


@dataclass(frozen=True)
class Cell:
    """One field: its text, CSS classes, a small note below, a longer text on hover, a bar in [-1, 1].

    ``value`` is what the column is sorted by and what a download holds, or without it, the text. ``low`` and ``high``
    are the ends of its interval, ``count`` on how many of how many it is defined, ``scale`` a place between chance
    and ceiling.
    """

    text: str
    kind: str = ""
    note: str = ""
    hint: str = ""
    bar: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: str = ""
    scale: Scale | None = None


@dataclass(frozen=True)
class Row:
    """One line: its head stays in sight when a wide table is scrolled."""

    head: str
    cells: tuple[Cell, ...]
    kind: str = ""
    color: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its column heads. The first names the rows.

    ``name`` is that of its download, ``below`` what stands in small print under each head.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""
    note: str = ""
    name: str = ""
    below: tuple[str, ...] = ()


def scores(
    runs: Sequence[Run],
    columns: Sequence[Column],
    look: Mapping[str, Look],
    scope: Scope = POOLED,
    absent: Sequence[FailedRun] = (),
) -> Table:
    """Return mean scores of one data set: methods × metrics, the best and second best marked per metric.

    Methods are ranked by the mean of their ranks over the metrics. Below stand methods that failed, then ceilings, and
    neither are ranked. A mean is over the perturbations where the metric is defined. If these are not all, their
    number is noted. If there is none, the field says n/a.
    """
    ranked = [r for r in runs if r.kind != "ceiling"]
    every, competing = (score_table(of, columns, scope) for of in (runs, ranked))
    places = {m.name: ranks(pd.Series(competing[m.name]), m.direction) for m in columns}
    decimals = {m.name: decimals_for(every[m.name].to_list()) for m in columns}
    counts = {m.name: _usual([_defined(run, m, scope) for run in runs]) for m in columns}
    rows = []
    ranked = _by_rank(ranked, places)
    for run in [*ranked, *absent, *(r for r in runs if r.kind == "ceiling")]:
        if isinstance(run, FailedRun):
            rows.append(failed(run, len(columns)))
            continue
        cells = []
        for metric in columns:
            place = places[metric.name].to_dict().get(run.method) if len(ranked) > 1 else None
            count = _defined(run, metric, scope)
            count = "" if count == counts[metric.name] else count
            cells.append(_score_cell(run, metric, scope, place, decimals[metric.name], count))
        rows.append(Row(run.method, tuple(cells), run.kind, look[run.method].color))
    heads = [m.heading.replace(f" {m.arrow}", f"\u00a0{m.arrow}") for m in columns]
    below = ("", *("" if _whole(count) else count for count in counts.values()))
    name = f"scores-{slug(runs[0].dataset, *scope)}"
    return Table(("Method", *heads), tuple(rows), scope[1], name=name, below=below)


def _by_rank(runs: Sequence[Run], places: Mapping[str, pd.Series]) -> list[Run]:
    """Return runs by the mean of their ranks, a score that is not defined ranking last."""
    table = pd.DataFrame(places).dropna(axis=1, how="all").fillna(float(len(runs)))
    mean = dict(zip(table.index, table.to_numpy().mean(axis=1), strict=True)) if len(table.columns) else {}
    return sorted(runs, key=lambda run: mean.get(run.method, 0.0))


def failed(one: FailedRun, width: int) -> Row:
    """Return the row of a method that failed, in a table of ``width`` columns after the first."""
    rest = tuple(Cell("–", "num na", value=math.nan) for _ in range(width - 1))
    return Row(one.method, (Cell("failed", "num failed", value=math.nan), *rest), "absent", note=one.short)


def _defined(run: Run, metric: Column, scope: Scope) -> str:
    """Return on how many perturbations a metric is defined. Empty for a single number for all."""
    _, defined, total = run.score(metric.name, scope)
    return f"{defined} of {total}" if total > 1 else ""


def _usual(counts: Sequence[str]) -> str:
    return Counter(counts).most_common(1)[0][0] if counts else ""


def _whole(count: str) -> bool:
    return not count or len(set(count.split(" of "))) == 1


def _score_cell(
    run: Run, metric: Column, scope: Scope, place: float | None, decimals: int, count: str
) -> Cell:
    value = run.score(metric.name, scope)[0]
    kind = "na" if math.isnan(value) else mark(place)
    low, high = run.interval(metric.name, scope)
    spread = plus_minus(run.split_sd(metric.name, scope), decimals)
    note = spread or interval(low, high, decimals)
    return Cell(number(value, decimals), f"num {kind}".strip(), note, "", None, value, low, high, count)


def mark(place: float | None) -> str:
    """Return the CSS class of a score by its rank: the best and the second best are marked."""
    return {1.0: "best", 2.0: "second"}.get(place or 0.0, "")


def ran(runs: Sequence[Run], look: Mapping[str, Look], absent: Sequence[FailedRun] = ()) -> Table:
    """Return what was run: method, data set, what was scored, seeds, versions, definitions, and what failed."""
    rows = []
    for run in runs:
        cells = (
            Cell(run.kind_words),
            Cell(run.dataset),
            Cell(amount(len(set(run.pooled["perturbation"]))), "num"),
            Cell(amount(run.summary.get("num_conditions")), "num"),
            Cell(amount(run.summary.get("num_cells_predicted")), "num"),
            Cell(amount(run.manifest.get("seed")), "num"),
            Cell(run.definition),
            Cell(str(run.manifest.get("versions", {}).get("perturbdiff", "n/a"))),
        )
        rows.append(Row(run.method, cells, run.kind, look[run.method].color))
    for one in absent:
        blank = (Cell("–", "num na"),) * 4
        cells = (Cell("failed", "failed"), Cell(one.dataset), *blank, Cell("–", "na"), Cell("–", "na"))
        rows.append(Row(one.method, cells, "absent", note=one.why))
    heads = (
        "Method",
        "kind",
        "data set",
        "perturbations",
        "conditions",
        "cells predicted",
        "seed of scoring",
        "definition",
        "version",
    )
    return Table(heads, tuple(rows))


def parts(splits: Mapping[str, pd.DataFrame]) -> Table | None:
    """Return conditions and cells per part of each split (columns part, n_cells, cell_type, batch)."""
    rows = []
    for name, split in splits.items():
        for part in ("train", "valid", "test", "unused"):
            of = split[split["part"] == part]
            counts = [len(of), int(of["n_cells"].sum()) if "n_cells" in of else math.nan]
            counts += [
                len(set(of[c])) if c in of else math.nan for c in ("perturbation", "cell_type", "batch")
            ]
            if len(of):
                rows.append(Row(f"{name}: {part}", tuple(Cell(amount(c), "num") for c in counts)))
    heads = ("Split", "conditions", "cells", "perturbation labels", "cell types", "batches")
    return Table(heads, tuple(rows)) if rows else None


def provenance_rows(records: Sequence[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """Return one line per output: (what it is, name, manifest, run record)."""
    rows = []
    for what, name, manifest, run in records:
        results = str(manifest.get("versions", {}).get("perturbdiff", "n/a"))
        hashes = {
            role: entry for role, entry in (manifest.get("inputs") or {}).items() if isinstance(entry, dict)
        }
        inputs = ", ".join(f"{role} {str(e.get('sha256', ''))[:10]}" for role, e in hashes.items())
        full = "\n".join(f"{role}: {e.get('name')} {e.get('sha256')}" for role, e in hashes.items())
        cells = (
            Cell(what),
            Cell(str(manifest.get("stage", "n/a"))),
            Cell(results),
            Cell(amount(manifest.get("seed")), "num"),
            Cell(duration(run.get("wall_seconds")), "num", value=_measured(run.get("wall_seconds"))),
            Cell(duration(run.get("cpu_seconds")), "num", value=_measured(run.get("cpu_seconds"))),
            Cell(memory(run.get("peak_memory_mib")), "num", value=_measured(run.get("peak_memory_mib"))),
            Cell(str(run.get("started", "n/a"))),
            Cell(inputs or "n/a", "code", hint=full),
        )
        rows.append(Row(name, cells))
    heads = (
        "Output",
        "of",
        "stage",
        "version",
        "seed",
        "wall time",
        "CPU time",
        "peak memory",
        "started",
        "inputs",
    )
    return Table(heads, tuple(rows))


def _measured(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def text_scores(runs: Sequence[Run], absent: Sequence[FailedRun] = ()) -> str:
    """Return the main metrics as a text table per data set. Metrics in rows while the methods are few.

    Methods that failed stand in it as such, and below it with the reason.
    """
    blocks = []
    for dataset in dict.fromkeys([*(r.dataset for r in runs), *(one.dataset for one in absent)]):
        of = [r for r in runs if r.dataset == dataset]
        lost = [one for one in absent if one.dataset == dataset]
        why = [f"{one.method} failed: {one.why}" for one in lost]
        if not of:
            blocks.append("\n".join([dataset, *why]))
            continue
        columns = metric_columns(of)
        columns = terminal_columns(columns)
        table = score_table(of, columns)
        shown = {
            m.name: [number(v, decimals_for(table[m.name].to_list())) for v in table[m.name]] for m in columns
        }
        if len(of) + len(lost) <= 3:
            lines = [[dataset, *table.index, *(one.method for one in lost)]]
            lines += [[m.heading, *shown[m.name], *("failed" for _ in lost)] for m in columns]
        else:
            lines = [[dataset, *(m.heading for m in columns)]]
            lines += [[method, *(shown[m.name][i] for m in columns)] for i, method in enumerate(table.index)]
            lines += [[one.method, "failed", *("–" for _ in columns[1:])] for one in lost]
        blocks.append("\n".join([aligned(lines), *why]))
    return "\n\n".join(blocks)


def terminal_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics of the tables on the terminal."""
    return [m for m in columns if m.name in _TERMINAL] or list(columns)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of fields as text, the first row ruled off, the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = [
        "  ".join(
            [line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    return "\n".join([padded[0], "─" * len(padded[0]), *padded[1:]])
