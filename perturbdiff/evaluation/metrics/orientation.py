"""Metrics so turned that more is better."""

from __future__ import annotations

from typing import TypeVar

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
    if direction == "higher":
        return values
    if direction == "lower":
        return -values
    return -abs(values - 1.0) if direction == "one" else values * float("nan")
