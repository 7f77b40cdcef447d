"""Figures of conditions and sets. Each takes tables and returns a `Plot` in narrow panels, which a phone can show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from perturbdiff.reporting.figures.axes import (
    axis_label,
    logarithmic,
    named_rows,
    plain,
    points,
    reading,
    round_ticks,
    sampled,
    spread,
)
from perturbdiff.reporting.figures.hover import name_points
from perturbdiff.reporting.figures.svg import (
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
    legend_text,
    of_method,
    panels,
    shorten,
)
from perturbdiff.reporting.loading.metric_columns import Column
from perturbdiff.reporting.loading.results import POOLED

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
    names = condition_names(pairs.index)
    with canvas(NARROW, 3.4) as (figure, axes):
        if wide:
            logarithmic(axes, "x", "y")
        axes.axline((low, low), (high, high), color=INK, lw=0.8, ls=(0, (4, 3)))
        size = 16 if len(pairs) < 300 else 8
        tied = a == b
        styles = (look[other], look[ours], Look(GREY, "o"))
        for rows, style in zip((~better & ~tied, better, tied), styles, strict=True):
            kept = np.flatnonzero(rows)
            kept = kept[
                points(axes, b[rows], a[rows], style.color, size=size, alpha=0.65, marker=style.marker)
            ]
            said = [f"{ours} {plain(float(a[i]), 3)}\n{other} {plain(float(b[i]), 3)}" for i in kept]
            name_points(axes, b[kept], a[kept], "", [names[i] for i in kept], said)
        axes.set(xlim=(low, high), ylim=(low, high), box_aspect=1)
        axes.set_xlabel(f"{shorten(other, 34)}")
        axes.set_ylabel(f"{shorten(ours, 34)}")
        if not wide:
            round_ticks(axes.xaxis, 4)
            round_ticks(axes.yaxis, 4)
        wins, ties = int(better.sum()), int(tied.sum())
        counts = f"wins {wins} · ties {ties} · losses {len(a) - wins - ties}"
        axes.set_title(f"{metric.heading}\n{counts}", loc="left", fontweight="bold", fontsize=9)
        data = pairs.rename(columns={"a": ours, "b": other}).reset_index()
        return draw(figure, name, f"{metric.label}: {ours} against {other}", data)


def condition_names(index: Iterable[object]) -> list[str]:
    """Return names for reading of conditions, given as pairs of scope and perturbation or as one label each."""
    return [condition_name("|".join(map(str, key)) if isinstance(key, tuple) else str(key)) for key in index]


def condition_name(label: str) -> str:
    """Return 'perturbation · cell type · batch' for 'cell type|batch|perturbation' (of a pool: the perturbation)."""
    *scope, perturbation = label.split("|")
    return " · ".join([perturbation, *(part for part in scope if part and part != POOLED[0])])


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
            most = min(1000, 6000 // len(order))
            kept = points(axes, x, y, style.color, size=7, alpha=0.35, most=most, method=method)
            names = condition_names([filled[method].index[i] for i in kept])
            name_points(
                axes, x[kept], y[kept], method, names, [f"{metric.label} {reading(v)}" for v in x[kept]]
            )
            if len(x) > 1:
                _box(axes, x, row, style.color, of_method(method))
        named_rows(axes, [shorten(m, 24) for m in order], order)
        axes.set(xlim=(low, high), xlabel=axis_label(metric))
        if not wide:
            round_ticks(axes.xaxis, 4)
        data = pd.concat(
            [s.rename("value").reset_index().assign(method=m) for m, s in filled.items()], ignore_index=True
        )
        return draw(figure, name, title, data)


def _median_key(series: pd.Series, *, higher: bool) -> tuple[bool, float]:
    return (series.empty, 0.0 if series.empty else float(series.median()) * (-1 if higher else 1))


def _box(axes: Axes, x: np.ndarray, row: int, color: str, owner: str) -> None:
    q1, middle, q3 = np.percentile(x, (25, 50, 75))
    axes.plot([q1, q3], [row, row], color=PAPER, lw=6, solid_capstyle="butt", gid=owner)
    axes.plot([q1, q3], [row, row], color=color, lw=4, solid_capstyle="butt", gid=owner)
    axes.plot([middle, middle], [row - 0.32, row + 0.32], color=INK, lw=2.0, gid=owner)


def curves(name: str, title: str, table: pd.DataFrame, term: str, label: str = "") -> Plot:
    """Draw one column of training.csv over the steps, training in blue and validation in orange.

    ``label`` is what the column is called for reading.
    """
    label = label or term
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
            axes.plot([], [], color=color, label=legend_text(_SPLITS.get(str(split), str(split))))
            kept = sampled(len(rows), _NAMED)
            said = [f"{label} {reading(v)}" for v in value[kept]]
            steps = [f"{_SPLITS.get(str(split), str(split))}, step {s:,.0f}" for s in step[kept]]
            name_points(axes, step[kept], value[kept], "", steps, said)
        if spread(data[term].to_numpy(np.float64))[2]:
            logarithmic(axes, "y")
        else:
            round_ticks(axes.yaxis, 4)
        axes.set(xlabel="training steps")
        round_ticks(axes.xaxis, 4, whole=True)
        axes.set_title(label, loc="left", fontweight="bold")
        figure.legend(loc="outside upper right", ncols=3, handlelength=1.2)
        return draw(figure, name, title, data)


_SPLITS = {"train": "training", "valid": "validation"}
_NAMED = 500  # points of a curve that can be pointed at


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
    label = condition_name(condition)
    sources = cells["source"].astype(str).to_numpy()
    places = cells[["x", "y"]].to_numpy(np.float64)
    with canvas(WIDTH, 3.9) as (figure, axes):
        looks = (("control", GREY, 0.35), ("real", INK, 0.4), ("predicted", color, 0.5))
        for source, tint, alpha in looks:
            x, y = places[sources == source].T
            kept = points(axes, x, y, tint, size=6, alpha=alpha, most=1500)
            name_points(axes, x[kept], y[kept], "", f"{source} cell", [condition_name(condition)] * len(kept))
        for source, tint, _ in looks:
            if (sources == source).any():
                x, y = places[sources == source].mean(axis=0)
                axes.plot(x, y, "P", color=tint, ms=9, mec=PAPER, mew=1.0)
                name_points(axes, x, y, "", f"mean of {source} cells", [condition_name(condition)])
        axes.set(xlim=limits[:2], ylim=limits[2:], box_aspect=0.8)
        for set_label, axis, order in ((axes.set_xlabel, "x", "first"), (axes.set_ylabel, "y", "second")):
            share = float(cells[f"explained_{axis}"].iloc[0]) if f"explained_{axis}" in cells else 0.0
            set_label(f"{order} axis of variation" + (f" ({100 * share:.1f} %)" if share else ""))
        round_ticks(axes.xaxis, 4)
        round_ticks(axes.yaxis, 4)
        axes.set_title(shorten(label, 48), loc="left")
        handles = [Line2D([], [], marker="o", ls="", color=tint, ms=4) for _, tint, _ in looks]
        words = [f"{source} cells" for source, _, _ in looks]
        figure.legend(handles, words, loc="outside lower center", ncols=3)
        return draw(figure, name, f"Cells of {label}: control, real and predicted", cells)


def alike(name: str, method: str, pairs: pd.DataFrame, look: Mapping[str, Look]) -> Plot:
    """Draw, for pairs of perturbations, how alike predicted changes are against how alike the real ones are."""
    shown = pairs.dropna(subset=["real", "predicted"])
    style = look[method]
    with canvas(NARROW, 3.3) as (figure, axes):
        axes.axline((0, 0), (1, 1), color=INK, lw=0.8, ls=(0, (4, 3)))
        x, y = (shown[side].to_numpy(np.float64) for side in ("real", "predicted"))
        size = 12 if len(shown) < 300 else 6
        kept = points(axes, x, y, style.color, size=size, marker=style.marker, method=method)
        names = [f"{shown['first'].iloc[i]} and {shown['second'].iloc[i]}" for i in kept]
        said = [f"real {plain(float(x[i]), 2)}, predicted {plain(float(y[i]), 2)}" for i in kept]
        name_points(axes, x[kept], y[kept], method, names, said)
        every = np.concatenate([x, y, [-0.05, 0.3]])
        ends = float(every.min()) - 0.04, min(1.03, float(every.max()) + 0.05)
        axes.set(xlim=ends, ylim=ends, box_aspect=1)
        round_ticks(axes.xaxis, 4)
        round_ticks(axes.yaxis, 4)
        axes.set_xlabel("correlation, real changes")
        axes.set_ylabel("correlation, predicted changes")
        axes.set_title(shorten(method, 36), loc="left", fontweight="bold")
        return draw(figure, name, f"How alike two perturbations are: {method}", shown)


MOST_PANELS = 6
_ACROSS = 3
_PANEL = 1.75  # inches


def places(name: str, title: str, table: pd.DataFrame, method: str, look: Look) -> Plot:
    """Draw the sets of up to six conditions, a panel each with axes of its own and one scale in both directions.

    Parameters
    ----------
    table
        condition, source (real, predicted), x, y (`perturbdiff.evaluation.embedding.place_sets`).
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
