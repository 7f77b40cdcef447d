"""The report's figures. Each takes tables and returns a `Plot` in narrow panels, so that a phone can show them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbdiff.report.figures.svg import (
    GREY,
    INK,
    NARROW,
    PALETTE,
    PAPER,
    WIDTH,
    Look,
    Plot,
    canvas,
    draw,
    logarithmic,
    named_rows,
    points,
    shorten,
    spread,
)
from perturbdiff.report.loading.metric_columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def scatter(
    name: str, pairs: pd.DataFrame, metric: Column, methods: tuple[str, str], look: Mapping[str, Look]
) -> Plot:
    """Draw one metric per condition, method ``methods[0]`` (y, column a) against ``methods[1]`` (x, column b)."""
    ours, other = methods
    a, b = pairs["a"].to_numpy(), pairs["b"].to_numpy()
    better = (a > b) if metric.higher else (a < b)
    low, high, wide = spread(np.concatenate([a, b]))
    wide = wide and not metric.higher  # scores with a best value are read on a plain axis
    if not wide:
        low, high, _ = spread(np.concatenate([a, b]), plain=True)
    won = 100 * float((better + 0.5 * (a == b)).mean())
    with canvas(NARROW, 3.4) as (figure, axes):
        if wide:
            logarithmic(axes, "x", "y")
        axes.axline((low, low), (high, high), color=INK, lw=0.8, ls=(0, (4, 3)))
        size = 16 if len(pairs) < 300 else 8
        tied = a == b
        styles = (look[other], look[ours], Look(GREY, "o"))
        for rows, style in zip((~better & ~tied, better, tied), styles, strict=True):
            points(axes, b[rows], a[rows], style.color, size=size, alpha=0.65, marker=style.marker)
        axes.set(xlim=(low, high), ylim=(low, high), box_aspect=1)
        axes.set_xlabel(f"{shorten(other, 34)}")
        axes.set_ylabel(f"{shorten(ours, 34)}")
        axes.set_title(textwrap.fill(metric.heading, 18), loc="left", fontweight="bold")
        axes.set_title(f"better in {won:.0f} %", loc="right", color=look[ours].color)
        data = pairs.rename(columns={"a": ours, "b": other}).reset_index()
        return draw(figure, name, f"{metric.label}: {ours} against {other}", data)


def strips(
    name: str, title: str, values: Mapping[str, pd.Series], metric: Column, look: Mapping[str, Look]
) -> Plot:
    """Draw a metric's values per condition, one row per method: box, points, best median on top."""
    filled = {method: series.dropna() for method, series in values.items()}
    order = sorted(filled, key=lambda m: _median_key(filled[m], higher=metric.higher))
    every = np.concatenate([filled[m].to_numpy() for m in order]) if order else np.empty(0)
    low, high, wide = spread(every)
    rng = np.random.default_rng(0)
    with canvas(WIDTH, 0.75 + 0.36 * len(order)) as (figure, axes):
        if wide:
            logarithmic(axes, "x")
        for row, method in enumerate(order):
            x, style = filled[method].to_numpy(), look[method]
            y = row + 0.22 * rng.uniform(-1, 1, len(x))
            points(axes, x, y, style.color, size=7, alpha=0.35, most=min(1000, 6000 // len(order)))
            if len(x) > 1:
                _box(axes, x, row, style.color)
        named_rows(axes, [shorten(m, 24) for m in order])
        axes.set(xlim=(low, high), xlabel=metric.heading)
        data = pd.concat(
            [s.rename("value").reset_index().assign(method=m) for m, s in filled.items()], ignore_index=True
        )
        return draw(figure, name, title, data)


def _median_key(series: pd.Series, *, higher: bool) -> tuple[bool, float]:
    return (series.empty, 0.0 if series.empty else float(series.median()) * (-1 if higher else 1))


def _box(axes: Axes, x: np.ndarray, row: int, color: str) -> None:
    q1, middle, q3 = np.percentile(x, (25, 50, 75))
    axes.plot([q1, q3], [row, row], color=PAPER, lw=6, solid_capstyle="butt")
    axes.plot([q1, q3], [row, row], color=color, lw=4, solid_capstyle="butt")
    axes.plot([middle, middle], [row - 0.32, row + 0.32], color=INK, lw=2.0)


def curves(name: str, title: str, table: pd.DataFrame, term: str) -> Plot:
    """Draw one loss term of training.csv over the steps, training in blue and validation in orange."""
    data = pd.DataFrame(table[["step", "split", term]]).dropna()
    with canvas(NARROW, 2.4) as (figure, axes):
        groups = sorted(
            data.groupby("split", observed=True), key=lambda item: (item[0] != "train", str(item[0]))
        )
        for i, (split, rows) in enumerate(groups):
            color = {"train": PALETTE[1], "valid": PALETTE[0]}.get(
                str(split), PALETTE[(i + 2) % len(PALETTE)]
            )
            rows = rows.sort_values("step")
            step, value = rows["step"].to_numpy(), rows[term].to_numpy()
            many = len(rows) > 40
            axes.plot(step, value, color=color, lw=0.8 if many else 1.5, alpha=0.35 if many else 1.0)
            if many:
                width = max(len(rows) // 25, 3)
                smooth = pd.Series(value).rolling(width, center=True, min_periods=1).median()
                axes.plot(step, smooth, color=color)
            elif split != "train":
                axes.plot(step, value, "o", color=color, ms=3.5)
            axes.plot([], [], color=color, label=f"\u200b{split}")
        if spread(data[term].to_numpy(np.float64))[2]:
            logarithmic(axes, "y")
        axes.set(xlabel="optimiser step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_title(term, loc="left", fontweight="bold")
        figure.legend(loc="outside upper right", ncols=3, handlelength=1.2)
        return draw(figure, name, title, data)


def shared_limits(table: pd.DataFrame) -> tuple[float, float, float, float]:
    """Return padded x and y limits over all conditions of an embedding."""
    ends = []
    for name in ("x", "y"):
        values = table[name].to_numpy(np.float64)
        pad = 0.04 * float(np.ptp(values)) or 1.0
        ends += [float(values.min()) - pad, float(values.max()) + pad]
    return ends[0], ends[1], ends[2], ends[3]


def embedding(
    name: str, condition: str, cells: pd.DataFrame, limits: tuple[float, float, float, float], color: str
) -> Plot:
    """Draw control, real and predicted cells of one condition on axes shared with the other conditions.

    Parameters
    ----------
    condition
        "cell type|batch|perturbation".
    cells
        source (control, real, predicted), x, y and, if known, explained_x, explained_y (shares of variance).
    """
    label = condition.replace("|", " · ")
    sources = cells["source"].astype(str).to_numpy()
    places = cells[["x", "y"]].to_numpy(np.float64)
    with canvas(NARROW, 3.55) as (figure, axes):
        looks = (("control", GREY, 0.35), ("real", INK, 0.4), ("predicted", color, 0.5))
        for source, tint, alpha in looks:
            x, y = places[sources == source].T
            points(axes, x, y, tint, size=6, alpha=alpha, most=1500)
        for source, tint, _ in looks:
            if (sources == source).any():
                x, y = places[sources == source].mean(axis=0)
                axes.plot(x, y, "P", color=tint, ms=9, mec=PAPER, mew=1.0)
        axes.set(xlim=limits[:2], ylim=limits[2:], box_aspect=0.8)
        for set_label, axis, number in ((axes.set_xlabel, "x", 1), (axes.set_ylabel, "y", 2)):
            share = float(cells[f"explained_{axis}"].iloc[0]) if f"explained_{axis}" in cells else 0.0
            set_label(f"PC {number} ({100 * share:.1f} %)" if share else f"PC {number}")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(shorten(label, 38), loc="left")
        handles = [Line2D([], [], marker="o", ls="", color=tint, ms=4) for _, tint, _ in looks]
        figure.legend(handles, [source for source, _, _ in looks], loc="outside lower center", ncols=3)
        return draw(figure, name, f"Cells of {label}: control, real and predicted", cells)


def alike(name: str, method: str, pairs: pd.DataFrame, look: Mapping[str, Look]) -> Plot:
    """Draw, for pairs of perturbations, how alike predicted changes are against how alike the real ones are."""
    shown = pairs.dropna(subset=["real", "predicted"])
    style = look[method]
    with canvas(NARROW, 3.3) as (figure, axes):
        axes.axline((0, 0), (1, 1), color=INK, lw=0.8, ls=(0, (4, 3)))
        x, y = (shown[side].to_numpy(np.float64) for side in ("real", "predicted"))
        points(axes, x, y, style.color, size=12 if len(shown) < 300 else 6, marker=style.marker)
        every = np.concatenate([x, y, [-0.05, 0.3]])
        ends = float(every.min()) - 0.04, min(1.03, float(every.max()) + 0.05)
        axes.set(xlim=ends, ylim=ends, box_aspect=1)
        axes.set_xlabel("correlation, real changes")
        axes.set_ylabel("correlation, predicted changes")
        axes.set_title(shorten(method, 36), loc="left", fontweight="bold")
        return draw(figure, name, f"How alike two perturbations are: {method}", shown)
