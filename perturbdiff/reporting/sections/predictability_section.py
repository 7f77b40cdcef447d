"""How predictable a data set is at all, and which metrics can tell good from bad predictions of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.reporting.figures.number_texts import number
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.sections.chapter_data import ChapterData, Section

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
