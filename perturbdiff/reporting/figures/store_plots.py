"""How the figures of a store's statistics are drawn. See `store_figures` for which there are."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter
from scipy import stats

from perturbdiff.reporting.figures.axes import (
    DENSE,
    bare_rows,
    logarithmic,
    named_rows,
    plain,
    reading,
    round_ticks,
    sampled,
)
from perturbdiff.reporting.figures.hover import name_points
from perturbdiff.reporting.figures.svg import (
    GREY,
    INK,
    NARROW,
    PALETTE,
    WIDTH,
    Plot,
    canvas,
    draw,
    legend_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MOST_NAMED = 1000
"""Distances of one kind that can be pointed at."""
_BLUE = PALETTE[1]
_COLORS = {"within": GREY, "between": PALETTE[0], "control": PALETTE[1]}
_ORDER = {"within": "within one\nperturbation", "between": "between\nperturbations", "control": "to control"}


def histogram(
    name: str,
    title: str,
    table: pd.DataFrame,
    key: str,
    labels: tuple[str, str],
    text: Sequence[str],
    *,
    log_axis: bool = False,
) -> Plot:
    """Draw a table of bins (``lower, upper`` and the column ``key``) with a few numbers in its corner.

    Parameters
    ----------
    labels
        Labels of the x and the y axis.
    text
        Lines of the inset.
    log_axis
        Whether the x axis is logarithmic.
    """
    lower, upper = table["lower"].to_numpy(np.float64), table["upper"].to_numpy(np.float64)
    counts = table[key].to_numpy(np.float64)
    with canvas(NARROW, 2.4) as (figure, axes):
        axes.bar(lower, counts, width=upper - lower, align="edge", color=_BLUE, alpha=0.8, lw=0)
        middles = np.sqrt(lower * upper) if log_axis else (lower + upper) / 2
        spans = [f"{plain(a, 4)} to {plain(b, 4)} {labels[0]}" for a, b in zip(lower, upper, strict=True)]
        name_points(axes, middles, counts, "", spans, [f"{plain(c)} {labels[1]}" for c in counts])
        if log_axis:
            logarithmic(axes, "x", most=9, label=_amount)
        else:
            _counts(axes.xaxis, 6)
        _counts(axes.yaxis, 5)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        left = counts[: len(counts) // 2].sum() > counts[len(counts) // 2 :].sum()
        place = (0.98, "right") if left else (0.02, "left")
        axes.text(
            place[0], 0.97, "\n".join(text), ha=place[1], va="top", transform=axes.transAxes, linespacing=1.4
        )
        _title(axes, title)
        axes.set_ylim(0, 1.28 * max(1.0, float(counts.max(initial=0))))
        axes.grid(visible=False, axis="x")
        return draw(figure, name, title, table)


def outlines(name: str, title: str, histograms: Mapping[str, pd.DataFrame]) -> Plot:
    """Draw the number of non-zero genes of several data sets as outlines of equal area, from bins of cells each."""
    with canvas(NARROW, 2.4 + 0.16 * ((len(histograms) + 1) // 2)) as (figure, axes):
        frames = []
        for i, (label, table) in enumerate(histograms.items()):
            lower, upper = table["lower"].to_numpy(np.float64), table["upper"].to_numpy(np.float64)
            density = table["n_cells"].to_numpy(np.float64) / max(1, table["n_cells"].sum()) / (upper - lower)
            color, dashes = PALETTE[i % len(PALETTE)], ("-", "--", ":")[i // len(PALETTE) % 3]
            edges = np.append(lower, upper[-1])
            axes.stairs(density, edges, color=color, ls=dashes, lw=1.5, label=legend_text(label))
            spans = [
                f"{plain(a, 4)} to {plain(b, 4)} non-zero genes" for a, b in zip(lower, upper, strict=True)
            ]
            cells = [f"{plain(c)} cells" for c in table["n_cells"]]
            name_points(axes, (lower + upper) / 2, density, label, spans, cells)
            frames.append(table.assign(data=label, density=density))
        axes.set_yticks([])
        axes.set_ylim(bottom=0)
        axes.spines["left"].set_visible(False)
        _counts(axes.xaxis, 6)
        axes.set(xlabel="non-zero genes per cell", ylabel="share of cells")
        _title(axes, title)
        figure.legend(loc="outside lower center", ncols=2, handlelength=1.4)
        return draw(figure, name, title, pd.concat(frames, ignore_index=True))


def _counts(axis: Axis, most: int) -> None:
    """Label an axis with at most ``most`` whole numbers, short ones."""
    round_ticks(axis, most, whole=True)
    axis.set_major_formatter(FuncFormatter(_amount))


def _title(axes: Axes, title: str) -> None:
    axes.set_title(textwrap.fill(title, 34), loc="left", fontweight="bold")


def _amount(value: float, _: object = None) -> str:
    """Return a short number: 1.2M, 30k, 250, 0.03."""
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{plain(value / unit)}{letter}"
    return plain(value)


def ranges(name: str, title: str, table: pd.DataFrame) -> Plot:
    """Draw quartiles and median (columns ``quartile_1, median, quartile_3``) of each cell type, one row each."""
    with canvas(NARROW, 0.9 + 0.2 * len(table)) as (figure, axes):
        y = np.arange(len(table))
        low, high = (table[c].to_numpy(np.float64) for c in ("quartile_1", "quartile_3"))
        axes.barh(y, np.maximum(high - low, 0.0), left=low, height=0.55, color=_BLUE, alpha=0.45, lw=0)
        middle = table["median"].to_numpy(np.float64)
        axes.plot(np.stack([middle, middle]), np.stack([y - 0.38, y + 0.38]), color=INK, lw=1.5)
        said = [
            f"median {reading(m, a, b)} non-zero genes" for m, a, b in zip(middle, low, high, strict=True)
        ]
        name_points(axes, middle, y, "", table["cell_type"].tolist(), said)
        _rows(axes, table)
        axes.set_xlim(0, 1.05 * max(1.0, float(high.max())))
        axes.set_xlabel("non-zero genes per cell")
        _title(axes, title)
        return draw(figure, name, title, table)


def bars(name: str, title: str, table: pd.DataFrame) -> Plot:
    """Draw the cells of each cell type (column ``n_cells``) with their share, largest on top."""
    with canvas(NARROW, 0.9 + 0.2 * len(table)) as (figure, axes):
        _cell_bars(axes, table)
        _title(axes, title)
        return draw(figure, name, title, table)


def _cell_bars(axes: Axes, table: pd.DataFrame, *, share: bool = True) -> None:
    counts = table["n_cells"].to_numpy(np.float64)
    axes.barh(np.arange(len(table)), counts, height=0.62, color=_BLUE, alpha=0.8, lw=0)
    said = [f"{plain(c)} cells" for c in counts]
    name_points(axes, counts, np.arange(len(table)), "", table["cell_type"].tolist(), said)
    if share and "share" in table:
        for row, (count, part) in enumerate(zip(counts, table["share"], strict=True)):
            axes.annotate(
                f"{100 * part:.1f} %", (count, row), (3, 0), textcoords="offset points", va="center", size=7.5
            )
    _rows(axes, table)
    axes.set_xlim(0, (1.16 if share else 1.05) * max(1.0, float(counts.max(initial=0))))
    _counts(axes.xaxis, 4)
    axes.set_xlabel("cells")


def _rows(axes: Axes, table: pd.DataFrame) -> None:
    """Name the rows after the cell types, the first on top."""
    named_rows(axes, [legend_text(str(name), 24) for name in table["cell_type"]])


def violins(name: str, title: str, table: pd.DataFrame, means: pd.DataFrame) -> Plot:
    """Draw distances (columns ``kind, ed``) as violins on a root scale, with mean and interval of ``means``."""
    kinds = [k for k in _ORDER if (table["kind"] == k).any()]
    rng = np.random.default_rng(0)
    with canvas(NARROW, 3.2) as (figure, axes):
        for row, kind in enumerate(kinds):
            values = _root(table.loc[table["kind"] == kind, "ed"].to_numpy(np.float64))
            _violin(axes, row, values, _COLORS[kind])
            x = row + rng.uniform(-0.08, 0.08, len(values))
            axes.scatter(x, values, s=4, color=_COLORS[kind], alpha=0.5, lw=0, rasterized=len(table) > DENSE)
            _name_pairs(axes, x, values, pd.DataFrame(table[table["kind"] == kind]))
            interval = pd.DataFrame(means[means["kind"] == kind])
            if len(interval):
                mean, low, high = (
                    float(_root(interval[c].to_numpy(np.float64))[0]) for c in ("mean", "low", "high")
                )
                axes.plot([row - 0.17, row + 0.17], [mean, mean], color=INK, lw=1.8)
                if np.isfinite(low):
                    axes.plot([row, row], [low, high], color=INK, lw=1.2)
        _root_scale(axes.yaxis, table["ed"].to_numpy(np.float64))
        counts = [int((table["kind"] == k).sum()) for k in kinds]
        axes.set_xticks(
            range(len(kinds)), [f"{_ORDER[k]}\n{n} pairs" for k, n in zip(kinds, counts, strict=True)]
        )
        axes.set_xlim(-0.6, len(kinds) - 0.4)
        axes.set_ylabel("energy distance (root scale)")
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0)
        _title(axes, title)
        return draw(figure, name, f"Energy distances: {title}", table)


def _name_pairs(axes: Axes, x: np.ndarray, y: np.ndarray, table: pd.DataFrame) -> None:
    """Name the distances of a table (columns group_a, group_b, ed) at their places."""
    if len(table) > MOST_NAMED:
        chosen = sampled(len(table), MOST_NAMED)
        x, y, table = x[chosen], y[chosen], table.iloc[chosen]
    pairs = [
        " and ".join(dict.fromkeys(map(str, p))) for p in zip(table["group_a"], table["group_b"], strict=True)
    ]
    name_points(axes, x, y, "", pairs, [f"energy distance {reading(d)}" for d in table["ed"]])


def _root(values: np.ndarray) -> np.ndarray:
    """Return the root with the value's sign."""
    return np.sign(values) * np.sqrt(np.abs(values))


def _violin(axes: Axes, row: int, values: np.ndarray, color: str) -> None:
    if len(values) < 4 or np.ptp(values) < 1e-9:
        return
    density = stats.gaussian_kde(values)
    pad = float(np.sqrt(density.covariance[0, 0]))
    y = np.linspace(values.min() - pad, values.max() + pad, 120)
    width = density(y)
    width *= 0.38 / width.max()
    axes.fill_betweenx(y, row - width, row + width, color=color, alpha=0.28, lw=0)


def _root_scale(axis: Axis, values: np.ndarray) -> None:
    """Put ticks at round distances on an axis that holds roots."""
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    size = max(abs(low), abs(high), 1e-6)
    unit = 10 ** np.floor(np.log10(size))
    top = next(m for m in (1, 2, 5, 10) if m * unit >= size) * unit
    marks = np.array([0.01, 0.05, 0.2, 0.5, 1.0]) * top
    ticks = [0.0, *(m for m in marks if m <= 1.2 * high), *(-m for m in marks if m <= -1.2 * low)]
    axis.set_major_locator(FixedLocator(sorted(_root(np.array(ticks)).tolist())))
    axis.set_major_formatter(FuncFormatter(lambda root, _: _amount(float(f"{np.sign(root) * root**2:.3g}"))))


def beside(name: str, kind: str, table: pd.DataFrame, values: pd.DataFrame) -> Plot:
    """Draw, by cell type, the number of cells and beside it the distances with mean and interval.

    Parameters
    ----------
    kind
        What is compared, in words.
    table
        Columns ``cell_type, n_cells, mean, low, high``.
    values
        The distances: columns ``cell_type, ed``.
    """
    title = "Cells and distances by cell type"
    with canvas(WIDTH * 0.9, max(1.9, 1.0 + 0.22 * len(table))) as (figure, flat):
        flat.remove()
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.3))
        _cell_bars(left, table, share=False)
        rng = np.random.default_rng(0)
        color = _COLORS["between"]
        for row, line in enumerate(table.to_dict("records")):
            distances = values.loc[values["cell_type"] == line["cell_type"], "ed"].to_numpy(np.float64)
            y = row + rng.uniform(-0.2, 0.2, len(distances))
            right.scatter(distances, y, s=4, color=color, alpha=0.4, lw=0, rasterized=len(values) > DENSE)
            _name_pairs(right, distances, y, pd.DataFrame(values[values["cell_type"] == line["cell_type"]]))
            if np.isfinite(line["low"]):
                right.plot([line["low"], line["high"]], [row, row], color=color, lw=4, alpha=0.45)
            right.plot([line["mean"]] * 2, [row - 0.3, row + 0.3], color=INK, lw=1.6)
        bare_rows(right)
        round_ticks(right.xaxis, 4)
        right.set_xlabel(f"energy distance,\n{kind}")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=9.5)
        return draw(figure, name, f"{title}: {kind}", table)
