"""Numbers, intervals, times and sizes as they are written in tables and sentences of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def number(value: float, decimals: int = 3) -> str:
    """Return a number for reading: true minus sign, ∞, and n/a where it is undefined."""
    if math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:,.{decimals}f}"
    return (text.lstrip("-") if float(text.replace(",", "")) == 0 else text).replace("-", "−")


def decimals_for(values: Sequence[float]) -> int:
    """Return how many decimals show three digits of a column's typical value, 2 to 6."""
    sizes = [abs(v) for v in values if math.isfinite(v) and v != 0]
    if not sizes:
        return 3
    return int(np.clip(2 - math.floor(math.log10(float(np.median(sizes)))), 1, 6))


def amount(value: Any) -> str:
    """Return a count or a measured number with separators, text as it is."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "n/a"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | np.integer) or float(value).is_integer() or abs(value) >= 1000:
        return f"{int(value):,}"
    return number(float(value), decimals_for([float(value)]))


def plus_minus(sd: float, decimals: int) -> str:
    """Return a standard deviation for reading. Empty if it is unknown."""
    return "" if math.isnan(sd) else f"± {number(sd, decimals)}"


def interval(low: float, high: float, decimals: int) -> str:
    """Return an interval for reading. Empty if it is unknown."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return f"[{number(low, decimals)}, {number(high, decimals)}]"


def small(q: float) -> str:
    """Return a probability for reading."""
    if math.isnan(q):
        return "n/a"
    return f"{q:.3f}" if q >= 1e-3 else "< 10⁻³⁰" if q < 1e-30 else f"{q:.0e}".replace("-", "−")


def duration(seconds: Any) -> str:
    """Return a duration in the unit that suits it."""
    if not isinstance(seconds, int | float):
        return "n/a"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def memory(mib: Any) -> str:
    """Return an amount of memory in MiB or GiB."""
    if not isinstance(mib, int | float):
        return "n/a"
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
