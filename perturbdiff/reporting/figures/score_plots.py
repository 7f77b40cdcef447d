"""Figures of whole methods: mean scores with their intervals, radars, win rates, realism."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter

from perturbdiff.reporting.figures.axes import (
    bare_rows,
    logarithmic,
    named_rows,
    plain,
    reading,
    round_ticks,
    spread,
)
from perturbdiff.reporting.figures.hover import name_points
from perturbdiff.reporting.figures.svg import (
    GREY,
    INK,
    PALETTE,
    PAPER,
    RULE,
    WIDTH,
    Look,
    Plot,
    canvas,
    draw,
    legend_text,
    of_method,
    panels,
    shorten,
)
from perturbdiff.reporting.loading.comparison import ranks
from perturbdiff.reporting.loading.metric_columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_METHODS = 16
"""Methods with a row in a figure. The numbers beside it hold all."""

_COLORED = 14
_TITLE = 14  # letters in a line of a panel's title
_DASHES = (0, (4, 3))


@dataclass(frozen=True)
class Forest:
    """One metric of all methods: rows method, value, low, high. Chance and ceiling NaN where unknown.

    Where several rows belong to one arm, a column ``arm`` names it: they are switched off together.
    ``title`` stands above the panel instead of the metric's name.
    """

    metric: Column
    rows: pd.DataFrame
    chance: float = float("nan")
    ceiling: float = float("nan")
    title: str = ""


def radar(
    name: str,
    title: str,
    scores: pd.DataFrame,
    columns: Sequence[Column],
    look: Mapping[str, Look],
    *,
    lines: pd.DataFrame | None = None,
) -> Plot:
    """Draw scores in [0, 1] as polygons, up to 14 methods in colour. Values outside are drawn at the ends.

    Parameters
    ----------
    scores
        Methods × metric names. A metric on which nothing is defined is left out, an undefined score is at 0.
    lines
        Same columns: what is drawn as a thin line for reference, solid, then dashed (a ceiling, chance).
    """
    scores = scores.dropna(axis=1, how="all")
    labels = [m.label for m in columns if m.name in scores]
    means = {str(method): float(row.mean()) for method, row in scores.iterrows()}
    order = sorted(means, key=lambda method: -means[method])
    strong = order[:_COLORED]
    angles = np.linspace(0, 2 * np.pi, len(labels), endpoint=False)
    around = np.append(angles, angles[:1])
    references = pd.DataFrame(columns=scores.columns) if lines is None else lines[scores.columns]
    with canvas(WIDTH, 4.4 + 0.2 * ((len(strong) + len(references) + 1) // 2)) as (figure, flat):
        flat.remove()
        axes = figure.add_subplot(projection="polar")
        axes.set_theta_offset(np.pi / 2)  # pyright: ignore[reportAttributeAccessIssue]
        axes.set_theta_direction(-1)  # pyright: ignore[reportAttributeAccessIssue]
        handles = [
            Line2D([], [], color=look[m].color, lw=2.0, ls=look[m].dash, marker=look[m].marker, ms=3.5)
            for m in strong
        ]
        for i, (_, row) in enumerate(references.iterrows()):
            style = {"color": (INK, GREY)[i % 2], "lw": 1.1, "ls": ("-", _DASHES)[i % 2]}
            axes.plot(around, _ring(row), **style)
            handles.append(Line2D([], [], **style))
        for method in reversed(order):
            ring, shown = _ring(scores.loc[method]), method in strong
            color, width = (look[method].color, 1.6) if shown else (RULE, 0.8)
            owner = of_method(method)
            axes.plot(around, ring, color=color, lw=width, ls=look[method].dash, gid=owner)
            axes.plot(angles, ring[:-1], look[method].marker, color=color, ms=3.0, gid=owner)
            if method == strong[0]:
                axes.fill(around, ring, color=look[method].color, alpha=0.12, lw=0, gid=owner)
            name_points(axes, angles, ring[:-1], method, labels, [reading(v) for v in scores.loc[method]])
        axes.set_xticks(angles, labels)
        axes.tick_params(axis="x", pad=5)
        axes.set_ylim(0, 1.02)
        axes.set_yticks((0.25, 0.5, 0.75, 1.0), ("", "", "", ""))
        axes.spines["polar"].set_visible(False)
        words = [legend_text(m) for m in (*strong, *map(str, references.index))]
        figure.legend(handles, words, loc="outside lower center", ncols=2, handlelength=1.4)
        data = (
            (scores if references.empty else pd.concat([scores, references]))
            .rename_axis("method")
            .reset_index()
        )
        return draw(figure, name, title, data)


def _ring(row: pd.Series) -> np.ndarray:
    values = np.clip(np.nan_to_num(row.to_numpy(np.float64)), 0.0, 1.0)
    return np.append(values, values[:1])


def forest(
    name: str,
    title: str,
    metrics: Sequence[Forest],
    look: Mapping[str, Look],
    *,
    bars: bool = False,
    most: int = MOST_METHODS,
) -> Plot:
    """Draw mean scores with 95 % intervals: a panel per metric, a row per method, the same rows in each.

    Rows are ranked by the mean of a method's ranks over the panels. The dashed line is chance, the solid one the
    ceiling, where they are known.

    Parameters
    ----------
    bars
        Draw bars from 0 instead of dots.
    most
        Methods with a row. The numbers beside the figure hold all.
    """
    methods = _ranked(metrics, most)
    across = min(3 if len(metrics) > 4 else 2, len(metrics))
    lines = -(-len(metrics) // across)
    height = lines * (0.6 + 0.19 * len(methods)) + 0.25
    with panels(len(metrics), across, WIDTH, height, sharey=True) as (figure, grid):
        for axes, panel in zip(grid, metrics, strict=True):
            _forest_panel(axes, panel, methods, look, bars=bars)
        arms = {str(row["method"]): _arm(row) for panel in metrics for row in panel.rows.to_dict("records")}
        named_rows(grid[0], [shorten(m, 20) for m in methods], [arms[m] for m in methods])
        handles = [
            Line2D([], [], color=INK, lw=1.0, ls=_DASHES),
            Line2D([], [], color=INK, lw=1.0),
        ]
        known = [any(np.isfinite(getattr(p, what)) for p in metrics) for what in ("chance", "ceiling")]
        words = [w for w, k in zip(("chance", "ceiling"), known, strict=True) if k]
        shown = [h for h, k in zip(handles, known, strict=True) if k]
        if shown:
            figure.legend(shown, words, loc="outside lower center", ncols=2)
        return draw(figure, name, title, _forest_data(metrics))


def _ranked(metrics: Sequence[Forest], most: int) -> list[str]:
    """Return the methods with a row, the best on average first. A score that is not defined ranks last."""
    methods = list(dict.fromkeys(str(m) for panel in metrics for m in panel.rows["method"]))[:most]
    places = []
    for panel in metrics:
        known = dict(zip(panel.rows["method"], panel.rows["value"], strict=True))
        values = pd.Series({m: known.get(m, np.nan) for m in methods}, dtype=np.float64)
        if panel.metric.direction != "none":
            places.append(ranks(values, panel.metric.direction).fillna(float(len(methods))))
    if not places:
        return methods
    mean = np.mean([place.to_numpy(np.float64) for place in places], axis=0)
    return [methods[i] for i in np.argsort(mean, kind="stable")]


def _arm(row: Mapping[Any, Any]) -> str:
    """Return whose row it is: the arm's, or the method's own."""
    return str(row.get("arm", row["method"]))


def _forest_panel(
    axes: Axes, panel: Forest, methods: Sequence[str], look: Mapping[str, Look], *, bars: bool
) -> None:
    ends = [0.0] if bars else []
    for row in panel.rows.to_dict("records"):
        if row["method"] not in methods or not np.isfinite(float(row["value"])):
            continue
        method, arm = str(row["method"]), _arm(row)
        place, style, owner = methods.index(method), look[method], of_method(arm)
        value, low, high = (float(row[c]) for c in ("value", "low", "high"))
        if np.isfinite(low) and np.isfinite(high):
            line = {"color": INK, "lw": 1.0} if bars else {"color": style.color, "lw": 2.2, "alpha": 0.55}
            axes.plot([low, high], [place, place], zorder=3, gid=owner, **line)
            ends += [low, high]
        if bars:
            axes.barh(place, value, height=0.72, color=style.color, lw=0)[0].set_gid(owner)
        else:
            axes.plot(value, place, style.marker, color=style.color, ms=5, mec=PAPER, mew=0.5, gid=owner)
        name = ", ".join(filter(None, (method if method != arm else "", panel.title)))
        name_points(axes, value, place, arm, name, [f"{panel.metric.label} {reading(value, low, high)}"])
        ends.append(value)
    for value, dashes in ((panel.chance, _DASHES), (panel.ceiling, "-")):
        if np.isfinite(value):
            axes.axvline(value, color=INK, lw=1.0, ls=dashes, zorder=1)
            ends.append(value)
    low, high, wide = spread(np.array(ends))
    if wide:
        logarithmic(axes, "x", subs=(1.0,), most=5)
    else:
        round_ticks(axes.xaxis, 3)
    axes.set_xlim(low, high)
    heading = textwrap.fill(panel.title or panel.metric.heading, _TITLE)
    axes.set_title(heading, loc="left", fontsize=8.5, fontweight="bold")
    bare_rows(axes)


def _forest_data(panels: Sequence[Forest]) -> pd.DataFrame:
    parts = [
        p.rows[["method", "value", "low", "high"]].assign(
            metric=p.metric.name, direction=p.metric.direction, chance=p.chance, ceiling=p.ceiling
        )
        if not p.title
        else p.rows.assign(panel=p.title, metric=p.metric.name, direction=p.metric.direction)
        for p in panels
    ]
    empty = pd.DataFrame(columns=pd.Index(["method", "value", "low", "high", "metric"]))
    return pd.concat(parts, ignore_index=True) if parts else empty


def realism(
    name: str, title: str, ratios: Sequence[tuple[Column, pd.DataFrame]], look: Mapping[str, Look]
) -> Plot:
    """Draw ratios of predicted over real cells: a panel per ratio, the median and middle half per method.

    The method whose ratios are nearest to 1 is on top.

    Parameters
    ----------
    ratios
        For each ratio a table with the columns method, median, low, high (quartiles over conditions).
    """
    every = pd.concat([rows for _, rows in ratios], ignore_index=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        away = np.abs(np.log(every["median"].to_numpy(np.float64)))
    away, of = np.minimum(np.nan_to_num(away, nan=9.0), 9.0), every["method"].astype(str).to_numpy()
    methods = list(dict.fromkeys(of))[:MOST_METHODS]
    methods.sort(key=lambda method: float(away[of == method].mean()))
    across = 3 if len(ratios) > 2 else 2
    height = -(-len(ratios) // across) * (0.6 + 0.19 * len(methods))
    with panels(len(ratios), across, WIDTH, height, sharey=True) as (figure, grid):
        for axes, (metric, rows) in zip(grid, ratios, strict=True):
            _ratio_panel(axes, metric, rows, methods, look)
        named_rows(grid[0], [shorten(m, 20) for m in methods], methods)
        data = pd.concat([rows.assign(metric=m.name) for m, rows in ratios], ignore_index=True)
        return draw(figure, name, title, data)


def _ratio_panel(
    axes: Axes, metric: Column, rows: pd.DataFrame, methods: Sequence[str], look: Mapping[str, Look]
) -> None:
    axes.axvspan(1 / 1.1, 1.1, color=RULE, alpha=0.5, lw=0, zorder=0)
    axes.axvline(1.0, color=INK, lw=1.0, zorder=1)
    ends = rows[["low", "median", "high"]].to_numpy(np.float64)
    ends = np.append(ends[np.isfinite(ends) & (ends > 0)], (0.75, 1.33))
    low, high = max(float(ends.min()) / 1.08, 0.02), min(float(ends.max()) * 1.08, 50.0)
    for row in rows.to_dict("records"):
        if row["method"] not in methods or not np.isfinite(float(row["median"])):
            continue
        method = str(row["method"])
        place, style, owner = methods.index(method), look[method], of_method(method)
        quartiles = np.clip(np.array([row["low"], row["high"]], np.float64), low, high)
        axes.plot(quartiles, [place, place], color=style.color, lw=2.2, alpha=0.55, gid=owner)
        inside = low <= float(row["median"]) <= high
        marker = style.marker if inside else "<" if float(row["median"]) < low else ">"
        x = float(np.clip(float(row["median"]), 1.03 * low, high / 1.03))
        axes.plot(x, place, marker, color=style.color, ms=5, mec=PAPER, mew=0.5, gid=owner)
        said = reading(*(float(row[c]) for c in ("median", "low", "high")))
        name_points(axes, x, place, method, metric.label, [f"{said}, middle half of conditions"])
    axes.set_xscale("log")
    ticks = [t for t in (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0, 10.0, 50.0) if low <= t <= high]
    if high / low > 2:  # else their labels touch
        ticks = [t for t in ticks if t not in (0.8, 1.25)]
    if len(ticks) > 4:
        ticks = [t for t in ticks if t not in (0.05, 0.2, 2.0, 10.0)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.set_xlim(low, high)
    axes.set_title(textwrap.fill(metric.label, _TITLE), loc="left", fontsize=8.5, fontweight="bold")
    bare_rows(axes)


def win_matrix(name: str, title: str, rates: pd.DataFrame, data: pd.DataFrame) -> Plot:
    """Draw how often the method of a row is better than the method of a column, in per cent.

    Parameters
    ----------
    rates
        Methods × methods, shares in [0, 1], NaN where nothing was compared.
    data
        The numbers behind it.
    """
    methods = [str(m) for m in rates.index][:MOST_METHODS]
    shown = rates.iloc[: len(methods), : len(methods)].to_numpy(np.float64)
    colors = LinearSegmentedColormap.from_list("win", [PALETTE[1], "#f4f4f2", PALETTE[0]])
    side = 0.36 * len(methods)
    with canvas(max(WIDTH, side + 1.9), side + 1.9) as (figure, axes):
        for i, j in np.ndindex(*shown.shape):
            if i == j or not np.isfinite(shown[i, j]):
                continue
            tint = colors(float(shown[i, j]))
            axes.add_patch(_square(j, i, tint))
            said = f"better than {methods[j]} in {100 * shown[i, j]:.0f} % of conditions"
            name_points(axes, j, i, methods[i], "", [said])
            strong = abs(shown[i, j] - 0.5) > 0.3
            axes.text(
                j, i, f"{100 * shown[i, j]:.0f}", ha="center", va="center", fontsize=7.5,
                color="#ffffff" if strong else "#22262c",
            )  # fmt: skip
        axes.set(xlim=(-0.5, len(methods) - 0.5), ylim=(len(methods) - 0.5, -0.5), aspect="equal")
        axes.set_yticks(range(len(methods)), [shorten(m, 22) for m in methods])
        axes.set_xticks(range(len(methods)), [shorten(m, 22) for m in methods], rotation=60, ha="right")
        axes.tick_params(length=0)
        axes.set_ylabel("this method …")
        axes.set_xlabel("… is better than this one, % of conditions")
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return draw(figure, name, title, data)


def _square(x: float, y: float, color: tuple[float, ...]) -> Rectangle:
    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fc=color, ec="none")
