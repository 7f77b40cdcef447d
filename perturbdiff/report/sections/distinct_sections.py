"""Section on whether a method tells perturbations apart: ranks, sizes of change, the collapse check."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.report.figures import condition_plots, gene_plots
from perturbdiff.report.figures.gene_plots import MOST_PANELS
from perturbdiff.report.figures.page_tables import Cell, Row, Table, number
from perturbdiff.report.figures.svg import Plot
from perturbdiff.report.loading.results import POOLED, Run
from perturbdiff.report.sections.chapter_data import ChapterData
from perturbdiff.report.sections.layout import Section

_RANKED = "PDS_cos"
_PICTURES = 3
_LEAST = 3  # perturbations


def distinct(subject: ChapterData) -> Section:
    """Return the section on telling perturbations apart."""
    found = Section("Are the predictions distinct?", f"{subject.anchor}-distinct", intro=_INTRO)
    if (table := alike_table(subject)) is not None:
        found.tables.append(table)
    if (plot := _ranks(subject)) is not None:
        found.figures.append((plot, _RANKS))
    methods = [r.method for r in subject.panels(len(subject.runs)) if r.method in subject.effects]
    if methods:
        plot = gene_plots.sizes(
            f"{subject.anchor}-change-sizes",
            f"Sizes of the mean change on {subject.name}",
            {m: subject.effects[m].table for m in methods},
            ("size_real", "size_predicted"),
            ("real change (norm, log1p)", "predicted change (norm)"),
            subject.look,
        )
        more = f" {MOST_PANELS} of {len(methods)} methods." if len(methods) > MOST_PANELS else ""
        found.figures.append((plot, _SIZES + more))
    pictures = _pictures(subject)
    if pictures:
        anchor = f"{subject.anchor}-alike"
        figures = [(plot, "") for plot in pictures]
        found.parts.append(
            Section("How alike two perturbations are", anchor, figures=figures, note=_PAIRS, small=True)
        )
    found.note = _NOTE if found.tables else ""
    return found


_INTRO = (
    "A model that gives every perturbation the same answer can score well on averages, since many perturbations "
    "change the same genes. Here it is found out."
)
_NOTE = (
    "Median Pearson correlation of the mean change between two perturbations, among predictions and among real cells, "
    "and the median size of a predicted change relative to the real one. Changes of few cells are noisy, and noise "
    "makes them look distinct: compare with the ceiling."
)
_RANKS = (
    "All real changes are ordered by their cosine distance to a predicted change; the rank of the right one is 0 if "
    "it is the nearest. A good method has one tall bar at the left. Along the dashed line the ranks are as even as by "
    "chance. Over all contexts pooled; PDS is 1 − the mean rank / the number of perturbations."
)
_SIZES = (
    "A dot is a perturbation: the Euclidean norm over genes of its mean change from control. Below the dashed line "
    "changes are predicted too small; few cells add noise, and noise adds to the norm."
)
_PAIRS = (
    "Each dot is a pair of perturbations. Dots above the dashed line are predicted more alike than they are."
)


def alike_table(subject: ChapterData) -> Table | None:
    """Return the collapse check, a line per method; None if no run holds what it needs."""
    rows = []
    for run in subject.runs:
        record = _record(subject, run)
        if record is None:
            continue
        values = [float(record[key]) for key in ("predicted", "real", "ratio")]
        cells = (*(Cell(number(v, 2), "num", value=v) for v in values), Cell(str(record["verdict"])))
        rows.append(Row(run.method, cells, run.kind, subject.look[run.method].color))
    heads = ("Method", "correlation, predicted", "correlation, real", "size, predicted ÷ real", "verdict")
    return Table(heads, tuple(rows), name=f"{subject.anchor}-collapse") if rows else None


def _record(subject: ChapterData, run: Run) -> dict[str, Any] | None:
    """Return the collapse check of the pool: as evaluation wrote it, else from the DE tables."""
    if run.collapse is not None:
        pooled = run.collapse[(run.collapse["scope_kind"] == POOLED[0]).to_numpy()]
        if len(pooled):
            return {str(k): v for k, v in pooled.iloc[0].to_dict().items()}
    found = subject.effects.get(run.method)
    if found is None or found.collapse is None:
        return None
    check = found.collapse
    return {"predicted": check.predicted, "real": check.real, "ratio": check.ratio, "verdict": check.verdict}


def _ranks(subject: ChapterData) -> Plot | None:
    found: dict[str, np.ndarray] = {}
    total = 0
    for run in subject.panels(len(subject.runs)):
        scores = _pooled_scores(run)
        if not total:
            total = len(scores)
        if len(scores) == total and total >= _LEAST:
            found[run.method] = np.round((1.0 - scores) * total).astype(np.int64)
    if not found:
        return None
    title = f"Ranks of the right perturbation on {subject.name}"
    return gene_plots.rank_histograms(f"{subject.anchor}-ranks", title, found, total, subject.look)


def _pooled_scores(run: Run) -> np.ndarray:
    rows = run.pooled
    values = rows.loc[(rows["metric"] == _RANKED).to_numpy(), "value"].to_numpy(np.float64)
    return values[np.isfinite(values)]


def _pictures(subject: ChapterData) -> list[Plot]:
    """Return pictures of pairs for the first few methods whose predictions change anything."""
    found = []
    for run in subject.panels(len(subject.runs)):
        known = subject.effects.get(run.method)
        if known is None or known.collapse is None or not np.isfinite(known.collapse.predicted):
            continue
        pairs, names = known.collapse.pairs, np.array(known.names)
        table = pd.DataFrame(
            {
                "first": names[pairs.first],
                "second": names[pairs.second],
                "real": pairs.real,
                "predicted": pairs.predicted,
            }
        )
        name = f"{subject.anchor}-alike-{len(found)}"
        found.append(condition_plots.alike(name, run.method, table, subject.look))
        if len(found) == _PICTURES:
            break
    return found
