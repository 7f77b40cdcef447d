"""Sections on methods against each other, condition by condition: scatters with win rates, and all pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from perturbdiff.report.figures import condition_plots, page_tables, score_plots
from perturbdiff.report.figures.page_tables import number
from perturbdiff.report.figures.svg import Plot, slug
from perturbdiff.report.loading.comparison import compare, paired, win_rates
from perturbdiff.report.loading.metric_columns import ENERGY, PDCORR, Column, table_columns
from perturbdiff.report.sections.chapter_data import ChapterData
from perturbdiff.report.sections.layout import Section

_OPEN = (PDCORR, "PDS_cos", "DEOver", "DirAgr", "AUPRC", ENERGY)


def duels(subject: ChapterData) -> Section:
    """Return the section that compares the first method with its opponent, and every method with every other."""
    other = subject.other
    if other is None:
        return Section(
            "Against another method",
            f"{subject.anchor}-duels",
            intro="A comparison needs a second method: add the metrics of a baseline to this report.",
        )
    title = f"{subject.focus.method} against {other.method}"
    found = Section(title, f"{subject.anchor}-duels", intro=_INTRO, small=True)
    rest = Section("The other metrics", f"{subject.anchor}-duels-rest", folded=True, small=True)
    for metric in subject.main:
        if (drawn := _duel(subject, metric)) is not None:
            (found if metric.name in _OPEN else rest).figures.append(drawn)
    if not found.figures:
        found.figures, rest.figures = rest.figures, []
    found.parts = [s for s in (rest, _all_pairs(subject)) if s.filled]
    found.note = _NOTE if found.figures else ""
    return found


_INTRO = (
    "A point is a condition, in the colour of the method that is better there; grey points on the dashed line are "
    "ties. Look for points on one side throughout, rather than for a good mean that a few conditions carry."
)
_NOTE = (
    "Win rates count a tie as half a win; their 95 % intervals, and those of the mean advantage, are bootstrap "
    "intervals over conditions (2,000 draws, fixed seed). Conditions share controls and cell types, so that the true "
    "uncertainty is somewhat larger."
)


def _duel(subject: ChapterData, metric: Column) -> tuple[Plot, str] | None:
    if subject.other is None or metric.direction not in ("higher", "lower"):
        return None
    focus, other = subject.focus, subject.other
    pairs = paired(subject.values(focus, metric.name), subject.values(other, metric.name))
    if pairs.empty:
        return None
    result = compare(pairs, higher=metric.higher)
    low, high = (f"{100 * r:.0f}" for r in result.rate_interval)
    digits = page_tables.decimals_for([result.gain])
    gain, *ends = (number(v, digits) for v in (result.gain, *result.gain_interval))
    ties = f", {result.ties} tied" if result.ties else ""
    sentence = (
        f"{'Above' if metric.higher else 'Below'} the line {focus.method} is better: in {result.wins} of {result.n} "
        f"conditions{ties}, a win rate of {100 * result.rate:.0f} % ({low} to {high} %); mean advantage {gain} "
        f"({ends[0]} to {ends[1]})."
    )
    name = f"{subject.anchor}-{_SHORT.get(metric.name, slug(metric.name))}-duel"
    plot = condition_plots.scatter(name, pairs, metric, (focus.method, other.method), subject.look)
    return plot, sentence


_SHORT = {ENERGY: "energy"}


def _all_pairs(subject: ChapterData) -> Section:
    """Return the folded section of win rates of all methods against each other."""
    found = Section("Every method against every other", f"{subject.anchor}-pairs", folded=True)
    if len(subject.ranked) < 3:
        return found
    parts = []
    columns = table_columns(subject.every) or [m for m in subject.main if m.direction in ("higher", "lower")]
    for metric in columns:
        values = {r.method: subject.values(r, metric.name) for r in subject.ranked}
        parts.append(win_rates(values, higher=metric.higher).assign(metric=metric.name))
    parts = [part for part in parts if len(part)]
    if not parts:
        return found
    table = pd.concat(parts, ignore_index=True)
    methods = [r.method for r in subject.ranked]
    mean = _mean_rates(table, methods)
    order = [methods[i] for i in np.argsort(-np.nan_to_num(np.nanmean(mean, axis=1)), kind="stable")]
    names = pd.Index(methods)
    rates = pd.DataFrame(mean, index=names, columns=names).reindex(index=order, columns=order)
    title = f"Win rates on {subject.name}, mean over metrics"
    plot = score_plots.win_matrix(f"{subject.anchor}-wins", title, rates, table)
    found.figures.append((plot, _PAIRS.format(n=table["metric"].nunique())))
    return found


_PAIRS = (
    "How often the method of a row is better than that of a column, in per cent of the conditions scored by both, "
    "averaged over {n} metrics (each counts the same; ties count half). Orange rows win, blue rows lose; methods are "
    "sorted by their mean. The CSV holds every metric by itself."
)


def _mean_rates(table: pd.DataFrame, methods: Sequence[str]) -> np.ndarray:
    """Return the mean over metrics of the win rates [methods × methods]; a method against itself is a half."""
    mean = table.groupby(["method", "against"])["rate"].mean().to_dict()
    found = np.full((len(methods), len(methods)), np.nan)
    for i, a in enumerate(methods):
        for j, b in enumerate(methods):
            found[i, j] = 0.5 if i == j else mean.get((a, b), np.nan)
    return found
