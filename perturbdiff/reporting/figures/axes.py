"""How figures number their axes, name their rows and draw their points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from perturbdiff.reporting.figures.svg import DOTS, of_method
from perturbdiff.reporting.loading.metric_columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

DENSE = 1200
"""A scatter of more points is drawn as an image inside the SVG."""
MOST_POINTS = 3000
"""Points of one kind drawn in a panel. Of more, an even draw is shown."""
_MARKERS = 200  # up to here points keep their marker and are single elements of the SVG
_ROUND = (1, 2, 2.5, 5, 10)


def plain(value: float, digits: int = 6) -> str:
    """Return a number in plain decimals of at most ``digits`` digits: never an exponent, a true minus sign."""
    if math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    decimals = max(0, min(12, digits - 1 - math.floor(math.log10(abs(value)))))
    text = f"{value:,.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text.replace("-", "−")


def reading(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """Return a value with the interval that is known of it, for reading."""
    ends = "" if math.isnan(low) or math.isnan(high) else f" ({plain(low, 3)} to {plain(high, 3)})"
    return f"{plain(value, 3)}{ends}"


_UNITS = {"energy_distance": "log1p units", "MAE": "log1p units", "MSE": "squared log1p units"}


def axis_label(metric: Column) -> str:
    """Return a metric's name with the direction of better scores and its unit, if it has one."""
    unit = _UNITS.get(metric.name)
    return f"{metric.heading}, {unit}" if unit else metric.heading


def round_ticks(axis: Axis, most: int, *, whole: bool = False) -> None:
    """Put at most ``most`` + 1 ticks at round numbers, which are written in full."""
    axis.set_major_locator(MaxNLocator(most, steps=_ROUND, integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


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


def logarithmic(
    axes: Axes,
    *directions: str,
    subs: tuple[float, ...] = (1.0, 3.0),
    most: int | None = None,
    label: Callable[[float, Any], str] = lambda value, _: plain(value, 3),
) -> None:
    """Make axes logarithmic with plain numbers, at most ``most`` of them, because labels are never read as formulas."""
    for direction in directions:
        axes.set(**{f"{direction}scale": "log"})
        axis = axes.xaxis if direction == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=subs, numticks=most))
        axis.set_major_formatter(FuncFormatter(label))
        axis.set_minor_formatter(NullFormatter())


def bare_rows(axes: Axes) -> None:
    """Draw no ticks, grid lines and spine along the y axis, whose places are rows."""
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def named_rows(axes: Axes, labels: Sequence[str], methods: Sequence[str] = ()) -> None:
    """Give each row a label on the y axis, the first on top. ``methods`` are those whose rows they are."""
    axes.set_yticks(range(len(labels)), labels)
    for text, method in zip(axes.get_yticklabels(), methods, strict=False):
        text.set_gid(of_method(method))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    bare_rows(axes)


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
    method: str = "",
) -> np.ndarray:
    """Draw points. Many become small round dots that cost few bytes.

    Parameters
    ----------
    x, y
        Coordinates [points]. Those not finite are left out.
    size
        Area in square points.
    most
        Points drawn. Of more, an even draw.
    method
        Whose points they are.

    Returns
    -------
    ndarray
        Which points were drawn, int64.
    """
    kept = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    owner = of_method(method) if method else ""
    if len(kept) <= _MARKERS:
        gid = owner or None
        axes.scatter(x[kept], y[kept], s=size, color=color, alpha=alpha, marker=marker, lw=0, gid=gid)
        return kept
    kept = kept[sampled(len(kept), most)]
    gid = f"{DOTS}-{np.sqrt(size):.1f}-{len(axes.collections)}-{owner}"
    axes.scatter(x[kept], y[kept], s=size, color=color, alpha=alpha, lw=0, gid=gid)
    return kept
