"""Remarks on the inputs of an evaluation, and whether predicted and real cells have values on one scale."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from perturbdiff.conditions.condition import Condition
from perturbdiff.evaluation.readers.cells_by_condition import ExpressionView
from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)


class Findings:
    """Remarks on the inputs, which are logged at once and kept for the summary.

    Parameters
    ----------
    quiet
        Keep them only.

    Attributes
    ----------
    entries
        ``kind``, ``text`` and ``count`` of each.
    facts
        Numbers by name.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.entries: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def add(self, kind: str, text: str, count: int, *, warn: bool = True) -> None:
        """Log and keep a sentence."""
        if not self._quiet:
            (logger.warning if warn else logger.info)("%s", text)
        self.entries.append({"kind": kind, "text": text, "count": count})


GROSS = 3.0
"""Factor between mean values above which the scales differ; counts per million and per 10,000 differ by 4 to 10."""
LARGE = 1.5
"""Factor between mean values above which it is told."""

_CONDITIONS, _CELLS = 64, 16  # looked at, and cells of each


def compare_scales(
    predicted: ExpressionView,
    real: ExpressionView,
    conditions: Sequence[Condition],
    notes: Findings,
    *,
    known: bool,
) -> None:
    """Compare the mean log1p values of the first cells of some conditions.

    Parameters
    ----------
    predicted, real
        The two sides.
    conditions
        Conditions that both have.
    notes
        Takes a remark if the means differ much.
    known
        Whether the files say that both are normalised to the same depth: then the values are only bad predictions,
        and nothing is refused. Predictions of zeros have no scale, and are not refused either.

    Raises
    ------
    UserError
        If the means differ by more than `GROSS` and the scales are not known.
    """
    a, b = (_mean(side, conditions) for side in (predicted, real))
    ratio = a / b if a > 0 and b > 0 else 1.0
    if 1 / LARGE <= ratio <= LARGE:
        return
    factor = f"{max(ratio, 1 / ratio):.1f} times {'as large' if ratio > 1 else 'smaller'}"
    text = (
        f"{predicted.reader.path}: its values are on average {factor} {'as' if ratio > 1 else 'than'} those of "
        f"{real.reader.path} ({a:.2g} and {b:.2g}, log1p)"
    )
    if not known and not 1 / GROSS <= ratio <= GROSS:
        raise UserError(
            f"{text}, so they are on different scales; give both as log1p of counts normalised to the same depth "
            "(natural logarithm, not divided or centred). If they are on one scale and the predictions are that far "
            "off, declare the same uns['perturbdiff']['target_sum'] in both files"
        )
    notes.add("scale", text, 1)


def _mean(side: ExpressionView, conditions: Sequence[Condition]) -> float:
    """Return the mean over genes and over the first cells of evenly spaced conditions."""
    places = np.unique(
        np.linspace(0, len(conditions) - 1, min(len(conditions), _CONDITIONS)).round().astype(int)
    )
    means = [float(side.cells(side.rows[conditions[k]][:_CELLS]).mean()) for k in places]
    return float(np.mean(means)) if means else 0.0
