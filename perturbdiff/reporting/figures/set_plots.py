"""True and sampled sets of cells as points."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from perturbdiff.reporting.figures.axes import points, round_ticks
from perturbdiff.reporting.figures.condition_plots import condition_name
from perturbdiff.reporting.figures.hover import name_points
from perturbdiff.reporting.figures.svg import INK, WIDTH, Look, Plot, draw, legend_text, panels, shorten

MOST_PANELS = 6
_ACROSS = 3
_PANEL = 1.75  # inches


def places(name: str, title: str, table: pd.DataFrame, method: str, look: Look) -> Plot:
    """Draw the sets of up to six conditions, a panel each with axes of its own and one scale in both directions.

    Parameters
    ----------
    table
        condition, source (real, predicted), x, y (`perturbdiff.evaluation.set_places.place_sets`).
    method, look
        Whose sampled sets they are.
    """
    condition = table["condition"].astype(str).to_numpy()
    shown = list(dict.fromkeys(condition))[:MOST_PANELS]
    across = min(_ACROSS, len(shown))
    lines = -(-len(shown) // across)
    with panels(len(shown), across, WIDTH, 0.7 + _PANEL * lines) as (figure, grid):
        for axes, label in zip(grid, shown, strict=True):
            rows = pd.DataFrame(table[condition == label])
            end = 1.1 * float(np.abs(rows[["x", "y"]].to_numpy(np.float64)).max()) or 1.0
            for source, color, marker, owner in (
                ("real", INK, "o", ""),
                ("predicted", look.color, look.marker, method),
            ):
                x, y = rows.loc[rows["source"] == source, ["x", "y"]].to_numpy(np.float64).T
                kept = points(axes, x, y, color, size=16, alpha=0.6, marker=marker, method=owner)
                word = "true set" if source == "real" else "sampled set"
                name_points(axes, x[kept], y[kept], owner, word, [condition_name(label)] * len(kept))
            axes.set(xlim=(-end, end), ylim=(-end, end), box_aspect=1)
            round_ticks(axes.xaxis, 3)
            round_ticks(axes.yaxis, 3)
            axes.set_title(shorten(condition_name(label), 26), loc="left", fontsize=8.5)
        figure.supxlabel("direction in which true sets differ most", fontsize=9)
        figure.supylabel("second direction", fontsize=9)
        handles = [
            Line2D([], [], marker="o", ls="", color=INK, ms=4),
            Line2D([], [], marker=look.marker, ls="", color=look.color, ms=4),
        ]
        words = ["true sets", legend_text(f"sampled by {method}")]
        figure.legend(handles, words, loc="outside upper right", ncols=2)
        return draw(figure, name, title, pd.DataFrame(table[np.isin(condition, shown)]))
