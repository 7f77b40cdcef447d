"""Sections on whole methods: mean scores with intervals, radars, means over seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.report.figures import score_plots, seed_means
from perturbdiff.report.figures.page_tables import Table
from perturbdiff.report.figures.score_plots import Forest
from perturbdiff.report.figures.svg import Plot
from perturbdiff.report.loading.comparison import scaled
from perturbdiff.report.loading.metric_columns import Column, radar_columns, score_table, table_columns
from perturbdiff.report.loading.results import Run
from perturbdiff.report.sections.chapter_data import ChapterData
from perturbdiff.report.sections.layout import Section

_LEAST_FOR_RADAR = 3  # metrics


def overview(subject: ChapterData) -> Section:
    """Return the section of all methods' mean scores in figures."""
    found = Section("Scores at a glance", f"{subject.anchor}-glance")
    found.figures.append((_forest(subject), _FOREST))
    if (relative := _relative(subject)) is not None:
        found.figures.append((relative, _RELATIVE))
    if (absolute := _absolute(subject)) is not None:
        found.figures.append((absolute, _ABSOLUTE))
    if (spread := over_seeds(subject)) is not None:
        found.parts.append(
            Section("Over seeds", f"{subject.anchor}-seeds", tables=[spread], note=seed_means.ABOUT)
        )
    return found


_FOREST = (
    "Mean over perturbations (energy distance: over conditions) with its 95 % bootstrap interval where the run holds "
    "one. Look for intervals that clear the dashed chance line and come near the solid ceiling; methods whose "
    "intervals overlap widely are not told apart by this test set. Chance is what the first method scores when its "
    "predictions are handed to other perturbations."
)
_RELATIVE = (
    "Every metric is scaled to 0 (centre) for the worst and 1 (rim) for the best of the methods compared here, with "
    "its direction corrected so that outside is better. It shows the order and the relative gaps, not the size of "
    "the scores: two methods that differ by a hair fill the whole range. An undefined score sits at the centre."
)
_ABSOLUTE = (
    "The 12 metrics of which more is better, as they are, from 0 (centre) to 1 (rim); values below 0 sit at the "
    "centre. The paper's radar holds these metrics; it does not say how its axes are scaled. A method is good where "
    "it is far outside the dashed line of chance and near the ceiling."
)


def _forest(subject: ChapterData) -> Plot:
    panels = [_panel(subject, metric) for metric in subject.key]
    title = f"Mean scores on {subject.name} with 95 % intervals"
    return score_plots.forest(f"{subject.anchor}-forest", title, panels, subject.look)


def _panel(subject: ChapterData, metric: Column) -> Forest:
    rows = []
    for run in subject.ranked:
        low, high = run.interval(metric.name)
        rows.append({"method": run.method, "value": run.score(metric.name)[0], "low": low, "high": high})
    ceiling = subject.ceilings[0].score(metric.name)[0] if subject.ceilings else float("nan")
    return Forest(metric, pd.DataFrame(rows), chance(subject.focus, metric.name), ceiling)


def chance(run: Run, metric: str) -> float:
    """Return chance as the run measured it, else as the definition of the metric gives it; NaN if unknown."""
    found = run.chance(metric)
    total = run.score(metric)[2]
    if np.isnan(found) and metric.startswith("PDS") and total > 1:
        return 0.5 + 0.5 / total
    return found


def _relative(subject: ChapterData) -> Plot | None:
    columns = table_columns(subject.every)
    if len(subject.ranked) < 3 or len(columns) < _LEAST_FOR_RADAR:
        return None
    share = scaled(score_table(subject.ranked, columns), {m.name: m.higher for m in columns})
    title = f"Scaled scores on {subject.name}"
    return score_plots.radar(f"{subject.anchor}-radar", title, share, columns, subject.look)


def _absolute(subject: ChapterData) -> Plot | None:
    columns = radar_columns(subject.every)
    scores = score_table(subject.ranked, columns).dropna(axis=1, how="all")
    columns = [c for c in columns if c.name in scores]
    if len(columns) < _LEAST_FOR_RADAR:
        return None
    rows = {r.method: [r.score(c.name)[0] for c in columns] for r in subject.ceilings[:1]}
    rows["chance"] = [chance(subject.focus, c.name) for c in columns]
    known = {name: row for name, row in rows.items() if np.isfinite(row).any()}
    names = pd.Index([c.name for c in columns])
    lines = pd.DataFrame.from_dict(known, orient="index", columns=names) if known else None
    title = f"Scores on {subject.name}"
    return score_plots.radar(f"{subject.anchor}-radar-raw", title, scores, columns, subject.look, lines=lines)


def over_seeds(subject: ChapterData) -> Table | None:
    """Return mean and standard deviation of all methods if any was run with several seeds."""
    lines = seed_means.lines(subject.runs, subject.absent)
    if not seed_means.repeated(lines):
        return None
    return seed_means.table(lines, subject.key, f"{subject.anchor}-over-seeds")
