"""What real cells score: scaled scores between the mean response and a replicate, and how predictable a data set is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from perturbdiff.evaluation.cell_eval2.metrics import DEFINITION, SCORED
from perturbdiff.evaluation.cell_eval2.metrics import METRICS as COUNT_METRICS
from perturbdiff.evaluation.cell_eval2.scores import SCORE
from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.reporting.figures import number_texts
from perturbdiff.reporting.figures.number_texts import number
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.figures.svg import slug
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.chapter_data import ChapterData, Section
from perturbdiff.reporting.sections.verdict import Level, Verdict

_NUMBERS = ("nanmean", "baseline", "replicate", "scaled", "scaled_low", "scaled_high")
_SCALE = "0 is the mean response given to every perturbation, 1 is a replicate"


def is_scaled(about: ChapterData) -> bool:
    """Return whether the runs were scored by cell-eval2; all or none of a data set are."""
    return about.focus.definition == DEFINITION


def scaled_table(about: ChapterData) -> Table:
    """Return the scored metrics: ours, both ends, and the scaled scores of every method."""
    scores = {run.method: scores_of(run) for run in about.ranked}
    ours = scores[about.focus.method]
    heads = ("Metric", about.focus.method, "Mean response", "Replicate")
    heads += tuple(f"Scaled: {method}" for method in scores)
    rows = tuple(_row(name, ours, scores) for name in (SCORE, *SCORED) if name in ours.index)
    return Table(heads, rows, note=f"Scaled scores: {_SCALE}.", name=f"scaled-scores-{slug(about.name)}")


def scores_of(run: Run) -> pd.DataFrame:
    """Return scores, ends and scaled scores by metric: those of the pool, or of the mean of the contexts."""
    table = run.aggregate
    first = table[table["scope"] == table["scope"].iloc[0]]
    numbers = {column: pd.Series(pd.to_numeric(first[column], errors="coerce")) for column in _NUMBERS}
    return pd.DataFrame(numbers).set_index(pd.Index(first["metric"]))


def _row(name: str, ours: pd.DataFrame, scores: dict[str, pd.DataFrame]) -> Row:
    arrow = "↓" if name != SCORE and COUNT_METRICS[name].direction == "lower" else "↑"
    values = [float(ours.loc[name, column]) for column in _NUMBERS[:3]]
    digits = number_texts.decimals_for([v for v in values if not math.isnan(v)])
    raw = (
        [Cell("", "num")] * 3 if name == SCORE else [Cell(number(v, digits), "num", value=v) for v in values]
    )
    cells = [*raw, *(_scaled(table, name) for table in scores.values())]
    head = "Mean of the six" if name == SCORE else name
    note = "" if name == SCORE else COUNT_METRICS[name].meaning
    return Row(f"{head}\u00a0{arrow}", tuple(cells), note=note)


def _scaled(table: pd.DataFrame, name: str) -> Cell:
    if name not in table.index:
        return Cell("n/a", "num")
    value, low, high = (float(table.loc[name, column]) for column in _NUMBERS[3:])
    return Cell(
        number(value, 2), "num ours", number_texts.interval(low, high, 2), value=value, low=low, high=high
    )


def scaled_verdict(about: ChapterData) -> Verdict:
    """Return what the scaled scores say.

    Good: the interval of their mean is above the mean response, and so is each of the six. Mixed: only their mean is.
    """
    table = scores_of(about.focus)
    value, low, high = (float(table.loc[SCORE, column]) for column in _NUMBERS[3:])
    if math.isnan(value):
        return Verdict(
            "unknown",
            "Cannot be judged: there is no scaled score",
            tells="Unknown. The cautions below say why.",
        )
    each = {name: float(table.loc[name, "scaled"]) for name in SCORED}
    above = [name for name, score in each.items() if score > 0]
    shown = f"{number(value, 2)} {number_texts.interval(low, high, 2)}".strip()
    if not low > 0:
        level: Level = "poor" if high < 0 else "level"
        title = "Not better than the mean response given to every perturbation"
    elif len(above) < len(SCORED):
        level, title = "mixed", f"Better than the mean response on average, and by {len(above)} of 6 metrics"
    else:
        level, title = "good", "Better than the mean response by all six metrics"
    worst = min(each, key=lambda name: each[name])
    return Verdict(
        level,
        title,
        f"The mean of the six scaled scores is {shown}: {_SCALE}.",
        f"Better than the mean response: {', '.join(above) or 'nothing'}.",
        f"The mean goes {round(100 * value)} % of the way to a replicate. The lowest of the six is {worst}, "
        f"{number(each[worst], 2)}.",
        "The intervals are over perturbations; the noise of the shared controls is not in them.",
    )


_INTRO = (
    "Two halves of the real cells of each perturbation were compared, each half with its own half of the controls. "
    "What does not replicate between them cannot be predicted."
)
_MEASURES = {
    "replicate_cosine": "Mean change: cosine of the two halves (1: the same change)",
    "cross_context_cosine": "Mean change: cosine with the same perturbation in other contexts",
    "cosine_with_mean": "Mean change: cosine with the mean of the other perturbations",
    "signal_to_noise": "Squared change over its squared noise (above 1: more signal than noise)",
    "de_genes": "DE genes of a half",
    "de_replicated": "Share of these that are DE in the other half, with the same sign",
}
_REFERENCES = {
    "technical_duplicate": "the other half of the cells",
    "interpolated_duplicate": "half the other half, half the mean",
    "perturbed_mean": "the other perturbations",
    "control": "the controls",
}
_NOTE = (
    "The best score is the best mean of four references of real cells. Against half of the cells, no method can be "
    "expected to be clearly better. Keep: the metric tells a replicate from a guess on these data."
)


def predictability(subject: ChapterData) -> Section:
    """Return the folded section; it is empty where the data set was not calibrated."""
    section = Section(
        "How predictable is this data set at all?", f"{subject.anchor}-predictability", folded=True
    )
    runs = (subject.focus, *subject.ranked)
    found = next((run.calibration["predictability"] for run in runs if _known(run.calibration)), None)
    if found is None:
        return section
    section.intro = f"{_INTRO} {_units(found)}".rstrip()
    tables = (
        _quartiles(subject, _mapping(found, "quartiles")),
        _verdicts(subject, _mapping(found, "best")),
    )
    section.tables = [table for table in tables if table.rows]
    section.note = _NOTE
    return section


def _known(calibration: Mapping[str, Any]) -> bool:
    return isinstance(calibration.get("predictability"), dict)


def _mapping(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key)
    return value if isinstance(value, dict) else {}


def _units(found: Mapping[str, Any]) -> str:
    """Say how many perturbations have an effect that can be seen."""
    total, above = found.get("units"), found.get("above_noise")
    if not isinstance(total, int) or not isinstance(above, int):
        return ""
    return f"{above} of {total} perturbations have more signal than noise."


def _quartiles(subject: ChapterData, quartiles: Mapping[str, Any]) -> Table:
    rows = []
    for name, words in _MEASURES.items():
        values = quartiles.get(name)
        if isinstance(values, list) and len(values) == 3 and any(_is_number(v) for v in values):
            rows.append(Row(words, tuple(_cell(value) for value in values)))
    heads = ("Over perturbations", "first quarter", "median", "third quarter")
    return Table(heads, tuple(rows), "Do the effects replicate?", name=f"{subject.anchor}-predictability")


def _verdicts(subject: ChapterData, best: Mapping[str, Any]) -> Table:
    rows = []
    for name, (verdict, reason) in subject.worth.items():
        record = _mapping(best, name)
        reference = str(record.get("reference", ""))
        grey = "" if verdict == "keep" else "faint"
        cells = (
            _cell(record.get("score")),
            Cell(_REFERENCES.get(reference, reference)),
            Cell(verdict, grey),
            Cell(reason, grey),
        )
        rows.append(Row(METRICS[name].label if name in METRICS else name, cells))
    heads = ("Metric", "best score", "of", "verdict", "reason")
    return Table(
        heads, tuple(rows), "Which metrics can tell on these data?", name=f"{subject.anchor}-calibration"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> Cell:
    if not _is_number(value):
        return Cell("n/a", "num na")
    return Cell(number(float(value), 2), "num", value=float(value))
