"""The scores as custom content for MultiQC, so that a pipeline's summary page holds them beside its other tools'."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.metric_columns import ENERGY, Column, key_metrics, metric_columns, named
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.overview import Overview
from perturbdiff.runtime.errors import visible

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
