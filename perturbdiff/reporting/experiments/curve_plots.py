"""Curves of a metric over steps, levels, work or size: a panel for each data set, a curve for each arm."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from perturbdiff.reporting.figures.axes import axis_label, logarithmic, plain, reading, round_ticks, spread
from perturbdiff.reporting.figures.hover import name_points
from perturbdiff.reporting.figures.svg import (
    GREY,
    INK,
    NARROW,
    PAPER,
    WIDTH,
    Look,
    Plot,
    canvas,
    draw,
    legend_text,
    of_method,
)
from perturbdiff.reporting.loading.metric_columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANDOM, BEST, CEILING = "random initialisation", "best baseline", "ceiling"

MOST_CURVES = 14
"""Curves with a line of their own. The numbers beside the figure hold all."""
_TITLE = 26  # letters in a line of a panel's title
_FAR = -2.0  # scores of at most 1 below this squeeze all others on a plain axis
_TICKS = (-1000.0, -300.0, -100.0, -30.0, -10.0, -3.0, -1.0, 0.0, 0.5, 1.0)
_STYLES: dict[str, dict[str, object]] = {
    RANDOM: {"color": INK, "lw": 1.1, "ls": (0, (4, 3))},
    BEST: {"color": GREY, "lw": 1.1, "ls": "-"},
    CEILING: {"color": GREY, "lw": 1.1, "ls": (0, (1, 2))},
}


@dataclass(frozen=True)
class Panel:
    """One data set's curves.

    Attributes
    ----------
    rows
        curve, x, mean, lowest and highest (over seeds), further columns for the CSV. A row per point.
    flat
        What is drawn as a line from side to side: RANDOM, BEST or CEILING, and its height.
    """

    title: str
    rows: pd.DataFrame
    flat: Mapping[str, float] = field(default_factory=dict)


def curves(
    name: str,
    title: str,
    metric: Column,
    panels: Sequence[Panel],
    look: Mapping[str, Look],
    across: str,
) -> Plot:
    """Draw a metric over x: a panel per data set, a curve per arm with the range over its seeds.

    Parameters
    ----------
    look
        Colours and markers of the curves, by name.
    across
        What x is, with its unit.
    """
    shown = list(dict.fromkeys(str(c) for panel in panels for c in panel.rows["curve"]))[:MOST_CURVES]
    flat = list(dict.fromkeys(words for panel in panels for words in panel.flat))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    below = 0.2 * -(-(len(shown) + len(flat)) // 2)
    with canvas(WIDTH if columns > 1 else NARROW, 2.15 * lines + below + 0.2) as (figure, whole):
        whole.remove()
        grid = figure.subplots(lines, columns, squeeze=False).ravel()
        xs = np.concatenate([p.rows["x"].to_numpy(np.float64) for p in panels])
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, shown, look, metric)
            _axes(axes, panel, xs)
            axes.set_title(textwrap.fill(panel.title, _TITLE), loc="left", fontsize=8.5, fontweight="bold")
        for i, axes in enumerate(grid):
            axes.set_visible(i < len(panels))
            if i % columns == 0:
                axes.set_ylabel(axis_label(metric))
            if i + columns >= len(panels):  # nothing below it
                axes.set_xlabel(textwrap.fill(across, 30 if columns > 1 else 48))
        handles = [
            Line2D([], [], color=look[c].color, marker=look[c].marker, ls=look[c].dash, ms=4) for c in shown
        ]
        handles += [Line2D([], [], **_STYLES[w]) for w in flat]  # pyright: ignore[reportArgumentType]
        if len(handles) > 1:
            words = [legend_text(c) for c in (*shown, *flat)]
            figure.legend(handles, words, loc="outside lower center", ncols=2, handlelength=1.8)
        return draw(figure, name, title, _data(panels, metric))


def _draw_panel(
    axes: Axes, panel: Panel, shown: Sequence[str], look: Mapping[str, Look], metric: Column
) -> None:
    for words, height in panel.flat.items():
        axes.axhline(height, zorder=1, **_STYLES[words])  # pyright: ignore[reportArgumentType]
    for curve in shown:
        rows = panel.rows.loc[(panel.rows["curve"] == curve).to_numpy(bool)].sort_values("x")
        rows = rows.loc[np.isfinite(rows["mean"].to_numpy(np.float64))]
        if rows.empty:
            continue
        x, mean, low, high = (rows[c].to_numpy(np.float64) for c in ("x", "mean", "lowest", "highest"))
        style, owner = look[curve], of_method(curve)
        axes.plot(x, mean, color=style.color, ls=style.dash, gid=owner)
        axes.plot(x, mean, style.marker, color=style.color, ms=4.5, mec=PAPER, mew=0.5, gid=owner)
        if (high > low).any():
            axes.fill_between(x, low, high, color=style.color, alpha=0.16, lw=0, gid=owner)
            axes.vlines(x, low, high, color=style.color, lw=1.0, alpha=0.6, gid=owner)
        places = [f"{panel.title}, at {plain(v)}" for v in x]
        ends = zip(mean, low, high, rows["seeds"].tolist() if "seeds" in rows else [1] * len(x), strict=True)
        said = [_seeds(metric, *end) for end in ends]
        name_points(axes, x, mean, curve, places, said)


def _seeds(metric: Column, mean: float, low: float, high: float, seeds: int) -> str:
    several = f", {seeds} seeds" if seeds > 1 else ""
    return f"{metric.label} {reading(mean, low, high) if seeds > 1 else reading(mean)}{several}"


def _axes(axes: Axes, panel: Panel, xs: np.ndarray) -> None:
    ends = panel.rows[["mean", "lowest", "highest"]].to_numpy(np.float64).ravel()
    low, high, wide = spread(np.concatenate([ends, np.array(list(panel.flat.values()))]))
    axes.set_ylim(low, high)
    if low < _FAR and high < 1.7:
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_locator(FixedLocator([t for t in _TICKS if low <= t <= high]))
    elif wide:
        logarithmic(axes, "y", most=6)
    else:
        round_ticks(axes.yaxis, 4)
    left, right, wide = spread(xs)
    axes.set_xlim(left, right)
    if wide:
        logarithmic(axes, "x", subs=(1.0,), most=5)
    else:
        round_ticks(axes.xaxis, 4)
    numbers = FuncFormatter(lambda value, _: plain(value))
    axes.xaxis.set_major_formatter(numbers)
    axes.yaxis.set_major_formatter(numbers)


def _data(panels: Sequence[Panel], metric: Column) -> pd.DataFrame:
    parts = [panel.rows.assign(panel=panel.title, metric=metric.name) for panel in panels]
    for panel in panels:
        flat = {"curve": list(panel.flat), "mean": list(panel.flat.values()), "panel": panel.title}
        parts.append(pd.DataFrame(flat).assign(metric=metric.name))
    return pd.concat([part for part in parts if len(part)], ignore_index=True)
