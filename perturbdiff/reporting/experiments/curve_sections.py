"""Sections with curves: zero-shot and training steps, shares of the cells, levels, training work and model size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd

from perturbdiff.reporting.experiments.curve_plots import BEST, CEILING, RANDOM, Panel, curves
from perturbdiff.reporting.experiments.experiment import Estimate, Estimates, Experiment
from perturbdiff.reporting.experiments.run_groups import CONVENTION, Line, Work
from perturbdiff.reporting.figures.svg import (
    Look,
    Plot,
    looks,
    slug,
)
from perturbdiff.reporting.loading.metric_columns import ENERGY, Column, caption, named
from perturbdiff.reporting.sections.chapter_data import Section

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
