"""Sections on genes: who finds the differentially expressed ones, and whether a method tells perturbations apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures import condition_plots, gene_plots, separation_plot
from perturbdiff.reporting.figures.gene_plots import MOST_PANELS, gene_table
from perturbdiff.reporting.figures.number_texts import number
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.figures.score_plots import MOST_METHODS
from perturbdiff.reporting.figures.svg import Plot
from perturbdiff.reporting.loading.results import POOLED, Run
from perturbdiff.reporting.sections.chapter_data import ChapterData, Section

_RANKED = "PDS_cos"
_PICTURES = 3
_LEAST = 3  # perturbations
_INTRO = (
    "A model that gives every perturbation the same answer can score well on averages, because many perturbations "
    "change the same genes. This check finds it out."
)
_NOTE = (
    "Median correlation of the mean changes of two perturbations, and median size of a predicted change relative to "
    "the real one. Changes of few cells are noisy, and noise makes them look distinct, so compare with the ceiling."
)
_RANKS = (
    "All real changes are ordered by their cosine distance to a predicted one. The rank of the right one is 0 if it is "
    "the nearest. A good method has one tall bar at the left. Dashed: chance."
)
_SIZES = (
    "A dot is a perturbation: the norm of its mean change. Below the dashed line changes are predicted too small. Few "
    "cells add noise, and noise adds to the norm."
)
_PAIRS = (
    "A dot is a pair of perturbations. Dots above the dashed line are predicted more alike than they are."
)
TRUTH = "real cells (truth)"
_SEPARATION = (
    "Genes are split by the real test. A good method follows the first row: true DE genes (above) lie right of the "
    "dashed threshold, the others (below) left of it. The number is the probability that a true DE gene has the "
    "smaller p. 0.5 is a coin's."
)
_COUNTS = (
    "A dot is a perturbation: its number of DE genes in real cells and as predicted. A flat row of dots: the method "
    "gives all perturbations the same strength."
)
_TOP = "The bar is the truth. A method is right where its mark lies on it. An open mark: it does not call the gene DE."
_LIMIT = (
    "Strongest genes: truly changed genes with the largest log₂ fold changes, of the perturbations that change most "
    "genes. ±4.32 is the limit (20-fold) that the default definition sets where a mean is zero."
)
_IN_SIGHT = 3  # perturbations whose genes are in sight


def distinct(subject: ChapterData) -> Section:
    """Return the section on telling perturbations apart."""
    section = Section(
        "Are the predictions distinct?",
        f"{subject.anchor}-distinct",
        "Distinct?",
        intro=_INTRO,
        small=True,
        beside=True,
    )
    if (table := alike_table(subject)) is not None:
        section.tables.append(table)
    if (plot := _ranks(subject)) is not None:
        section.figures.append((plot, _RANKS))
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
        section.figures.append((plot, _SIZES + more))
    pictures = _pictures(subject)
    if pictures:
        anchor = f"{subject.anchor}-alike"
        figures = [(plot, "") for plot in pictures]
        section.parts.append(
            Section(
                "How alike two perturbations are",
                anchor,
                figures=figures,
                note=_PAIRS,
                small=True,
                folded=True,
            )
        )
    section.note = _NOTE if section.tables else ""
    return section


def alike_table(subject: ChapterData) -> Table | None:
    """Return the collapse check, a line per method, or None if no run holds what it needs."""
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
    effects = subject.effects.get(run.method)
    if effects is None or effects.collapse is None:
        return None
    check = effects.collapse
    return {"predicted": check.predicted, "real": check.real, "ratio": check.ratio, "verdict": check.verdict}


def _ranks(subject: ChapterData) -> Plot | None:
    ranks: dict[str, np.ndarray] = {}
    total = 0
    for run in subject.panels(len(subject.runs)):
        scores = _pooled_scores(run)
        if not total:
            total = len(scores)
        if len(scores) == total and total >= _LEAST:
            ranks[run.method] = np.round((1.0 - scores) * total).astype(np.int64)
    if not ranks:
        return None
    title = f"Ranks of the right perturbation on {subject.name}"
    return gene_plots.rank_histograms(f"{subject.anchor}-ranks", title, ranks, total, subject.look)


def _pooled_scores(run: Run) -> np.ndarray:
    rows = run.pooled
    values = rows.loc[(rows["metric"] == _RANKED).to_numpy(), "value"].to_numpy(np.float64)
    return values[np.isfinite(values)]


def _pictures(subject: ChapterData) -> list[Plot]:
    """Return pictures of pairs for the first few methods whose predictions change anything."""
    figures = []
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
        name = f"{subject.anchor}-alike-{len(figures)}"
        figures.append(condition_plots.alike(name, run.method, table, subject.look))
        if len(figures) == _PICTURES:
            break
    return figures


def genes(subject: ChapterData) -> Section:
    """Return the section on differentially expressed genes."""
    section = Section("Differentially expressed genes", f"{subject.anchor}-genes", "Genes")
    shown = [r for r in subject.panels(len(subject.runs)) if r.method in subject.effects]
    if shown:
        section.figures += _pooled(subject, [r.method for r in shown])
    strongest = _strongest(subject)
    section.figures += [(plot, _TOP) for plot in strongest[:_IN_SIGHT]]
    section.note = _LIMIT if strongest else ""
    rest = Section("More perturbations", f"{subject.anchor}-top-genes-rest", folded=True, small=True)
    rest.figures = [(plot, "") for plot in strongest[_IN_SIGHT:]]
    section.parts = [part for part in (rest, _tables(subject)) if part.filled]
    return section


def _pooled(subject: ChapterData, methods: list[str]) -> list[tuple[Plot, str]]:
    known = subject.effects
    figures = []
    groups = {TRUTH: known[methods[0]].truth, **{m: known[m].predicted for m in methods}}
    if groups[TRUTH].true.sum():
        title = f"Adjusted p of true DE genes and other genes on {subject.name}"
        plot = separation_plot.separations(f"{subject.anchor}-separation", title, groups, subject.focus.alpha)
        figures.append((plot, _SEPARATION + _left(len(groups), MOST_METHODS + 1, "rows")))
    tables_ = {m: known[m].table for m in methods}
    plot = gene_plots.sizes(
        f"{subject.anchor}-de-counts",
        f"Numbers of DE genes on {subject.name}",
        tables_,
        ("de_real", "de_predicted"),
        ("DE genes, real cells", "DE genes, predicted"),
        subject.look,
    )
    figures.append((plot, _COUNTS + _left(len(methods), MOST_PANELS, "panels")))
    return figures


def _left(total: int, shown: int, what: str) -> str:
    return f" The first {shown} of {total} {what}. The CSV holds all." if total > shown else ""


def _strongest(subject: ChapterData) -> list[Plot]:
    """Return the figures of the strongest genes of the perturbations that change most."""
    methods = [r.method for r in (subject.focus, subject.other) if r is not None]
    plots = []
    for i, table in enumerate(subject.genes):
        shown = [m for m in methods if m in table]
        name = f"{subject.anchor}-genes-{i}"
        plots.append(gene_plots.paired_dots(name, table, shown, subject.focus.alpha, subject.look))
    return plots


def _tables(subject: ChapterData) -> Section:
    focus = subject.focus
    prefix = f"{subject.anchor}-genes"
    listed = [
        gene_table(table, focus.method, focus.alpha, f"{prefix}-{i}") for i, table in enumerate(subject.genes)
    ]
    intro = f"As {focus.method} predicts them. Bars share one scale within a table."
    anchor = f"{subject.anchor}-gene-tables"
    return Section("The strongest genes in numbers", anchor, intro=intro, tables=listed, folded=True)
