"""The report's chapter on one data set: which method is compared with which, its tables, figures and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from perturbdiff.errors import UserError, listing, nearest
from perturbdiff.evaluation.collapse import changes
from perturbdiff.report import plots, tables
from perturbdiff.report.comparison import Alike, alike, compare, paired, ranks, scaled
from perturbdiff.report.results import (
    ENERGY,
    PDCORR,
    POOLED,
    Column,
    Run,
    further_columns,
    main_columns,
    metric_columns,
    named,
    score_table,
)
from perturbdiff.report.svg import Look, Plot
from perturbdiff.report.tables import Cell, Row, Table, number

_CONDITIONS = 6
_CONTEXTS = 61  # tables of contexts on the page: their mean and sixty of them
_COLLAPSE_PLOTS = 3


@dataclass
class Chapter:
    """Everything the page says about one data set."""

    name: str
    anchor: str
    focus: str
    other: str | None
    lead: str = ""
    scores: Table | None = None
    further: Table | None = None
    glossary: list[tuple[str, str]] = field(default_factory=list)
    contexts: list[Table] = field(default_factory=list)
    radar: Plot | None = None
    duels: list[tuple[Plot, str]] = field(default_factory=list)
    energy: Plot | None = None
    cells: list[tuple[str, str, list[Plot]]] = field(default_factory=list)
    genes: list[Table] = field(default_factory=list)
    alike: Table | None = None
    alike_plots: list[Plot] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def plots(self) -> list[Plot]:
        """Return all figures, for export."""
        single = [p for p in (self.radar, self.energy) if p is not None]
        cells = [p for _, _, shown in self.cells for p in shown]
        return [*single, *(p for p, _ in self.duels), *cells, *self.alike_plots]


def chapter(number_: int, runs: Sequence[Run], look: Mapping[str, Look], against: str | None) -> Chapter:
    """Build the chapter on one data set from its runs (models first, then baselines, then ceilings)."""
    every = metric_columns(runs)
    columns = main_columns(every) or every
    anchor = f"d{number_}"
    ranked = [r for r in runs if r.kind != "ceiling"] or list(runs)
    focus = ranked[0]
    other = _opponent(ranked, focus, columns, against)
    found = Chapter(runs[0].dataset, anchor, focus.method, None if other is None else other.method)
    found.scores = tables.scores(runs, columns, look)
    if further := [c for c in further_columns(every) if c not in columns]:
        found.further = tables.scores(runs, further, look)
    found.glossary = [(c.heading, c.meaning) for c in every if c.meaning]
    scopes = list(dict.fromkeys(s for r in runs for s in r.contexts))
    found.contexts = [tables.scores(runs, columns, look, s) for s in scopes[:_CONTEXTS]]
    found.lead = _lead(ranked, runs, columns, focus, other)
    found.warnings = _warnings(runs)
    if len(ranked) > 2:
        share = scaled(score_table(ranked, columns), {m.name: m.higher for m in columns})
        found.radar = plots.radar(f"{anchor}-radar", f"Scaled scores on {found.name}", share, columns, look)
    if other is not None:
        found.duels = _duels(anchor, columns, focus, other, look)
    if (metric := named(columns, ENERGY)) is not None:
        values = {r.method: r.values(metric.name) for r in runs if not r.values(metric.name).empty}
        title = f"Energy distance per condition on {found.name}"
        found.energy = plots.strips(f"{anchor}-energy", title, values, metric, look) if values else None
    shown = [focus] if other is None else [focus, other]
    found.cells = [
        (r.method, look[r.method].color, pictures)
        for i, r in enumerate(shown)
        if (pictures := _cells(anchor, i, r, look))
    ]
    alpha = float((focus.manifest.get("config") or {}).get("alpha", 0.05))
    found.genes = tables.genes(focus, alpha, _CONDITIONS)
    _alike(found, runs, look)
    return found


def _opponent(
    ranked: Sequence[Run], focus: Run, columns: Sequence[Column], against: str | None
) -> Run | None:
    """Choose whom to compare with: as asked, else nearest-context, else the best other by PDCorr."""
    others = {r.method: r for r in ranked if r is not focus}
    if against is not None:
        if against in others:
            return others[against]
        if against != focus.method:
            hint = nearest(against, others)
            raise UserError(f"no run of '{against}' on {focus.dataset}{hint} methods: {listing(others)}")
    if not others or "nearest-context" in others:
        return others.get("nearest-context")
    metric = named(columns, PDCORR) or columns[0]
    table = pd.Series(score_table(list(others.values()), [metric])[metric.name])
    return others[str(ranks(table, metric.direction).fillna(np.inf).idxmin())]


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


def _duels(
    anchor: str, columns: Sequence[Column], focus: Run, other: Run, look: Mapping[str, Look]
) -> list[tuple[Plot, str]]:
    found = []
    for metric_name in (PDCORR, ENERGY):
        metric = named(columns, metric_name)
        pairs = paired(focus.values(metric.name), other.values(metric.name)) if metric else pd.DataFrame()
        if metric is None or pairs.empty:
            continue
        result = compare(pairs, higher=metric.higher)
        low, high = (f"{100 * r:.0f}" for r in result.rate_interval)
        digits = tables.decimals_for([result.gain])
        gain, *ends = (number(v, digits) for v in (result.gain, *result.gain_interval))
        ties = f", {result.ties} tied" if result.ties else ""
        sentence = (
            f"{'Above' if metric.higher else 'Below'} the dashed line {focus.method} is better, which it is in "
            f"{result.wins} of {result.n} conditions{ties}: a win rate of "
            f"{100 * result.rate:.0f} % (95 % interval {low} to {high} %), mean advantage {gain} "
            f"({ends[0]} to {ends[1]})."
        )
        name = f"{anchor}-{'pdcorr' if metric_name == PDCORR else 'energy'}-duel"
        found.append((plots.scatter(name, pairs, metric, (focus.method, other.method), look), sentence))
    return found


def _cells(anchor: str, index: int, run: Run, look: Mapping[str, Look]) -> list[Plot]:
    table = run.table("embedding")
    if table is None or table.empty:
        return []
    limits = plots.shared_limits(table)
    condition = table["condition"].astype(str).to_numpy()
    color = look[run.method].color
    return [
        plots.embedding(f"{anchor}-cells-{index}-{i}", label, table.loc[condition == label], limits, color)
        for i, label in enumerate(list(dict.fromkeys(condition))[:_CONDITIONS])
    ]


def _alike(found: Chapter, runs: Sequence[Run], look: Mapping[str, Look]) -> None:
    """Add the collapse check: a line per method, pictures of the first few."""
    rows = []
    for run in runs:
        result = _collapse(run)
        if result is None:
            continue
        cells = (
            Cell(number(result.found.predicted, 2), "num"),
            Cell(number(result.found.real, 2), "num"),
            Cell(number(result.found.ratio, 2), "num"),
            Cell(result.found.verdict),
        )
        rows.append(Row(run.method, cells, run.kind, look[run.method].color))
        if len(found.alike_plots) < _COLLAPSE_PLOTS and np.isfinite(result.found.predicted):
            name = f"{found.anchor}-alike-{len(found.alike_plots)}"
            found.alike_plots.append(plots.alike(name, run.method, result.pairs, look))
    if rows:
        heads = ("Method", "correlation, predicted", "correlation, real", "size, predicted ÷ real", "verdict")
        found.alike = Table(heads, tuple(rows))


def _collapse(run: Run) -> Alike | None:
    real, predicted = run.table("de_real", POOLED[0]), run.table("de_pred", POOLED[0])
    if real is None or predicted is None or real.empty or predicted.empty:
        return None
    return alike(changes(real), changes(predicted))
