"""The tables beside the page: means over seeds, costs, failures, and arms of an experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from perturbdiff.reporting.experiments import arm_tables
from perturbdiff.reporting.experiments.experiment import Estimates, frame
from perturbdiff.reporting.figures import seed_means
from perturbdiff.reporting.figures.page_tables import Table, terminal_columns
from perturbdiff.reporting.loading.failed_runs import FailedRun
from perturbdiff.reporting.loading.metric_columns import metric_columns
from perturbdiff.reporting.loading.results import Run
from perturbdiff.runtime import tabular


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
