"""Sections on whole methods: ranked tables, distances and realism at a glance, seeds, methods against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures import condition_plots, number_texts, page_tables, score_plots, seed_means
from perturbdiff.reporting.figures.number_texts import number
from perturbdiff.reporting.figures.page_tables import Cell, Table
from perturbdiff.reporting.figures.score_plots import Forest
from perturbdiff.reporting.figures.svg import Plot, slug
from perturbdiff.reporting.loading.comparison import compare, paired, scaled, win_rates
from perturbdiff.reporting.loading.metric_columns import (
    ENERGY,
    NO_SPREAD,
    PDCORR,
    Column,
    further_columns,
    named,
    radar_columns,
    realism_columns,
    score_table,
    table_columns,
)
from perturbdiff.reporting.loading.results import POOLED, Scope
from perturbdiff.reporting.sections.cautions import sentence
from perturbdiff.reporting.sections.cell_sections import cell_figures, opponent_cells
from perturbdiff.reporting.sections.chapter_data import ChapterData, Section
from perturbdiff.reporting.sections.standing import chance

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


_LEAST_FOR_RADAR = 3  # metrics
_FOREST = (
    "Means with 95 % intervals, methods by their mean rank. Dashed: chance. Solid: ceiling. Look for intervals that "
    "clear chance and come near the ceiling. Where intervals overlap widely there is no clear difference."
)
_RELATIVE = (
    "Every metric runs from the worst (centre) to the best (rim) of these methods. It shows the order, not the size: "
    "two methods with a tiny difference fill the whole range. An undefined score is at the centre."
)
_ABSOLUTE = (
    "The 12 metrics of which more is better, from 0 (centre) to 1 (rim). Values below 0 are at the centre. A good "
    "method is far outside the dashed line of chance and near the ceiling."
)
_INTRO = (
    "A point is a condition, in the colour of the method that is better there. Grey points are ties. Look for points "
    "on one side throughout, rather than for a good mean that a few conditions carry."
)
_NOTE = (
    "Intervals of 95 % are over conditions (bootstrap, 2,000 draws, fixed seed). Conditions share controls and cell "
    "types, so the true uncertainty is somewhat larger."
)
_PAIRS = (
    "How often the method of a row is better than that of a column, in per cent of the conditions that both were "
    "scored on. It is the mean over {n} metrics, and a tie counts half. Orange rows win, blue rows lose. The CSV "
    "holds every metric by itself."
)


def glance(subject: ChapterData) -> Section:
    """Return the section that shows all methods side by side: mean scores, distances and realism of the cells."""
    section = Section("All methods at a glance", f"{subject.anchor}-glance", "At a glance")
    section.figures = [(_forest(subject), _FOREST), *cell_figures(subject)]
    if (spread := over_seeds(subject)) is not None:
        section.parts.append(
            Section("Over seeds", f"{subject.anchor}-seeds", tables=[spread], note=seed_means.ABOUT)
        )
    return section


def further(subject: ChapterData) -> Section:
    """Return what a closer look needs, each part folded: radars, all pairs of methods, the opponent's cells."""
    section = Section("Further figures", f"{subject.anchor}-further")
    section.parts = [s for s in (_radars(subject), _all_pairs(subject), opponent_cells(subject)) if s.filled]
    return section


def _radars(subject: ChapterData) -> Section:
    section = Section("Radars of all scores", f"{subject.anchor}-radars", folded=True)
    if (relative := _relative(subject)) is not None:
        section.figures.append((relative, _RELATIVE))
    if (absolute := _absolute(subject)) is not None:
        section.figures.append((absolute, _ABSOLUTE))
    return section


def _forest(subject: ChapterData) -> Plot:
    panels = [_panel(subject, metric) for metric in subject.key]
    title = f"Mean scores on {subject.name} with 95 % intervals"
    return score_plots.forest(f"{subject.anchor}-forest", title, panels, subject.look)


def _panel(subject: ChapterData, metric: Column) -> Forest:
    rows = []
    for run in subject.ranked:
        low, high = run.interval(metric.name)
        rows.append({"method": run.method, "value": run.score(metric.name)[0], "low": low, "high": high})
    ceiling = subject.ceilings[0].score(metric.name)[0] if subject.ceilings else float("nan")
    return Forest(metric, pd.DataFrame(rows), chance(subject.focus, metric.name), ceiling)


def _relative(subject: ChapterData) -> Plot | None:
    columns = table_columns(subject.every)
    if len(subject.ranked) < 3 or len(columns) < _LEAST_FOR_RADAR:
        return None
    share = scaled(score_table(subject.ranked, columns), {m.name: m.higher for m in columns})
    title = f"Scaled scores on {subject.name}"
    return score_plots.radar(f"{subject.anchor}-radar", title, share, columns, subject.look)


def _absolute(subject: ChapterData) -> Plot | None:
    columns = radar_columns(subject.every)
    scores = score_table(subject.ranked, columns).dropna(axis=1, how="all")
    columns = [c for c in columns if c.name in scores]
    if len(columns) < _LEAST_FOR_RADAR:
        return None
    rows = {r.method: [r.score(c.name)[0] for c in columns] for r in subject.ceilings[:1]}
    rows["chance"] = [chance(subject.focus, c.name) for c in columns]
    known = {name: row for name, row in rows.items() if np.isfinite(row).any()}
    names = pd.Index([c.name for c in columns])
    lines = pd.DataFrame.from_dict(known, orient="index", columns=names) if known else None
    title = f"Scores on {subject.name}"
    return score_plots.radar(f"{subject.anchor}-radar-raw", title, scores, columns, subject.look, lines=lines)


def over_seeds(subject: ChapterData) -> Table | None:
    """Return mean and standard deviation of all methods if any was run with several seeds."""
    lines = seed_means.lines(subject.runs, subject.absent)
    if not seed_means.repeated(lines):
        return None
    return seed_means.table(lines, subject.key, f"{subject.anchor}-over-seeds")


_OPEN = (PDCORR, "DEOver", "AUPRC", ENERGY)


def duels(subject: ChapterData) -> Section:
    """Return the section that compares the first method with its opponent, and every method with every other."""
    other = subject.other
    if other is None:
        return Section(
            "Against another method",
            f"{subject.anchor}-duels",
            intro="A comparison needs a second method: add the metrics of a baseline to this report.",
        )
    title = f"{subject.focus.method} against {other.method}"
    section = Section(title, f"{subject.anchor}-duels", f"Against {other.method}", intro=_INTRO, small=True)
    rest = Section("The other metrics", f"{subject.anchor}-duels-rest", folded=True, small=True)
    for metric in subject.main:
        if (drawn := _duel(subject, metric)) is not None:
            (section if metric.name in _OPEN else rest).figures.append(drawn)
    if not section.figures:
        section.figures, rest.figures = rest.figures, []
    section.parts = [rest] if rest.filled else []
    section.note = _NOTE if section.figures else ""
    return section


def _duel(subject: ChapterData, metric: Column) -> tuple[Plot, str] | None:
    if subject.other is None or metric.direction not in ("higher", "lower"):
        return None
    focus, other = subject.focus, subject.other
    pairs = paired(subject.values(focus, metric.name), subject.values(other, metric.name))
    if pairs.empty:
        return None
    result = compare(pairs, higher=metric.higher)
    digits = number_texts.decimals_for([result.gain])
    gain, *ends = (number(v, digits) for v in (result.gain, *result.gain_interval))
    sentence = (
        f"{focus.method} is better {'above' if metric.higher else 'below'} the line. Mean advantage {gain} "
        f"({ends[0]} to {ends[1]})."
    )
    name = f"{subject.anchor}-{_SHORT.get(metric.name, slug(metric.name))}-duel"
    plot = condition_plots.scatter(name, pairs, metric, (focus.method, other.method), subject.look)
    return plot, sentence


_SHORT = {ENERGY: "energy"}


def _all_pairs(subject: ChapterData) -> Section:
    """Return the folded section of win rates of all methods against each other."""
    section = Section("Every method against every other", f"{subject.anchor}-pairs", folded=True)
    if len(subject.ranked) < 3:
        return section
    parts = []
    columns = table_columns(subject.every) or [m for m in subject.main if m.direction in ("higher", "lower")]
    for metric in columns:
        values = {r.method: subject.values(r, metric.name) for r in subject.ranked}
        parts.append(win_rates(values, higher=metric.higher).assign(metric=metric.name))
    parts = [part for part in parts if len(part)]
    if not parts:
        return section
    table = pd.concat(parts, ignore_index=True)
    methods = [r.method for r in subject.ranked]
    mean = _mean_rates(table, methods)
    order = [methods[i] for i in np.argsort(-np.nan_to_num(np.nanmean(mean, axis=1)), kind="stable")]
    names = pd.Index(methods)
    rates = pd.DataFrame(mean, index=names, columns=names).reindex(index=order, columns=order)
    title = f"Win rates on {subject.name}, mean over metrics"
    plot = score_plots.win_matrix(f"{subject.anchor}-wins", title, rates, table)
    section.figures.append((plot, _PAIRS.format(n=table["metric"].nunique())))
    return section


def _mean_rates(table: pd.DataFrame, methods: Sequence[str]) -> np.ndarray:
    """Return the mean over metrics of the win rates [methods × methods]. A method against itself is a half."""
    mean = table.groupby(["method", "against"])["rate"].mean().to_dict()
    rates = np.full((len(methods), len(methods)), np.nan)
    for i, a in enumerate(methods):
        for j, b in enumerate(methods):
            rates[i, j] = 0.5 if i == j else mean.get((a, b), np.nan)
    return rates
