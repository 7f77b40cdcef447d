"""Sections without curves: bars, dots with intervals, radars, and where the page already shows what is asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from perturbdiff.reporting.experiments import curve_sections
from perturbdiff.reporting.experiments.arm_tables import chosen
from perturbdiff.reporting.experiments.experiment import Estimates, Experiment
from perturbdiff.reporting.experiments.run_groups import Line
from perturbdiff.reporting.figures.score_plots import Forest, forest, radar
from perturbdiff.reporting.figures.svg import Plot, slug
from perturbdiff.reporting.loading.metric_columns import ENERGY, Column, caption, radar_columns
from perturbdiff.reporting.sections.chapter_data import Section

_BARS = (ENERGY, "PDCorr", "DEOver", "DEPrec", "AUPRC", "AUROC", "DirAgr", "LFCSpear", "PDS_cos")
_DOTS = (ENERGY, "PDCorr", "DEOver_10", "DEOver", "AUPRC")
_DOTS_FURTHER = (
    "R2",
    "PDS_cos",
    "nonzero_ratio",
    "gene_sd_ratio",
    "library_sd_ratio",
    "cell_sd_ratio",
    "correlation_agreement",
)
_MOST_ARMS = 40
_LEAST = 3  # metrics of a radar


def ablation(experiment: Experiment) -> Section:
    """Return bars of the arms per metric, a figure per group."""
    section = Section("Ablation", "x-ablation", intro=_ABLATION)
    for i, estimates in enumerate(experiment.groups):
        if (plot := _means(experiment, estimates, f"x-ablation-{i + 1}", bars=True)) is not None:
            section.figures.append((plot, f"{experiment.name(estimates)}."))
    return section


def _means(experiment: Experiment, estimates: Estimates, name: str, *, bars: bool) -> Plot | None:
    """Draw the means of all lines of a group with their intervals, a panel per metric."""
    lines = _shown(estimates)
    panels = [
        Forest(m, _rows(estimates, lines, m), ceiling=_ceiling(estimates, m))
        for m in chosen(estimates.group.metrics, _BARS)
    ]
    if not panels or not lines:
        return None
    look = {line.label: experiment.look[line.arm] for line in lines}
    return forest(name, f"Arms on {experiment.name(estimates)}", panels, look, bars=bars, most=_MOST_ARMS)


_ABLATION = (
    "Bars are means over data sets and seeds, lines their 95 % intervals over data sets and conditions. "
    "Look at whether what was left out matters in the same direction in every panel. The table of "
    "differences tells whether an interval leaves 0 out."
)


def dots(experiment: Experiment, name: str, title: str, intro: str) -> Section:
    """Return dots with intervals of all arms: a figure per metric, groups side by side, and curves over levels."""
    section = Section(title, f"x-{name}", intro=intro)
    rest = Section("Further metrics", f"x-{name}-further", folded=True)
    for names, home in ((_DOTS, section), (_DOTS_FURTHER, rest)):
        for metric in chosen(experiment.metrics, names):
            if (plot := _dots(experiment, name, metric)) is not None:
                home.figures.append((plot, caption(metric)))
    section.parts = [rest] if rest.figures else []
    over = curve_sections.levels(experiment, name)
    if over.filled:
        section.parts.insert(0, over)
    return section


def variants(experiment: Experiment) -> Section:
    """Return all variants, see `dots`."""
    return dots(experiment, "variants", "Variants", _VARIANTS)


def guidance(experiment: Experiment) -> Section:
    """Return all ways of sampling, see `dots`."""
    return dots(experiment, "guidance", "Guidance and sampling", _GUIDANCE)


_VARIANTS = (
    "A dot is the mean over data sets and seeds, the line its 95 % interval over data sets and "
    "conditions, the upright line is the ceiling. Look for an arm that is on the better side on every "
    "data set. One that wins on one alone is likely to be luck."
)
_GUIDANCE = (
    "Arms share their trainings and differ by sampling alone. A dot is the mean over data sets and seeds, "
    "the line its 95 % interval over data sets and conditions. Look at mean changes and at the spread of "
    "cells together: stronger guidance can sharpen the one and take from the other."
)


def _dots(experiment: Experiment, name: str, metric: Column) -> Plot | None:
    panels, look = [], {}
    for estimates in experiment.groups:
        lines = _shown(estimates)
        rows = _rows(estimates, lines, metric)
        if np.isfinite(rows["value"].to_numpy(np.float64)).any():
            look |= {line.label: experiment.look[line.arm] for line in lines}
            panels.append(
                Forest(metric, rows, ceiling=_ceiling(estimates, metric), title=experiment.name(estimates))
            )
    if not panels:
        return None
    title = f"{metric.heading} of all arms"
    return forest(f"x-{name}-{slug(metric.name)}", title, panels, look, most=_MOST_ARMS)


def _shown(estimates: Estimates) -> list[Line]:
    return [line for line in estimates.group.lines if line.entries and line.kind != "ceiling"]


def _rows(estimates: Estimates, lines: Sequence[Line], metric: Column) -> pd.DataFrame:
    scores = [(line, estimates.of(line, metric.name)) for line in lines]
    rows = [(line.label, e.mean, e.low, e.high, line.arm) for line, e in scores]
    return pd.DataFrame(rows, columns=pd.Index(["method", "value", "low", "high", "arm"]))


def _ceiling(estimates: Estimates, metric: Column) -> float:
    lines = [line for line in estimates.group.lines if line.kind == "ceiling"]
    return estimates.of(lines[0], metric.name).mean if lines else float("nan")


def fewshot(experiment: Experiment) -> Section:
    """Return a radar for each share of the cells, and curves over shares."""
    section = Section("Few cells to learn from", "x-fewshot", intro=_FEWSHOT)
    for i, estimates in enumerate(experiment.groups):
        levels = dict.fromkeys(line.level for line in estimates.group.lines if line.leveled and line.entries)
        for level in sorted(levels):
            lines = [
                line
                for line in estimates.group.lines
                if line.leveled and line.level == level and line.entries
            ]
            title = f"{experiment.name(estimates)}, {level:g} % of the cells"
            plot = _radar(experiment, estimates, lines, f"x-fewshot-{i + 1}-{slug(f'{level:g}')}", title)
            if plot is not None:
                section.figures.append((plot, f"{title}."))
    if (over := curve_sections.shares(experiment)).filled:
        section.parts.append(over)
    return section


_FEWSHOT = (
    "The 12 metrics of which more is better, as they are, from 0 (centre) to 1 (rim). Values below 0 sit "
    "at the centre. Look at whether the finetuned model lies outside the one trained from scratch on "
    "every axis, and whether the gap narrows as the share grows. The thin line is the ceiling."
)


def main(experiment: Experiment) -> Section:
    """Return radars of the arms' means where there is more than one run to average. The rest stands below."""
    section = Section("Main comparison", "x-main", intro=_MAIN)
    for i, estimates in enumerate(experiment.groups):
        lines = [line for line in _shown(estimates) if not line.leveled]
        several = any(len(line.entries) > 1 for line in lines if line.kind == "model")
        if not several:
            continue  # the data set's own chapter draws the same
        title = f"Means on {experiment.name(estimates)}"
        if (plot := _radar(experiment, estimates, lines, f"x-main-{i + 1}", title)) is not None:
            section.figures.append((plot, f"{title}: over data sets and seeds."))
        if (plot := _means(experiment, estimates, f"x-main-means-{i + 1}", bars=False)) is not None:
            section.figures.append((plot, f"{title}, with 95 % intervals over data sets and conditions."))
    for name, there in experiment.chapters.items():
        section.links += [(f"{name}: {words}", anchor) for words, anchor in there]
    return section


_MAIN = (
    "The 12 metrics of which more is better, from 0 (centre) to 1 (rim). Radars of single runs, scatters "
    "of ours against the best other method condition by condition, and the separation of true DE genes "
    "stand in the chapters of the data sets."
)


def _radar(
    experiment: Experiment, estimates: Estimates, lines: Sequence[Line], name: str, title: str
) -> Plot | None:
    columns = radar_columns(estimates.group.metrics)
    names = pd.Index([c.name for c in columns])
    rows = {
        line.arm: [estimates.of(line, c.name).mean for c in columns]
        for line in lines
        if line.kind != "ceiling"
    }
    scores = pd.DataFrame.from_dict(rows, orient="index", columns=names, dtype=np.float64)
    if len(scores.dropna(axis=1, how="all").columns) < _LEAST:
        return None
    tops = {"ceiling": [_ceiling(estimates, c) for c in columns]}
    known = np.isfinite(tops["ceiling"]).any()
    thin = pd.DataFrame.from_dict(tops, orient="index", columns=names) if known else None
    return radar(name, title, scores, columns, experiment.look, lines=thin)
