"""The first screen of a chapter: verdict, cells, key metrics, wins and losses, and what to read with care."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perturbdiff.reporting.figures import number_texts
from perturbdiff.reporting.figures.number_texts import decimals_for, interval, number, plus_minus
from perturbdiff.reporting.figures.page_tables import Cell, Row, Scale, Table
from perturbdiff.reporting.figures.svg import slug
from perturbdiff.reporting.loading.metric_columns import ENERGY, PDCORR, key_metrics, question
from perturbdiff.reporting.sections import verdict
from perturbdiff.reporting.sections.cautions import Note, cautions
from perturbdiff.reporting.sections.cell_sections import CellPicture, cell_pictures
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.reference_sections import is_scaled, scaled_table, scaled_verdict
from perturbdiff.reporting.sections.score_sections import ScoreTables, score_tables
from perturbdiff.reporting.sections.standing import (
    Gain,
    Standing,
    collapse_verdict,
    left_out,
    perturbations,
    place,
    rivals,
    standing,
)
from perturbdiff.reporting.sections.verdict import Verdict

_SHOWN = 4  # warnings in sight, the others are folded
_MARKS = {"better": "better", "level": "no clear difference", "worse": "worse", "unknown": ""}


@dataclass
class Overview:
    """What the page says on one data set before its figures.

    Attributes
    ----------
    focus, color, about
        The method, its colour, and on how much the verdict rests.
    key
        The key metrics beside the best baseline, chance and ceiling.
    against
        Wins, ties and losses against each baseline, None without one.
    cells
        Pictures of real, predicted and control cells, one per condition.
    notes, more
        Warnings in sight, and folded ones.
    copied
        The same as text.
    """

    focus: str
    color: str
    about: str
    verdict: Verdict
    key: Table
    against: Table | None = None
    cells: list[CellPicture] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    more: list[Note] = field(default_factory=list)
    scores: ScoreTables = field(default_factory=ScoreTables)
    glossary: list[tuple[str, str]] = field(default_factory=list)
    copied: str = ""
    ceiling: bool = False
    chance: bool = False

    @property
    def cautions(self) -> str:
        """Return what the warnings are about, each once."""
        kinds = dict.fromkeys(note.kind for note in [*self.notes, *self.more])
        return verdict.capital(", ".join(kind[0].lower() + kind[1:] for kind in kinds))


def overview(about: ChapterData, warnings: Sequence[str] = ()) -> Overview:
    """Return verdict, pictures, key table, warnings and score tables of one data set.

    Parameters
    ----------
    about
        The runs.
    warnings
        What makes them less than comparable.
    """
    standings = _standings(about)
    judged = verdict_of(about)
    color = about.look[about.focus.method].color
    key = scaled_table(about) if is_scaled(about) else _key_table(about, standings)
    page = Overview(about.focus.method, color, scale_of(about), judged, key)
    notes = cautions(about, standings, collapse_verdict(about), warnings)
    if is_scaled(about):  # both ends of the scale are in every run
        notes = [note for note in notes if note.kind not in ("No baseline", "No ceiling")]
    page.notes, page.more = notes[:_SHOWN], notes[_SHOWN:]
    page.against = _against_table(about, standings)
    page.cells = cell_pictures(about)
    page.ceiling = bool(about.ceilings)
    page.chance = any(not math.isnan(s.chance) for s in standings)
    page.scores = score_tables(about)
    page.glossary = [(c.heading, c.meaning) for c in about.every if c.meaning]
    page.copied = summary_text(about.name, page.focus, page.about, page.verdict, standings, notes)
    return page


def verdict_of(about: ChapterData) -> Verdict:
    """Return the verdict alone, as the terminal shows it."""
    if is_scaled(about):
        judged = scaled_verdict(about)
    else:
        judged = verdict.judge(_standings(about), perturbations(about.focus), collapse_verdict(about))
    return verdict.incomplete(judged, *left_out(about))


def _standings(about: ChapterData) -> list[Standing]:
    kept = {name for name, (worth, _) in about.worth.items() if worth == "keep"}
    return [standing(about, metric) for metric in key_metrics(about.every, kept)]


def scale_of(about: ChapterData) -> str:
    """Say on how much the verdict rests."""
    summary = about.focus.summary
    counts = (
        (perturbations(about.focus), "perturbation"),
        (summary.get("num_conditions"), "condition"),
        (summary.get("num_cells_real"), "real cell"),
    )
    counted = [f"{n:,} {word}{'s' * (n != 1)}" for n, word in counts if isinstance(n, int)]
    return " · ".join([*counted, _beside(about)])


def _beside(about: ChapterData) -> str:
    """Say how many methods ours stands beside, of which kinds, and how many failed."""
    external = sum(r.external for r in about.ranked)
    built_in = sum(r.kind == "baseline" for r in about.ranked) - external
    kinds = [f"{built_in} baseline{'s' * (built_in != 1)}"] if built_in or not external else []
    kinds += [f"{external} run{'s' * (external != 1)} of external methods"] if external else []
    lost = len(about.absent)
    return f"beside {' and '.join(kinds)}{f', {lost} failed' if lost else ''}"


def _key_table(about: ChapterData, standings: Sequence[Standing]) -> Table:
    color = about.look[about.focus.method].color
    rows = tuple(_key_row(s, color) for s in standings)
    baseline = "Best baseline" if any(r.kind == "baseline" for r in about.ranked) else "Best other"
    heads = ("Metric", about.focus.method, baseline, "Difference", "Chance", "Chance → ceiling", "Ceiling")
    return Table(heads, rows, name=f"key-metrics-{slug(about.name)}")


def _key_row(s: Standing, color: str) -> Row:
    best = s.baseline.value if s.baseline else math.nan
    digits = number_texts.decimals_for([v for v in (s.ours.value, best, s.chance) if not math.isnan(v)])
    count = f"{s.ours.defined} of {s.ours.total}" if s.ours.defined < s.ours.total else ""
    low, high = s.ours.low, s.ours.high
    ours = Cell(number(s.ours.value, digits), "num ours", number_texts.interval(low, high, digits))
    ours = replace(ours, value=s.ours.value, low=low, high=high, count=count)
    theirs = Cell(number(best, digits), "num", s.best or "", value=best)
    along, *marks = (place(v, s) for v in (s.ours.value, low, high, best))
    scale = None if math.isnan(along) or s.silent else Scale(along, marks[0], marks[1], marks[2], color)
    share = "" if scale is None else f"{round(100 * along)} %".replace("-", "−")
    cells = (
        ours,
        theirs,
        _difference(s, digits),
        Cell(number(s.chance, digits), "num faint", value=s.chance),
        Cell(f"{s.worth}: {s.reason}", "scale silent")
        if s.silent
        else Cell(share, "scale", value=along, scale=scale),
        Cell(
            number(s.ceiling.value, digits),
            "num faint",
            number_texts.plus_minus(s.ceiling.split_sd, digits),
            value=s.ceiling.value,
        ),
    )
    return Row(
        s.metric.heading.replace(f" {s.metric.arrow}", f"\u00a0{s.metric.arrow}"),
        cells,
        "silent" if s.silent else "",
        note=question(s.metric),
    )


def _difference(s: Standing, digits: int) -> Cell:
    """Return in a word whether the best baseline is beaten, and by how much."""
    gain = next((g for g in s.gains if g.over == s.best), None)
    if gain is None or s.metric.direction == "none":
        return Cell("")
    size = f"by {number(abs(gain.value), digits)}" if gain.relation in ("better", "worse") else ""
    return Cell(_MARKS[gain.relation], f"mark {gain.relation}", size, value=gain.value)


def _against_table(about: ChapterData, standings: Sequence[Standing]) -> Table | None:
    """Return wins, ties and losses against each rival, the strongest rival first."""
    ranked = [s for s in standings if s.metric.direction in ("higher", "lower") and not s.silent]
    lines = []
    for run in rivals(about):
        by_metric = {s.metric.name: (s, g) for s in ranked for g in s.gains if g.over == run.method}
        judged = [(s, g) for s, g in by_metric.values() if g.relation != "unknown"]
        if not by_metric:
            continue
        wins, ties, losses = (sum(g.relation == r for _, g in judged) for r in ("better", "level", "worse"))
        each = [by_metric.get(name, (None, None))[1] for name in (ENERGY, PDCORR)]
        cells = (_record(wins, ties, losses, _named(judged)), *(_one_by_one(g) for g in each))
        row = Row(run.method, cells, color=about.look[run.method].color)
        lines.append((wins - losses, len(lines), row))
    if not lines:
        return None
    rows = tuple(row for *_, row in sorted(lines, key=lambda line: line[:2]))
    heads = ("Wins · ties · losses against", "Key metrics", "Energy distance", "PDCorr")
    below = ("", "", "conditions", "perturbations")
    return Table(heads, rows, name=f"wins-{slug(about.name)}", below=below)


def _record(wins: int, ties: int, losses: int, hint: str = "") -> Cell:
    share = (wins - losses) / max(1, wins + ties + losses)
    return Cell(f"{wins} · {ties} · {losses}", "record", hint=hint, bar=share, value=float(wins - losses))


def _one_by_one(gain: Gain | None) -> Cell:
    if gain is None or not gain.n:
        return Cell("–", "record na", value=math.nan)
    return replace(_record(gain.wins, gain.ties, gain.losses), bar=None)


def _named(judged: Sequence[tuple[Standing, Gain]]) -> str:
    """Name the metrics that were won, tied and lost, for reading on hover."""
    words = {"better": "wins", "level": "ties (no clear difference)", "worse": "losses"}
    named = {
        word: ", ".join(s.metric.label for s, g in judged if g.relation == relation)
        for relation, word in words.items()
    }
    return "\n".join(f"{word}: {labels}" for word, labels in named.items() if labels)


def summary_text(
    dataset: str,
    method: str,
    scale: str,
    verdict: Verdict,
    standings: Sequence[Standing],
    notes: Sequence[Note],
) -> str:
    """Return the first screen as lines of text, to be copied into a mail or a lab book.

    Parameters
    ----------
    dataset, method, scale
        What the verdict is about, and on how much it rests.
    standings
        Standings in the key metrics.
    notes
        What to read with care.
    """
    lines = [f"{method} on {dataset}: {verdict.title}", f"({scale})", ""]
    lines += [f"{question} {answer}" for question, answer in verdict.answers if answer]
    lines += ["", *(_line(s) for s in standings)]
    if notes:
        lines += ["", "Read with care:", *(f"- {note.kind}. {note.text}" for note in notes)]
    return "\n".join(lines)


def _line(s: Standing) -> str:
    """Return one metric with its interval, the best baseline, chance and ceiling."""
    best = s.baseline.value if s.baseline else math.nan
    known = [v for v in (s.ours.value, best, s.chance) if not math.isnan(v)]
    digits = decimals_for(known)
    ends = interval(s.ours.low, s.ours.high, digits)
    parts = [f"{s.metric.heading} {number(s.ours.value, digits)}{f' {ends}' if ends else ''}"]
    if s.best:
        parts.append(f"best baseline {s.best} {number(best, digits)}")
    if not math.isnan(s.chance):
        parts.append(f"chance {number(s.chance, digits)}")
    if not math.isnan(s.ceiling.value):
        spread = plus_minus(s.ceiling.split_sd, digits)
        parts.append(f"ceiling {number(s.ceiling.value, digits)} {spread}".rstrip())
    if s.silent:
        parts.append(f"{s.worth}: {s.reason}")
    return ", ".join(parts)
