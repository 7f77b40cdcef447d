"""Sections with curves: zero-shot and training steps, shares of the cells, levels, training work and model size."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from perturbdiff.reporting.experiments.experiment import CONVENTION, Estimate, Estimates, Experiment, Work
from perturbdiff.reporting.experiments.run_groups import Line
from perturbdiff.reporting.figures.axes import (
    axis_label,
    logarithmic,
    plain,
    reading,
    round_ticks,
    spread,
)
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
    looks,
    of_method,
    slug,
)
from perturbdiff.reporting.loading.metric_columns import ENERGY, Column, named
from perturbdiff.reporting.sections.chapter_data import Section
from perturbdiff.reporting.sections.key_metrics import caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_CURVES = 14
"""Curves with a line of their own. The numbers beside the figure hold all."""
_TITLE = 26  # letters in a line of a panel's title
_FAR = -2.0  # scores of at most 1 below this squeeze all others on a plain axis
_TICKS = (-1000.0, -300.0, -100.0, -30.0, -10.0, -3.0, -1.0, 0.0, 0.5, 1.0)
_FURTHER = (
    "R2",
    "MSE",
    "MAE",
    "PDS_cos",
    "PDS_L1",
    "DEPrec",
    "DirAgr",
    "LFCSpear",
    "AUROC",
    "ES",
    "nonzero_ratio",
    "gene_sd_ratio",
    "cell_sd_ratio",
    "correlation_agreement",
)
_ZEROSHOT = (
    "A pretrained model predicts without having seen any perturbation. Look at how far the curve leaves "
    "the dashed line of the network before any training, and whether it still rises at the end: R² near 1 "
    "alone says little, since most genes do not change. Curves are means over data sets and seeds, bands "
    "the range over seeds."
)
_STEPS = (
    "Look at which arm arrives first, which stays, and which falls again with more training "
    "(overfitting). Curves are means over data sets and seeds, bands the range over seeds."
)
_LEVELS = (
    "The level is the number given with an arm (guidance weight, reverse steps). Look for a plateau "
    "rather than for the single best level: neighbours that differ by less than the band are not told "
    "apart by these seeds."
)
_SHARES = (
    "Look at the gap between the arms on the left, where few cells are left to learn from, and whether it "
    "closes to the right. Curves are means over data sets and seeds, bands the range over seeds."
)
_SCALING = (
    "Whether more training or a larger network helps. The paper’s answer is that neither does without "
    "bound: its medium model was best, and its large one got worse again with more compute."
)
_WORK = "Look for curves that level off or turn: where two sizes cross, the smaller one uses the same work better."
_SIZE = "A curve for each number of steps. Look for a size beyond which nothing is gained."
_NO_WORK = (
    "Nothing to draw, because sizes are counted from bundles. Give the bundles of the runs (--bundle) and the "
    "folders of their predictions (--records)."
)

RANDOM, BEST, CEILING = "random initialisation", "best baseline", "ceiling"
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


_OPEN = (ENERGY, "PDCorr", "DEOver", "AUPRC")


def zeroshot(experiment: Experiment) -> Section:
    """Return R² and further metrics over the steps of pretraining, beside the untrained network (level 0)."""
    section = Section("Zero-shot over pretraining steps", "x-zeroshot", intro=_ZEROSHOT, small=True)
    return _filled(section, experiment, "zeroshot", "pretraining steps", ("R2", *_OPEN), _step_panels)


def steps(experiment: Experiment) -> Section:
    """Return metrics over training steps."""
    section = Section("Over training steps", "x-steps", intro=_STEPS, small=True)
    return _filled(section, experiment, "steps", "training steps", _OPEN, _level_panels)


def levels(experiment: Experiment, name: str) -> Section:
    """Return metrics over levels, for the arms that have several."""
    section = Section("Over levels", f"x-{name}-levels", intro=_LEVELS, small=True)
    return _filled(section, experiment, f"{name}-levels", "level", _OPEN, _level_panels)


def shares(experiment: Experiment) -> Section:
    """Return metrics over the share of training cells."""
    section = Section("Over shares of the training cells", "x-fewshot-shares", intro=_SHARES, small=True)
    return _filled(
        section, experiment, "fewshot-shares", "share of the training cells, %", _OPEN, _level_panels
    )


def scaling(experiment: Experiment) -> Section:
    """Return metrics against the work of training and against the size of the network."""
    section = Section("Scaling", "x-scaling", intro=_SCALING)
    known = [(line, work) for _, line in experiment.lines if (work := _work(experiment, line)) is not None]
    if not known:
        section.note = _NO_WORK
        return section
    work = Section("Training compute", "x-scaling-compute", intro=_WORK, note=CONVENTION, small=True)
    factor, unit = _unit(max(w.flops for _, w in known))
    section.parts.append(
        _filled(work, experiment, "scaling-compute", f"training compute, {unit}", _OPEN, _work_panels(factor))
    )
    size = Section("Model size", "x-scaling-size", intro=_SIZE, small=True)
    section.parts.append(
        _filled(size, experiment, "scaling-size", "learned parameters, million", _OPEN, _size_panels)
    )
    lost = sum(line.kind == "model" and _work(experiment, line) is None for _, line in experiment.lines)
    if lost:
        section.note = f"{lost} lines are not drawn, as their bundles were not given (--bundle, --records)."
    return section


def _work(experiment: Experiment, line: Line) -> Work | None:
    works = (experiment.works.get(e.run) for e in line.entries if e.run is not None)
    return next((work for work in works if work is not None), None)


def _unit(flops: float) -> tuple[float, str]:
    """Return a divisor and the unit for a number of operations."""
    scale = [(1e9, "GFLOP"), (1e12, "TFLOP"), (1e15, "PFLOP"), (1e18, "EFLOP"), (1e21, "ZFLOP")]
    return next((s for s in reversed(scale) if flops >= s[0]), scale[0])


Panels = Callable[[Experiment, Column], tuple[list[Panel], dict[str, Look]]]


def _filled(
    section: Section, experiment: Experiment, name: str, across: str, first: Sequence[str], panels: Panels
) -> Section:
    """Draw the metrics of ``first`` into a section and the others into a folded part of it."""
    rest = Section("Further metrics", f"{section.anchor}-further", folded=True, small=True)
    for names, home in ((first, section), ([n for n in _FURTHER if n not in first], rest)):
        for metric in (m for n in names if (m := named(experiment.metrics, n)) is not None):
            if (plot := _plot(experiment, metric, name, across, panels)) is not None:
                home.figures.append((plot, caption(metric)))
    if rest.figures:
        section.parts.append(rest)
    if not section.figures:
        section.note = section.note or "Nothing to draw: no arm has runs at two levels."
    return section


def _plot(experiment: Experiment, metric: Column, name: str, across: str, panels: Panels) -> Plot | None:
    drawn, look = panels(experiment, metric)
    if not drawn:
        return None
    title = f"{metric.label} over {across.split(',')[0]}"
    return curves(f"x-{name}-{slug(metric.name)}", title, metric, drawn, look, across)


def _level_panels(experiment: Experiment, metric: Column) -> tuple[list[Panel], dict[str, Look]]:
    """Return a panel per group: arms over their levels, lines without a level from side to side."""
    return [
        p for x in experiment.groups if (p := _panel(experiment, x, metric, x.group.lines, {})) is not None
    ], dict(experiment.look)


def _step_panels(experiment: Experiment, metric: Column) -> tuple[list[Panel], dict[str, Look]]:
    """Return the same where level 0 is a network without any training: it goes from side to side."""
    panels = []
    for estimates in experiment.groups:
        lines = estimates.group.lines
        means = [estimates.of(x, metric.name).mean for x in lines if x.leveled and x.level == 0]
        means = [m for m in means if not math.isnan(m)]
        marks = {RANDOM: means[0]} if means else {}
        trained = [x for x in lines if not x.leveled or x.level > 0]
        panels.append(_panel(experiment, estimates, metric, trained, marks))
    return [panel for panel in panels if panel is not None], dict(experiment.look)


def _panel(
    experiment: Experiment,
    estimates: Estimates,
    metric: Column,
    lines: Sequence[Line],
    marks: dict[str, float],
) -> Panel | None:
    rows = [_row(x.arm, x.level, x, estimates.of(x, metric.name)) for x in lines if x.leveled and x.entries]
    table = _table(rows)
    if table["x"].nunique() < 2:
        return None
    return Panel(experiment.name(estimates), table, {**marks, **_marks(estimates, metric)})


def _marks(estimates: Estimates, metric: Column) -> dict[str, float]:
    """Return the best of the baselines without a level, and the ceiling."""
    marks = {}
    lines = [line for line in estimates.group.lines if not line.leveled and line.entries]
    means = [
        m for x in lines if x.kind == "baseline" and not math.isnan(m := estimates.of(x, metric.name).mean)
    ]
    if means and metric.direction != "none":
        away = {"higher": lambda v: -v, "lower": lambda v: v, "one": lambda v: abs(v - 1)}
        marks[BEST] = min(means, key=away[metric.direction])
    tops = [
        m for x in lines if x.kind == "ceiling" and not math.isnan(m := estimates.of(x, metric.name).mean)
    ]
    if tops:
        marks[CEILING] = tops[0]
    return marks


def _row(curve: str, x: float, line: Line, e: Estimate) -> dict[str, object]:
    ends = {"low": e.low, "high": e.high, "sd": e.sd, "seeds": e.seeds, "datasets": e.datasets}
    point = {"curve": curve, "x": x, "mean": e.mean, "lowest": e.lowest, "highest": e.highest}
    return {**point, "arm": line.arm, "level": line.level, **ends}


def _table(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=pd.Index(rows[0] if rows else ("curve", "x", "mean")))
    return table.loc[np.isfinite(table["mean"].to_numpy(np.float64))]


def _worked(experiment: Experiment, estimates: Estimates) -> Iterator[tuple[Line, Work]]:
    for line in estimates.group.lines:
        if line.kind == "model" and (work := _work(experiment, line)) is not None:
            yield line, work


def _work_panels(factor: float) -> Panels:
    def panels(experiment: Experiment, metric: Column) -> tuple[list[Panel], dict[str, Look]]:
        drawn = []
        for estimates in experiment.groups:
            rows = [
                {
                    **_row(line.arm, work.flops / factor, line, estimates.of(line, metric.name)),
                    "flops": work.flops,
                }
                for line, work in _worked(experiment, estimates)
            ]
            if len(table := _table(rows)) > 1:
                drawn.append(Panel(experiment.name(estimates), table, _marks(estimates, metric)))
        return drawn, dict(experiment.look)

    return panels


def _size_panels(experiment: Experiment, metric: Column) -> tuple[list[Panel], dict[str, Look]]:
    drawn, words = [], {}
    for estimates in experiment.groups:
        rows = []
        for line, work in _worked(experiment, estimates):
            curve = f"{work.steps:,} steps"
            words[curve] = work.steps
            row = _row(curve, work.parameters / 1e6, line, estimates.of(line, metric.name))
            rows.append({**row, "parameters": work.parameters, "steps": work.steps})
        if len(table := _table(rows)) and table["x"].nunique() > 1:
            drawn.append(Panel(experiment.name(estimates), table, _marks(estimates, metric)))
    return drawn, looks(sorted(words, key=lambda word: words[word]))
