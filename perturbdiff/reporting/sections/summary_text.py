"""The verdict and the key numbers as text, to be copied into a mail or a lab book."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perturbdiff.reporting.figures.page_tables import decimals_for, interval, number, plus_minus
from perturbdiff.reporting.sections.cautions import Note
from perturbdiff.reporting.sections.standing import Standing
from perturbdiff.reporting.sections.verdict import Verdict


def summary_text(
    dataset: str,
    method: str,
    scale: str,
    verdict: Verdict,
    standings: Sequence[Standing],
    notes: Sequence[Note],
) -> str:
    """Return the first screen as lines of text.

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
