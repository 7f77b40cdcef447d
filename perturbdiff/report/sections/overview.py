"""The first screen of a chapter and its score tables: verdict, key metrics, warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.report.figures import page_tables
from perturbdiff.report.figures.page_tables import Cell, Row, Scale, Table, number
from perturbdiff.report.figures.svg import slug
from perturbdiff.report.loading.metric_columns import (
    ENERGY,
    NO_SPREAD,
    PDCORR,
    Column,
    further_columns,
    named,
    realism_columns,
)
from perturbdiff.report.loading.results import POOLED, Run
from perturbdiff.report.sections import verdict
from perturbdiff.report.sections.chapter_data import ChapterData
from perturbdiff.report.sections.score_sections import chance
from perturbdiff.report.sections.verdict import Score, Standing, Verdict

# Key metrics and what each asks, in the order of the first screen, of a pair, the first that was scored.
KEY: tuple[tuple[tuple[str, ...], str], ...] = (
    ((ENERGY,), "Are predicted and real cells one population?"),
    ((PDCORR,), "Is the mean change right?"),
    (("PDS_cos", "PDS_L1"), "Is it the right perturbation’s change?"),
    (("DEOver_10", "DEOver"), "Are the most changed genes found?"),
    (("AUPRC",), "Do the changed genes come first?"),
    (("DirAgr",), "Do they change in the right direction?"),
    (("nonzero_ratio",), "Are there as many zeros as in real cells?"),
)
_CONTEXTS = 61  # tables of contexts on the page: their mean and sixty of them
_FEW_CELLS = 30
_FEW_PERTURBATIONS = 10
_ZEROS = (0.8, 1.25)
_SHOWN = 7  # warnings in sight, the others are folded
_KINDS = {
    "few_cells": "Few cells",
    "few_perturbations": "Few perturbations",
    "undefined": "Undefined scores",
    "no_de": "Few DE genes",
    "collapse": "Alike predictions",
    "scale": "Scale",
    "controls": "Control cells",
    "missing": "Missing perturbations",
    "seen": "Seen in training",
    "genes": "Genes",
    "covariates": "Labels",
    "same": "Same file",
}
_ALIKE = ("no change", "hardly", "collapsed", "more alike")


@dataclass(frozen=True)
class Note:
    """A warning: what it is about in a word or two, and a sentence."""

    kind: str
    text: str


@dataclass
class Overview:
    """What the page says on one data set before its figures."""

    focus: str
    color: str
    about: str
    verdict: Verdict
    key: Table
    notes: list[Note] = field(default_factory=list)
    more: list[Note] = field(default_factory=list)
    scores: list[Table] = field(default_factory=list)
    further: list[Table] = field(default_factory=list)
    contexts: list[tuple[str, list[Table]]] = field(default_factory=list)
    glossary: list[tuple[str, str]] = field(default_factory=list)
    ceiling: bool = False
    chance: bool = False

    @property
    def cautions(self) -> str:
        """Return what the warnings are about, each once."""
        kinds = dict.fromkeys(note.kind for note in [*self.notes, *self.more])
        text = ", ".join(kind[0].lower() + kind[1:] for kind in kinds)
        return text[:1].upper() + text[1:]


def overview(about: ChapterData, warnings: Sequence[str] = ()) -> Overview:
    """Return verdict, key table, warnings and score tables of one data set.

    Parameters
    ----------
    about
        The runs.
    warnings
        What makes them less than comparable.
    """
    standings = [standing(about, metric) for metric in key_metrics(about.every)]
    collapse = collapse_verdict(about)
    judged = verdict.judge(standings, perturbations(about.focus), collapse)
    key = _key_table(about, standings)
    notes = [Note("Failed", f"{one.method}: {_sentence(one.why)}") for one in about.absent]
    notes += [Note("Comparability", w.removeprefix(f"{about.name}: ")) for w in warnings]
    notes += findings(about, standings, collapse)
    page = Overview(about.focus.method, about.look[about.focus.method].color, scale_of(about), judged, key)
    page.notes, page.more = notes[:_SHOWN], notes[_SHOWN:]
    page.ceiling = bool(about.ceilings)
    page.chance = any(not math.isnan(s.chance) for s in standings)
    page.scores = _score_tables(about, about.main)
    if page.scores:
        page.scores[-1] = replace(page.scores[-1], note=_remarks(about))
    real = [c for c in realism_columns(about.every) if c not in about.main]
    if real:
        page.scores.append(_realism(about, real))
    page.further = _score_tables(about, [c for c in further_columns(about.every) if c not in about.main])
    scopes = list(dict.fromkeys(s for r in about.runs for s in r.contexts))
    page.contexts = [(s[1], _score_tables(about, about.main, s)) for s in scopes[:_CONTEXTS]]
    page.glossary = [(c.heading, c.meaning) for c in about.every if c.meaning]
    return page


def scale_of(about: ChapterData) -> str:
    """Say on how much the verdict rests."""
    summary = about.focus.summary
    counts = (
        (perturbations(about.focus), "perturbation"),
        (summary.get("num_conditions"), "condition"),
        (summary.get("num_cells_real"), "real cell"),
    )
    counted = [f"{n:,} {word}{'s' * (n != 1)}" for n, word in counts if isinstance(n, int)]
    return " · ".join([*counted, _rivals(about)])


def _rivals(about: ChapterData) -> str:
    """Say how many methods ours stands beside, of which kinds, and how many failed."""
    external = sum(r.external for r in about.ranked)
    built_in = sum(r.kind == "baseline" for r in about.ranked) - external
    kinds = [f"{built_in} baseline{'s' * (built_in != 1)}"] if built_in or not external else []
    kinds += [f"{external} run{'s' * (external != 1)} of external methods"] if external else []
    lost = len(about.absent)
    return f"beside {' and '.join(kinds)}{f', {lost} failed' if lost else ''}"


def key_metrics(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics of the first screen that were scored."""
    scored = (next((c for n in names if (c := named(columns, n))), None) for names, _ in KEY)
    return [metric for metric in scored if metric is not None]


def standing(about: ChapterData, metric: Column) -> Standing:
    """Return where the focus stands on a metric, over all test cells pooled."""
    focus = about.focus
    baselines = [r for r in about.ranked if r.kind == "baseline" and r is not focus]
    others = baselines or [r for r in about.ranked if r is not focus]
    best = verdict.best_of({r.method: r.score(metric.name)[0] for r in others}, metric.direction)
    ours = values(focus, metric.name)
    gains = (verdict.gain(ours, values(r, metric.name), r.method, metric.direction) for r in others)
    ceiling = about.ceilings[0].score(metric.name)[0] if about.ceilings else math.nan
    return Standing(
        metric,
        score(focus, metric.name),
        best,
        next((score(r, metric.name) for r in others if r.method == best), None),
        tuple(g for g in gains if g.n),
        chance(focus, metric.name),
        ceiling,
    )


def score(run: Run, metric: str) -> Score:
    """Return a run's mean with its interval, made here where the run holds none."""
    value, defined, total = run.score(metric)
    low, high = run.interval(metric)
    if math.isnan(low) and defined > 1:
        numbers = values(run, metric).to_numpy(np.float64)
        low, high = verdict.bootstrap_mean(numbers, draws=verdict.DRAWS, seed=0)
    return Score(value, low, high, defined, total)


def values(run: Run, metric: str) -> pd.Series:
    """Return what the pooled mean of a metric is over: per perturbation, or per condition (cells' metrics)."""
    table = run.metrics
    table = table.loc[((table["metric"] == metric) & (table["perturbation"] != "*")).to_numpy(bool)]
    for kind in (POOLED[0], "condition"):
        rows = table.loc[(table["scope_kind"] == kind).to_numpy(bool)]
        if len(rows):
            break
    index = pd.MultiIndex.from_arrays([rows["scope"].astype(str), rows["perturbation"].astype(str)])
    return pd.Series(rows["value"].to_numpy(np.float64), index=index).sort_index()


def perturbations(run: Run) -> int:
    """Return how many perturbations were scored."""
    return len(set(run.pooled["perturbation"]))


def collapse_verdict(about: ChapterData) -> str:
    """Return what the collapse check says of the focus over the whole pool, empty if it was not made."""
    table = about.focus.collapse
    if table is not None and len(rows := table.loc[(table["scope_kind"] == POOLED[0]).to_numpy(bool)]):
        return str(rows["verdict"].iloc[0])
    effects = about.effects.get(about.focus.method)
    return "" if effects is None or effects.collapse is None else effects.collapse.verdict


def _key_table(about: ChapterData, standings: Sequence[Standing]) -> Table:
    color = about.look[about.focus.method].color
    rows = tuple(_key_row(s, color) for s in standings)
    baseline = "Best baseline" if any(r.kind == "baseline" for r in about.ranked) else "Best other"
    heads = ("Metric", about.focus.method, baseline, "Difference", "Chance → ceiling", "Chance", "Ceiling")
    return Table(heads, rows, name=f"key-metrics-{slug(about.name)}")


_MARKS = {"better": "better", "level": "not told apart", "worse": "worse", "unknown": ""}


def _key_row(s: Standing, color: str) -> Row:
    best = s.baseline.value if s.baseline else math.nan
    digits = page_tables.decimals_for([v for v in (s.ours.value, best, s.chance) if not math.isnan(v)])
    count = f"{s.ours.defined} of {s.ours.total}" if s.ours.defined < s.ours.total else ""
    low, high = s.ours.low, s.ours.high
    ours = Cell(number(s.ours.value, digits), "num ours", page_tables.interval(low, high, digits))
    ours = _with(ours, value=s.ours.value, low=low, high=high, count=count)
    theirs = Cell(number(best, digits), "num", s.best or "", value=best)
    place, *marks = (verdict.place(v, s) for v in (s.ours.value, low, high, best))
    scale = None if math.isnan(place) else Scale(place, marks[0], marks[1], marks[2], color)
    share = "" if scale is None else f"{round(100 * place)} %".replace("-", "−")
    cells = (
        ours,
        theirs,
        _difference(s, digits),
        Cell(share, "scale", value=place, scale=scale),
        Cell(number(s.chance, digits), "num faint", value=s.chance),
        Cell(number(s.ceiling, digits), "num faint", value=s.ceiling),
    )
    return Row(s.metric.heading, cells, note=_question(s.metric.name))


def _difference(s: Standing, digits: int) -> Cell:
    """Return in a word whether the best baseline is beaten, and by how much."""
    gain = next((g for g in s.gains if g.over == s.best), None)
    if gain is None or s.metric.direction == "none":
        return Cell("")
    size = f"by {number(abs(gain.value), digits)}" if gain.relation in ("better", "worse") else ""
    return Cell(_MARKS[gain.relation], f"mark {gain.relation}", size, value=gain.value)


def _with(cell: Cell, **changes: Any) -> Cell:
    return Cell(**{**cell.__dict__, **changes})


def _question(name: str) -> str:
    return next((asks for names, asks in KEY if name in names), "")


def caption(metric: Column) -> str:
    """Return what a key metric asks, and where better is, to stand below a figure of it."""
    where = {"higher": "Higher is better.", "lower": "Lower is better.", "one": "1 is best."}
    return f"{_question(metric.name) or metric.label + '.'} {where.get(metric.direction, '')}".strip()


def _score_tables(
    about: ChapterData, columns: Sequence[Column], scope: tuple[str, str] = POOLED
) -> list[Table]:
    """Return the scores as tables that fit a screen: profiles and populations, genes, what is left."""
    groups: dict[str, list[Column]] = {}
    for column in sorted(columns, key=lambda c: c.name != ENERGY):
        groups.setdefault(_group(column), []).append(column)
    tables = []
    for title, members in groups.items():
        table = page_tables.scores(about.runs, members, about.look, scope, about.absent)
        name = f"{table.name}-{slug(title)}"
        tables.append(Table(table.columns, table.rows, title, table.note, name, table.below))
    return tables


def _realism(about: ChapterData, columns: Sequence[Column]) -> Table:
    """Return the table of what tells whether predicted cells look like cells, in the order given."""
    table = page_tables.scores(about.runs, columns, about.look, absent=about.absent)
    lacking = [r.score("library_sd_ratio")[1:] for r in about.runs if named(columns, "library_sd_ratio")]
    note = NO_SPREAD if any(defined < total for defined, total in lacking) else ""
    return replace(table, title="Are the cells real?", name=f"{table.name}-realism", note=note)


def _remarks(about: ChapterData) -> str:
    """Return what the reader must know of methods of others, each once."""
    made = [r.made_by for r in about.ranked if r.made_by.note]
    return " ".join(dict.fromkeys(f"{m.title or m.baseline}: {_sentence(str(m.note))}" for m in made))


def _group(column: Column) -> str:
    return _MEANS if column.name == ENERGY else _GROUPS.get(column.family, "Further metrics")


_MEANS = "Populations and mean expression"
_GROUPS = {
    "expression": _MEANS,
    "de": "Differentially expressed genes",
    "distribution": "Populations of cells",
    "count": "Numbers of genes",
}


def findings(about: ChapterData, standings: Sequence[Standing], collapse: str) -> list[Note]:
    """Return the focus's findings, what only this report can see, and grave findings on other methods."""
    notes = [_note(f) for f in about.focus.findings]
    kinds = {f.get("kind") for f in about.focus.findings}
    checks = {
        "few_cells": _few_cells(about.focus),
        "undefined": _undefined(standings),
        "collapse": _alike(collapse),
    }
    notes += [Note(_KINDS[k], text) for k, text in checks.items() if text and k not in kinds]
    of_report = [Note(*pair) for pair in _of_report(about, standings)]
    notes += [note for note in of_report if note.kind not in {n.kind for n in notes}]
    seen = {n.text for n in notes}
    for run in about.ranked:
        if run is not about.focus:
            texts = (
                n
                for f in run.findings
                if f.get("kind") in ("scale", "missing", "controls")
                for n in [_note(f)]
            )
            notes += [Note(n.kind, f"{run.method}: {n.text}") for n in texts if n.text not in seen]
    return list(dict.fromkeys(notes))


def _note(finding: dict[str, Any]) -> Note:
    kind = str(finding.get("kind", ""))
    text = _sentence(str(finding["text"]))
    return Note(_KINDS.get(kind, kind.replace("_", " ").capitalize() or "Note"), text)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def _of_report(about: ChapterData, standings: Sequence[Standing]) -> list[tuple[str, str]]:
    notes = []
    number_of = perturbations(about.focus)
    if number_of < _FEW_PERTURBATIONS:
        notes.append(
            ("Few perturbations", f"Only {number_of} were scored; intervals of so few are too narrow.")
        )
    zeros = next((s.ours.value for s in standings if s.metric.name == "nonzero_ratio"), math.nan)
    if zeros < _ZEROS[0] or zeros > _ZEROS[1]:
        word = "fewer" if zeros > 1 else "more"
        notes.append(
            (
                "Zeros",
                f"Predicted cells have {word} zeros than real ones: {number(zeros, 2)} times as many non-zero values.",
            )
        )
    if not any(r.kind == "baseline" for r in about.ranked):
        notes.append(("No baseline", "Without simple methods beside it, a score cannot be called good."))
    if not about.ceilings:
        notes.append(("No ceiling", "Add what real cells score against real cells: perturbdiff ceiling."))
    return notes


def _few_cells(run: Run) -> str:
    table = run.metrics
    rows = table.loc[((table["scope_kind"] == "condition") & (table["n_cells"] < _FEW_CELLS)).to_numpy(bool)]
    few = len(rows[["scope", "perturbation"]].drop_duplicates())
    if not few:
        return ""
    have = "conditions have" if few > 1 else "condition has"
    return f"{few} {have} fewer than {_FEW_CELLS} real cells; their scores are noisy."


def _undefined(standings: Sequence[Standing]) -> str:
    missing = [s for s in standings if s.ours.defined < s.ours.total and not s.metric.name.endswith("_10")]
    listed = ", ".join(f"{s.metric.label} on {s.ours.defined} of {s.ours.total}" for s in missing)
    return f"Not defined everywhere: {listed}. Means are over the rest." if listed else ""


def _alike(collapse: str) -> str:
    if not collapse.startswith(_ALIKE):
        return ""
    return f"Collapse check: {collapse}. See “Are the predictions distinct?”."
