"""The report's chapter on one data set: its sections, its score tables and its warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from perturbdiff.report import tables
from perturbdiff.report.comparison import ranks
from perturbdiff.report.layout import Section, drawn
from perturbdiff.report.results import (
    PDCORR,
    Column,
    Run,
    further_columns,
    named,
    score_table,
)
from perturbdiff.report.sections_cells import cells
from perturbdiff.report.sections_distinct import distinct
from perturbdiff.report.sections_duels import duels
from perturbdiff.report.sections_genes import genes
from perturbdiff.report.sections_scores import overview
from perturbdiff.report.subject import subject
from perturbdiff.report.svg import Look, Plot
from perturbdiff.report.tables import Table, number

_CONTEXTS = 61  # tables of contexts on the page: their mean and sixty of them


@dataclass
class Chapter:
    """Everything the page says about one data set."""

    name: str
    anchor: str
    focus: str
    other: str | None
    sections: list[Section] = field(default_factory=list)
    lead: str = ""
    scores: Table | None = None
    further: Table | None = None
    glossary: list[tuple[str, str]] = field(default_factory=list)
    contexts: list[Table] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def plots(self) -> list[Plot]:
        """Return all figures, for export."""
        return list(drawn(self.sections))


def chapter(number_: int, runs: Sequence[Run], look: Mapping[str, Look], against: str | None) -> Chapter:
    """Build the chapter on one data set from its runs (models first, then baselines, then ceilings).

    Raises
    ------
    UserError
        If ``against`` was not run on this data set, or a table of a run cannot be read.
    """
    about = subject(f"d{number_}", runs, look, against)
    focus, other = about.focus, about.other
    found = Chapter(about.name, about.anchor, focus.method, None if other is None else other.method)
    found.scores = tables.scores(runs, about.main, look)
    if further := [c for c in further_columns(about.every) if c not in about.main]:
        found.further = tables.scores(runs, further, look)
    found.glossary = [(c.heading, c.meaning) for c in about.every if c.meaning]
    scopes = list(dict.fromkeys(s for r in runs for s in r.contexts))
    found.contexts = [tables.scores(runs, about.main, look, s) for s in scopes[:_CONTEXTS]]
    found.lead = _lead(about.ranked, runs, about.main, focus, other)
    found.warnings = _warnings(runs)
    made = (overview(about), duels(about), genes(about), distinct(about), cells(about))
    found.sections = [section for section in made if section.filled or section.intro]
    return found


def _lead(
    ranked: Sequence[Run], runs: Sequence[Run], columns: Sequence[Column], focus: Run, other: Run | None
) -> str:
    """Say in a sentence or two how the first model fares."""
    words = []
    if len(ranked) > 1:
        table = score_table(ranked, columns)
        first = [m for m in columns if ranks(pd.Series(table[m.name]), m.direction).get(focus.method) == 1.0]
        words.append(
            f"{focus.method} is best of {len(ranked)} methods on {len(first)} of {len(columns)} metrics."
        )
    metric = named(columns, PDCORR)
    if metric is not None:
        said = [f"{number(focus.score(metric.name)[0])}"]
        if other is not None:
            said.append(f"{other.method} {number(other.score(metric.name)[0])}")
        said += [f"{run.method} {number(run.score(metric.name)[0])}" for run in runs if run.kind == "ceiling"]
        rest = f" ({', '.join(said[1:])})" if said[1:] else ""
        words.append(f"Its predicted changes correlate with the real ones at {said[0]}{rest}.")
    return " ".join(words)


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Say what makes the runs of one data set less than comparable."""
    found = []
    name = runs[0].dataset
    definitions = sorted({r.definition for r in runs})
    if len(definitions) > 1:
        found.append(
            f"{name}: the metrics were computed by different definitions ({', '.join(definitions)})."
        )
    truths = {
        str(entry.get("sha256"))
        for r in runs
        if isinstance(entry := (r.manifest.get("inputs") or {}).get("truth"), dict)
    }
    if len(truths) > 1:
        found.append(f"{name}: the runs were scored against different truths.")
    replaced = {r.method: r.summary.get("control_groups_replaced") for r in runs}
    found += [
        f"{name}: {method} came with other control cells in {groups} groups; the real ones were used."
        for method, groups in replaced.items()
        if groups
    ]
    sets = {r.method: frozenset(_perturbations(r)) for r in runs if r.kind != "ceiling"}
    if len(set(sets.values())) > 1:
        sizes = ", ".join(f"{m} {len(s)}" for m, s in sets.items())
        found.append(
            f"{name}: the methods were scored on different perturbations ({sizes}); compare with care."
        )
    return found


def _perturbations(run: Run) -> list[str]:
    return sorted(set(run.pooled["perturbation"]))
