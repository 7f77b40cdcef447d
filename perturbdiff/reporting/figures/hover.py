"""The points of a figure by name: what the page says where a reader points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TITLES = 250
"""Points of a figure that a page without scripts can name. A page with scripts names all."""


@dataclass(frozen=True)
class Points:
    """Named points of a drawn figure, in the order in which the keyboard goes through them.

    Attributes
    ----------
    x, y
        Places in units of the figure's view box, from its top left, float64 [points].
    methods, names, values
        What each point is of: the method (empty for none), what was measured, and its value with its interval.
    """

    x: np.ndarray
    y: np.ndarray
    methods: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


NO_POINTS = Points(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class _Series:
    """Points in data coordinates of their axes, before the figure has its layout."""

    axes: Axes
    x: np.ndarray
    y: np.ndarray
    method: str
    names: tuple[str, ...]
    values: tuple[str, ...]


class Drawing(Figure):
    """A matplotlib figure that remembers the names of its points."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.series: list[_Series] = []


def name_points(
    axes: Axes, x: Any, y: Any, method: str, names: Sequence[str] | str, values: Sequence[str]
) -> None:
    """Name points of a figure of `svg.canvas`, in data coordinates.

    Parameters
    ----------
    x, y
        Coordinates [points].
    method
        Whose points they are, empty for none.
    names
        What each point is, or one name for all of them.
    values
        What was measured there, for reading.
    """
    figure = axes.get_figure()
    if not isinstance(figure, Drawing):
        return
    x, y = np.atleast_1d(np.asarray(x, np.float64)), np.atleast_1d(np.asarray(y, np.float64))
    names = [names] * len(x) if isinstance(names, str) else names
    figure.series.append(_Series(axes, x, y, method, tuple(map(str, names)), tuple(values)))


def placed(figure: Figure) -> Points:
    """Return the named points of a figure where they were drawn. Those outside their axes are left out."""
    xs, ys, methods, names, values = [], [], [], [], []
    for one in figure.series if isinstance(figure, Drawing) else ():
        place = one.axes.transData.transform(np.column_stack([one.x, one.y])) if len(one.x) else ()
        box = one.axes.bbox.padded(2.0)
        for i, (x, y) in enumerate(place):
            if np.isfinite(x) and np.isfinite(y) and box.contains(x, y):
                xs.append(x)
                ys.append(figure.bbox.height - y)
                methods.append(one.method)
                names.append(one.names[i])
                values.append(one.values[i])
    scale = 72.0 / figure.dpi
    x, y = (np.round(np.array(v, np.float64) * scale, 1) for v in (xs, ys))
    return Points(x, y, tuple(methods), tuple(names), tuple(values))


def titles(points: Points) -> str:
    """Return unseen circles whose titles name the points where scripts do not run. Empty for many points."""
    if not 0 < len(points.x) <= MOST_TITLES:
        return ""
    rows = zip(points.x, points.y, points.methods, points.names, points.values, strict=True)
    circles = [
        f'<circle cx="{x:g}" cy="{y:g}" r="5"><title>{escape(_lines(*words))}</title></circle>'
        for x, y, *words in rows
    ]
    return '<g class="named" fill="none" pointer-events="all">\n' + "\n".join(circles) + "\n</g>"


def _lines(*words: str) -> str:
    return "\n".join(word for word in words if word)
