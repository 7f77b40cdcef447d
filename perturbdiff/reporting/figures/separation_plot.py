"""How well the tests of each method separate the genes that truly change from the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from perturbdiff.reporting.figures.axes import named_rows, plain
from perturbdiff.reporting.figures.hover import name_points
from perturbdiff.reporting.figures.score_plots import MOST_METHODS
from perturbdiff.reporting.figures.svg import INK, PALETTE, WIDTH, Plot, canvas, draw, of_method, shorten
from perturbdiff.reporting.loading.de_tables import STEP, Split

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 60
_TICKS = (0.0, 1.3, 5.0, 15.0, 30.0)

_TRUE, _OTHER = PALETTE[0], PALETTE[1]


def separations(name: str, title: str, groups: Mapping[str, Split], alpha: float) -> Plot:
    """Draw −log10 of the adjusted p for true DE genes (above each line) and for the others (below it).

    One row per method on a root scale, each side scaled to its own peak. Ticks are medians, the number is the
    probability that a true DE gene has the smaller q: methods are ranked by it, below the real test.

    Parameters
    ----------
    groups
        Distributions by the label of their row: the real test first, then the methods.
    alpha
        A dashed line marks where a gene counts as DE.
    """
    truth, *methods = list(groups)[: MOST_METHODS + 1]
    shown = [truth, *sorted(methods, key=lambda m: -np.nan_to_num(groups[m].separation, nan=-1.0))]
    top = max(3.0, _high(groups[truth]))
    edges = np.linspace(0, np.sqrt(top), _BINS + 1)
    beyond = edges[-1] * np.array([1.03, 1.1])  # a wider bar for all that is farther right
    with canvas(WIDTH, 0.95 + 0.46 * len(shown)) as (figure, axes):
        for row, label in enumerate(shown):
            for true, color, sign in ((True, _TRUE, -1.0), (False, _OTHER, 1.0)):
                counts = _binned(groups[label], edges, true=true)
                height = sign * 0.42 * counts / max(1.0, float(counts.max()))
                style = {"baseline": row, "fill": True, "color": color, "alpha": 0.75, "lw": 0}
                style["gid"] = of_method(label)
                axes.stairs(row + height[:-1], edges, **style)
                axes.stairs(row + height[-1:], beyond, **style)
                middle = np.sqrt(groups[label].median(true=true))
                middle = middle if middle < edges[-1] else beyond.mean()
                axes.plot([middle, middle], [row, row + sign * 0.46], color=INK, lw=1.6, gid=of_method(label))
                said = f"median adjusted p {_probability(groups[label].median(true=true))}"
                what = f"{int(counts.sum()):,} {'true DE genes' if true else 'other genes'}"
                name_points(axes, middle, row + sign * 0.23, label, what, [said])
            axes.axhline(row, color=INK, lw=0.5)
            separation = groups[label].separation
            text = "n/a" if np.isnan(separation) else f"{separation:.2f}"
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontweight": "bold"}
            axes.text(1.02, row, text, gid=of_method(label), **place)
        axes.axvline(np.sqrt(-np.log10(alpha)), color=INK, lw=0.9, ls=(0, (4, 3)))
        _separation_axes(axes, shown, top, beyond)
        handles = [
            Patch(fc=_TRUE, alpha=0.75),
            Patch(fc=_OTHER, alpha=0.75),
            Line2D([], [], color=INK, lw=1.6),
        ]
        words = ("true DE genes", "other genes", "median")
        figure.legend(handles, words, loc="outside upper left", ncols=3, handlelength=1.0, columnspacing=1.2)
        return draw(figure, name, title, _separation_data(groups, edges))


def _separation_axes(axes: Axes, shown: Sequence[str], top: float, beyond: np.ndarray) -> None:
    named_rows(axes, [shorten(label, 24) for label in shown], shown)
    axes.set(xlim=(0, beyond[-1]), xlabel="adjusted p of the test (smaller to the right)")
    ticks = [t for t in _TICKS if t <= 0.75 * top]
    words = [*(_probability(t) for t in ticks), "less"]
    axes.set_xticks([*np.sqrt(ticks), beyond.mean()], words)


def _probability(power: float) -> str:
    """Return the probability whose −log10 is given: 1, 0.05, 10⁻¹⁰."""
    if math.isnan(power):
        return "n/a"
    if power < 3.5:
        return plain(10.0**-power, 1)
    return "10⁻" + f"{power:.0f}".translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _high(split: Split) -> float:
    """Return the −log10 q below which 99 % of the true DE genes lie."""
    if not split.true.sum():
        return 0.0
    return float(np.searchsorted(np.cumsum(split.true), 0.99 * split.true.sum()) * STEP)


def _binned(split: Split, edges: np.ndarray, *, true: bool) -> np.ndarray:
    """Return counts in bins of the root of −log10 q, the last of them for all beyond."""
    counts = split.true if true else split.other
    middle = np.sqrt((np.arange(len(counts)) + 0.5) * STEP)
    return np.histogram(middle, np.append(edges, np.inf), weights=counts)[0]


def _separation_data(groups: Mapping[str, Split], edges: np.ndarray) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "method": label,
                "genes": "true DE" if true else "other",
                "lower": edges**2,
                "upper": np.append(edges[1:] ** 2, np.inf),
                "count": _binned(split, edges, true=true),
                "median": split.median(true=true),
                "separation": split.separation,
            }
        )
        for label, split in groups.items()
        for true in (True, False)
    ]
    return pd.concat(frames, ignore_index=True)
