"""The numbers of the page: what its scripts read (points, figures, cards), tables beside it, and MultiQC's content."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.reporting.experiments import arm_tables
from perturbdiff.reporting.experiments.experiment import Estimates, frame
from perturbdiff.reporting.figures import seed_means
from perturbdiff.reporting.figures.page_tables import Table, terminal_columns
from perturbdiff.reporting.figures.perturbation_table import PerturbationTable
from perturbdiff.reporting.figures.svg import Look, Plot, page_color
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.metric_columns import ENERGY, Column, key_metrics, metric_columns, named
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.overview import Overview
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import visible

_DIGITS = 7  # of a number in a download: the files beside the page hold all digits
_MOST_FIELDS = 400_000
"""Fields of a table that the page holds. Of a larger one it holds the first rows and says so."""


class _Pool:
    """Texts that the page holds once, by number."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def code(self, text: str) -> int:
        return self.texts.setdefault(visible(text), len(self.texts))


def page_data(
    plots: Iterable[Plot], look: Mapping[str, Look], tables: Sequence[PerturbationTable] = ()
) -> str:
    """Return a record for a script element of the page: JSON, packed with gzip, as base64.

    Parameters
    ----------
    plots
        Every figure on the page.
    look
        The methods that can be switched off, with their colours and markers.
    tables
        The tables of perturbations, for their cards.

    Returns
    -------
    str
        ``texts`` are pooled and meant by their numbers, ``methods`` hold colours and markers, ``figures`` named points
        and columns of numbers by figure, ``cards`` what a row of a table of perturbations opens. Texts hold no
        character that hides or reorders others.
    """
    pool = _Pool()
    figures = {plot.name: _figure(plot, pool) for plot in plots}
    cards = {one.table.name: _rounded(one.cards) for one in tables}
    methods = {visible(name): [page_color(one.color), one.marker] for name, one in look.items()}
    record = {"texts": list(pool.texts), "methods": methods, "figures": figures, "cards": cards}
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _figure(plot: Plot, pool: _Pool) -> dict[str, Any]:
    points = plot.points
    record: dict[str, Any] = {"title": pool.code(plot.title)}
    if len(points.x):
        record["x"], record["y"] = (_short(v) for v in (points.x, points.y))
        record["m"] = [pool.code(text) for text in points.methods]
        record["n"] = [pool.code(text) for text in points.names]
        record["v"] = [visible(text) for text in points.values]
    shown = max(1, _MOST_FIELDS // max(1, len(plot.data.columns)))
    record["columns"] = [_column(name, plot.data[name].iloc[:shown], pool) for name in plot.data.columns]
    if shown < len(plot.data):
        record["rows"] = len(plot.data)
    return record


def _column(name: object, values: pd.Series, pool: _Pool) -> list[Any]:
    """Return a column as its name, whether it holds texts, and its values: codes of texts, or numbers."""
    if isinstance(values.dtype, pd.CategoricalDtype) or not pd.api.types.is_numeric_dtype(values):
        return [visible(str(name)), 1, [pool.code("" if _missing(v) else str(v)) for v in values]]
    if pd.api.types.is_bool_dtype(values):
        return [visible(str(name)), 1, [pool.code(str(v)) for v in values]]
    return [visible(str(name)), 0, _numbers(values.to_numpy())]


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _numbers(values: np.ndarray) -> list[Any]:
    """Return numbers as JSON has them. NaN is null, infinities are texts."""
    if values.dtype.kind in "iu":
        return values.tolist()
    return [number(float(value), _DIGITS) for value in values]


def number(value: float, digits: int) -> Any:
    """Return a number of so many digits for JSON: whole ones without a point, NaN as null, infinities as texts."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _short(values: np.ndarray) -> list[Any]:
    return [number(float(value), 6) for value in values]


def _rounded(value: Any) -> Any:
    """Return cards with numbers as JSON has them, of four digits."""
    if isinstance(value, Mapping):
        return {visible(str(key)): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, str):
        return visible(value)
    return number(value, 4) if isinstance(value, float) else value


def write_tables(
    folder: Path, runs: Sequence[Run], absent: Sequence[FailedRun], trained: Table | None
) -> None:
    """Write ``over_seeds``, ``trained`` and ``failed`` into an existing folder, each as CSV, the first two as Markdown.

    Parameters
    ----------
    runs, absent
        Scored runs and failed runs of all data sets.
    trained
        Table of costs (see `trained_models.trained`).
    """
    frames, texts = [], []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        of = [run for run in runs if run.dataset == dataset]
        lines = seed_means.lines(of, [one for one in absent if one.dataset == dataset])
        columns = metric_columns(of)
        frames.append(seed_means.frame(lines, columns))
        texts.append(f"**{dataset}**\n\n{seed_means.markdown(lines, terminal_columns(columns))}")
    tabular.write_csv(pd.concat(frames, ignore_index=True), folder / "over_seeds.csv")
    (folder / "over_seeds.md").write_text("\n".join(texts), encoding="utf-8")
    rows = [(one.dataset, one.method, one.kind, one.why, ";".join(one.logs)) for one in absent]
    names = pd.Index(["dataset", "method", "kind", "reason", "log"])
    tabular.write_csv(pd.DataFrame(rows, columns=names), folder / "failed.csv")
    shown = trained or Table(("Method",), ())
    tabular.write_csv(_frame(shown), folder / "trained.csv")
    (folder / "trained.md").write_text(_markdown(shown), encoding="utf-8")


def write_arms(folder: Path, groups: Sequence[Estimates]) -> None:
    """Write ``arms`` into an existing folder: every metric as CSV, the main ones as Markdown, a table per group."""
    tabular.write_csv(frame(groups), folder / "arms.csv")
    (folder / "arms.md").write_text(arm_tables.markdown(groups), encoding="utf-8")


def _frame(table: Table) -> pd.DataFrame:
    """Return a table's numbers as they are (seconds, MiB) and its texts. NaN stays empty."""
    rows = [
        [row.head, *(cell.text if cell.value is None else cell.value for cell in row.cells), row.note]
        for row in table.rows
    ]
    return pd.DataFrame(rows, columns=pd.Index([*table.columns, "note"]))


def _markdown(table: Table) -> str:
    """Return a table as it is read. Notes stand below it."""
    rows = [[row.head, *(_field(cell.text, cell.value) for cell in row.cells)] for row in table.rows]
    notes = dict.fromkeys(f"- {row.head}: {row.note}\n" for row in table.rows if row.note)
    return seed_means.markdown_table(list(table.columns), rows) + ("\n" if notes else "") + "".join(notes)


def _field(text: str, value: float | None) -> str:
    return "" if value is not None and math.isnan(value) else text


_PARENT = {
    "parent_id": "perturbdiff",
    "parent_name": "perturbdiff",
    "parent_description": "Predicted single-cell responses to perturbations, scored against real cells.",
}
_MOST_VALUES = 2000  # of a method's conditions in the box plot
_STATUS = {"status": {"title": "Status", "description": "Methods that have no scores", "scale": False}}
_SCALES = {"higher": "RdYlGn", "lower": "RdYlGn-rev"}


def write_multiqc(
    data_sets: Sequence[tuple[ChapterData, Overview]], folder: Path, absent: Sequence[FailedRun] = ()
) -> None:
    """Write ``*_mqc.json`` files into a folder: scores, the general statistics, distances per condition.

    Parameters
    ----------
    data_sets
        Each with its verdict.
    folder
        An existing folder. MultiQC finds the files by their names.
    absent
        Methods that failed, on any data set.
    """
    runs = [run for about, _ in data_sets for run in about.runs]
    several = len({*(run.dataset for run in runs), *(one.dataset for one in absent)}) > 1
    columns = metric_columns(runs)
    contents = {
        "scores": _scores(data_sets, columns, absent, several=several),
        "general": _general(runs, columns, several=several),
    }
    energy = named(columns, ENERGY)
    if energy is not None:
        contents["energy_distance"] = _boxes(runs, energy, several=several)
    for name, content in contents.items():
        text = json.dumps(_escaped(content), indent=1, ensure_ascii=False, allow_nan=False)
        (folder / f"perturbdiff_{name}_mqc.json").write_text(f"{text}\n", encoding="utf-8")


def _escaped(value: Any) -> Any:
    """Return content whose texts are no HTML, as which MultiQC would show them."""
    if isinstance(value, dict):
        return {html.escape(visible(key)): _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return html.escape(visible(value)) if isinstance(value, str) else value


def sample(run: Run, *, several: bool) -> str:
    """Return the name of a run in MultiQC: its method, and its data set where there are several."""
    return f"{run.dataset} | {run.method}" if several else run.method


def _scores(
    data_sets: Sequence[tuple[ChapterData, Overview]],
    columns: Sequence[Column],
    absent: Sequence[FailedRun],
    *,
    several: bool,
) -> dict[str, Any]:
    runs = [run for about, _ in data_sets for run in about.runs]
    verdicts = [f"{about.name}: {over.focus}: {over.verdict.title}." for about, over in data_sets]
    verdicts += [f"{one.dataset}: {one.method} failed: {one.short}." for one in absent]
    return {
        "id": "perturbdiff_scores",
        **_PARENT,
        "section_name": "Scores",
        "description": " ".join(
            [*verdicts, "Means over perturbations. Of populations of cells, means over conditions."]
        ),
        "plot_type": "table",
        "pconfig": {
            "id": "perturbdiff_scores_table",
            "title": "perturbdiff: scores",
            "namespace": "perturbdiff",
            "col1_header": "Method",
            "save_file": True,
        },
        "headers": {**(_STATUS if absent else {}), **{c.name: _header(c) for c in columns}},
        "data": {**_values(runs, columns, several=several), **_failed(absent, several=several)},
    }


def _failed(absent: Sequence[FailedRun], *, several: bool) -> dict[str, dict[str, str]]:
    """Return the rows of methods that have no scores."""
    names = [f"{one.dataset} | {one.method}" if several else one.method for one in absent]
    return {name: {"status": "failed"} for name in names}


def _general(runs: Sequence[Run], columns: Sequence[Column], *, several: bool) -> dict[str, Any]:
    few = key_metrics(columns)
    return {
        "id": "perturbdiff_general",
        "plot_type": "generalstats",
        "headers": {f"perturbdiff_{c.name}": {**_header(c), "namespace": "perturbdiff"} for c in few},
        "data": {
            name: {f"perturbdiff_{metric}": value for metric, value in values.items()}
            for name, values in _values(runs, few, several=several).items()
        },
    }


def _boxes(runs: Sequence[Run], metric: Column, *, several: bool) -> dict[str, Any]:
    data = {}
    for run in runs:
        values = np.sort(run.values(metric.name).to_numpy(np.float64))
        if len(values) > _MOST_VALUES:  # evenly spaced ones draw the same box
            values = values[np.linspace(0, len(values) - 1, _MOST_VALUES).round().astype(np.int64)]
        if len(values):
            data[sample(run, several=several)] = [float(v) for v in values]
    return {
        "id": "perturbdiff_energy_distance",
        **_PARENT,
        "section_name": "Distance between populations",
        "description": "Energy distance between predicted and real cells of each condition. 0 for equal populations.",
        "plot_type": "box",
        "pconfig": {
            "id": "perturbdiff_energy_distance_plot",
            "title": "perturbdiff: energy distance per condition",
            "xlab": "Energy distance",
        },
        "data": data,
    }


def _header(column: Column) -> dict[str, Any]:
    return {
        "title": column.label,
        "description": f"{column.meaning or column.label} {column.arrow}".strip(),
        "format": "{:,.3f}",
        "scale": _SCALES.get(column.direction, False),
    }


def _values(runs: Sequence[Run], columns: Sequence[Column], *, several: bool) -> dict[str, dict[str, float]]:
    """Return what is defined. MultiQC leaves a field empty that is not there."""
    defined = {}
    for run in runs:
        scores = {c.name: run.score(c.name)[0] for c in columns}
        defined[sample(run, several=several)] = {n: v for n, v in scores.items() if math.isfinite(v)}
    return defined
