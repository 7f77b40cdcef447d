"""The figure of `Scores`: mean scores with their intervals, a panel per metric and a row per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbdiff.reporting.figures.svg import Look, looks, panels
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.loading.results import Run

_WIDTH = 3.1  # inches of a panel
_ACROSS = 3
_DASHES = (0, (4, 3))


def draw(runs: Sequence[Run], columns: Sequence[Column]) -> Figure:
    """Return the figure of some metrics. Methods stand in the order of ``runs``; the ceiling is a line."""
    pyplot.draw_if_interactive()  # loads the backend, without which a notebook shows no figure of ours
    shown = [run for run in runs if run.kind != "ceiling"]
    ceilings = [run for run in runs if run.kind == "ceiling" and not run.is_reference]
    look = looks([run.method for run in shown])
    across = max(1, min(_ACROSS, len(columns)))
    lines = -(-len(columns) // across)
    height = lines * (0.7 + 0.24 * len(shown)) + 0.3
    with panels(len(columns), across, 1.6 + _WIDTH * across, height, sharey=True) as (figure, grid):
        for axes, column in zip(grid, columns, strict=True):
            _panel(axes, column, shown, ceilings, look)
        if grid:
            grid[0].set_yticks(range(len(shown)), [run.method for run in shown])
            grid[0].set_ylim(len(shown) - 0.4, -0.6)
        chances = any(np.isfinite(run.chance(column.name)) for run in shown for column in columns)
        _legend(figure, {"chance": chances, "ceiling": bool(ceilings)})
    return figure


def _panel(
    axes: Axes, column: Column, runs: Sequence[Run], ceilings: Sequence[Run], look: Mapping[str, Look]
) -> None:
    for row, run in enumerate(runs):
        value, _, _ = run.score(column.name)
        ends = run.interval(column.name)
        style = look[run.method]
        if np.isfinite(ends).all():
            axes.plot(ends, [row, row], color=style.color, lw=2.4, alpha=0.5)
        if np.isfinite(value):
            axes.plot([value], [row], style.marker, color=style.color, ms=5.5)
    chance = next((level for run in runs if np.isfinite(level := run.chance(column.name))), np.nan)
    if np.isfinite(chance):
        axes.axvline(chance, color="#22272E", lw=1.0, ls=_DASHES, zorder=1)
    for ceiling in ceilings:
        if np.isfinite(level := ceiling.score(column.name)[0]):
            axes.axvline(level, color="#22272E", lw=1.0, zorder=1)
    axes.set_title(column.heading, loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _legend(figure: Figure, drawn: Mapping[str, bool]) -> None:
    """Explain the lines that are drawn."""
    dashes = {"chance": _DASHES, "ceiling": "-"}
    names = [name for name, there in drawn.items() if there]
    handles = [Line2D([], [], color="#22272E", lw=1.0, ls=dashes[name]) for name in names]
    if names:
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
