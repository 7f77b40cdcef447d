"""What to read with care: what evaluation found, what failed, and what only the report can see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perturbdiff.reporting.figures.number_texts import number
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.standing import Standing, perturbations
from perturbdiff.reporting.sections.verdict import ENOUGH, capital

_FEW_CELLS = 30
_ZEROS = (0.8, 1.25)
_KINDS = {
    "few_cells": "Few cells",
    "few_perturbations": "Few perturbations",
    "undefined": "Undefined scores",
    "no_de": "Few DE genes",
    "collapse": "Alike predictions",
    "scale": "Scale",
    "zeros": "Zeros",
    "no_spread": "No spread",
    "repeated": "Repeated cells",
    "too_many_de": "Too many DE genes",
    "unbalanced": "Unequal batches",
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


def cautions(
    about: ChapterData, standings: Sequence[Standing], collapse: str, warnings: Sequence[str]
) -> list[Note]:
    """Return all warnings on one data set, the gravest first.

    Parameters
    ----------
    about, standings
        The runs, and where the focus stands in the key metrics.
    collapse
        What the collapse check says of the focus.
    warnings
        What makes the runs less than comparable.
    """
    notes = [Note("Failed", f"{one.method}: {sentence(one.why)}") for one in about.absent]
    notes += [Note("Comparability", w.removeprefix(f"{about.name}: ")) for w in warnings]
    return notes + _findings(about, standings, collapse)


def _findings(about: ChapterData, standings: Sequence[Standing], collapse: str) -> list[Note]:
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
            grave = (_note(f) for f in run.findings if f.get("kind") in ("scale", "missing", "controls"))
            notes += [Note(n.kind, f"{run.method}: {n.text}") for n in grave if n.text not in seen]
    return list(dict.fromkeys(notes))


def _note(finding: dict[str, Any]) -> Note:
    kind = str(finding.get("kind", ""))
    text = capital(sentence(str(finding["text"])))
    return Note(_KINDS.get(kind, kind.replace("_", " ").capitalize() or "Note"), text)


def sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends with another mark."""
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def _of_report(about: ChapterData, standings: Sequence[Standing]) -> list[tuple[str, str]]:
    notes = []
    number_of = perturbations(about.focus)
    if number_of < ENOUGH:
        notes.append(
            (
                "Few perturbations",
                f"Only {number_of} were scored, and intervals over so few are too narrow.",
            )
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
    if about.focus.definition.startswith("cell-eval-0."):
        notes.append(
            (
                "Discrimination",
                f"PDS as {about.focus.definition} defines it can be raised without any biology, by raising the target "
                "genes of all other perturbations. It is for comparison with published numbers only.",
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
    return f"{few} {have} fewer than {_FEW_CELLS} real cells, so their scores are noisy."


def _undefined(standings: Sequence[Standing]) -> str:
    missing = [s for s in standings if s.ours.defined < s.ours.total and not s.metric.name.endswith("_10")]
    listed = ", ".join(f"{s.metric.label} on {s.ours.defined} of {s.ours.total}" for s in missing)
    return f"Not defined everywhere: {listed}. Means are over the rest." if listed else ""


def _alike(collapse: str) -> str:
    if not collapse.startswith(_ALIKE):
        return ""
    return f"Collapse check: {collapse}. See “Are the predictions distinct?”."
