"""Tables of all scores: methods in rows, ranked, metrics in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perturbdiff.reporting.figures import page_tables
from perturbdiff.reporting.figures.page_tables import Cell, Table
from perturbdiff.reporting.figures.svg import slug
from perturbdiff.reporting.loading.metric_columns import (
    ENERGY,
    NO_SPREAD,
    Column,
    further_columns,
    named,
    realism_columns,
)
from perturbdiff.reporting.loading.results import POOLED, Scope
from perturbdiff.reporting.sections.cautions import sentence
from perturbdiff.reporting.sections.chapter_data import ChapterData

_CONTEXTS = 61  # tables of contexts on the page: their mean and sixty of them
_MEANS = "Populations and mean expression"
_GROUPS = {
    "expression": _MEANS,
    "de": "Differentially expressed genes",
    "distribution": "Populations of cells",
    "count": "Numbers of genes",
}


@dataclass
class ScoreTables:
    """Tables in sight, and those that are folded: further metrics, and by the name of each context."""

    shown: list[Table] = field(default_factory=list)
    further: list[Table] = field(default_factory=list)
    contexts: list[tuple[str, list[Table]]] = field(default_factory=list)


def score_tables(about: ChapterData) -> ScoreTables:
    """Return all score tables of one data set."""
    shown = _tables(about, about.main)
    if shown:
        shown[-1] = replace(shown[-1], note=_remarks(about))
    real = [c for c in realism_columns(about.every) if c not in about.main]
    if real:
        shown.append(_realism(about, real))
    further = _tables(about, [c for c in further_columns(about.every) if c not in about.main])
    scopes = list(dict.fromkeys(s for r in about.runs for s in r.contexts))
    contexts = [(s[1], _tables(about, about.main, s)) for s in scopes[:_CONTEXTS]]
    return ScoreTables(shown, further, contexts)


def _tables(about: ChapterData, columns: Sequence[Column], scope: Scope = POOLED) -> list[Table]:
    """Return the scores as tables that fit a screen: profiles and populations, genes, what is left."""
    groups: dict[str, list[Column]] = {}
    for column in sorted(columns, key=lambda c: c.name != ENERGY):
        groups.setdefault(_group(column), []).append(column)
    tables = []
    for title, members in groups.items():
        table = page_tables.scores(about.runs, members, about.look, scope, about.absent)
        table = replace(table, title=title, name=f"{table.name}-{slug(title)}")
        tables.append(_greyed(table, [about.worth.get(column.name) for column in members]))
    return tables


def _greyed(table: Table, worth: Sequence[tuple[str, str] | None]) -> Table:
    """Show the columns in grey, with the reason, whose metric cannot tell on these data."""
    grey = [one is not None and one[0] != "keep" for one in worth]
    if not any(grey):
        return table

    def cell(place: int, given: Cell) -> Cell:
        known = worth[place]
        if not grey[place] or known is None:
            return given
        kind = " ".join(word for word in given.kind.split() if word not in ("best", "second"))
        return replace(given, kind=f"{kind} faint", hint=f"{known[0]} on these data: {known[1]}")

    rows = [replace(row, cells=tuple(cell(*pair) for pair in enumerate(row.cells))) for row in table.rows]
    return replace(table, rows=tuple(rows))


def _group(column: Column) -> str:
    return _MEANS if column.name == ENERGY else _GROUPS.get(column.family, "Further metrics")


def _realism(about: ChapterData, columns: Sequence[Column]) -> Table:
    """Return the table of what tells whether predicted cells look like cells, in the order given."""
    table = page_tables.scores(about.runs, columns, about.look, absent=about.absent)
    lacking = [r.score("library_sd_ratio")[1:] for r in about.runs if named(columns, "library_sd_ratio")]
    note = NO_SPREAD if any(defined < total for defined, total in lacking) else ""
    return replace(table, title="Are the cells real?", name=f"{table.name}-realism", note=note)


def _remarks(about: ChapterData) -> str:
    """Return what the reader must know of external methods, each once."""
    made = [r.made_by for r in about.ranked if r.made_by.note]
    return " ".join(dict.fromkeys(f"{m.title or m.baseline}: {sentence(str(m.note))}" for m in made))
