"""What figures share: ranges, logarithmic axes with plain numbers, many points, legends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from perturbdiff.report.figures.svg import DOTS, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 3000
"""Points of one kind drawn in a panel; of more, an even draw is shown."""

_MARKERS = 200  # up to here points keep their marker and are single elements of the SVG


def spread(values: np.ndarray, *, plain: bool = False) -> tuple[float, float, bool]:
    """Return padded limits and whether a logarithmic axis serves better (all positive, wide spread).

    ``plain`` asks for the limits of a linear axis.
    """
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0, False
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > 30 and not plain:
        return low / 1.3, high * 1.3, True
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return low - pad, high + pad, False


def logarithmic(axes: Axes, *directions: str) -> None:
    """Make axes logarithmic with plain numbers: labels are never read as formulas here."""
    for direction in directions:
        axes.set(**{f"{direction}scale": "log"})
        axis = axes.xaxis if direction == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def counting(axes: Axes, top: float, *directions: str) -> None:
    """Make axes of counts logarithmic from 1 on, with a place for 0."""
    ticks = [0.0, *(float(10**i) for i in range(9) if 10**i <= max(top, 1.0))]
    if len(ticks) < 4:
        ticks = sorted({*ticks, *(3.0 * t for t in ticks if 3 * t <= top)})
    for direction in directions:
        scale = axes.set_xscale if direction == "x" else axes.set_yscale
        scale("symlog", linthresh=1.0, linscale=0.5)
        axis = axes.xaxis if direction == "x" else axes.yaxis
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())


def sampled(n: int, most: int = MOST_POINTS) -> np.ndarray:
    """Return which of ``n`` points are drawn: all, or an even draw that is always the same."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, most, replace=False))


def points(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    color: str,
    *,
    size: float = 12.0,
    alpha: float = 0.5,
    marker: str = "o",
    most: int = MOST_POINTS,
) -> None:
    """Draw points; many become small round dots that cost few bytes.

    Parameters
    ----------
    x, y
        Coordinates [points]; those not finite are left out.
    size
        Area in square points.
    most
        Points drawn; of more, an even draw.
    """
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(x) <= _MARKERS:
        axes.scatter(x, y, s=size, color=color, alpha=alpha, marker=marker, lw=0)
        return
    chosen = sampled(len(x), most)
    gid = f"{DOTS}-{np.sqrt(size):.1f}-{len(axes.collections)}"
    axes.scatter(x[chosen], y[chosen], s=size, color=color, alpha=alpha, lw=0, gid=gid)


def legend_text(label: str, length: int = 28) -> str:
    """Return a label for a legend, which would hide one whose first letter is '_'."""
    return f"\u200b{shorten(label, length)}"
