"""Metrics so turned that more is better."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

Values = TypeVar("Values", float, np.ndarray)


def oriented(values: Values, direction: str) -> Values:
    """Return values so that more is better: as they are, negated, or minus their distance from 1, else NaN.

    Parameters
    ----------
    values
        Values of a metric, any shape.
    direction
        ``higher``, ``lower``, ``one`` or ``none``, as in the catalogue.
    """
    given: Any = values
    if direction == "higher":
        return given
    if direction == "lower":
        return -given
    return -abs(given - 1.0) if direction == "one" else given * float("nan")
