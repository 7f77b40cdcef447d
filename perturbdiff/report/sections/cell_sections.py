"""Section on the predicted cells as populations: distances, realism, and where they lie beside real cells."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.report.figures import condition_plots, score_plots
from perturbdiff.report.figures.svg import GREY, Look, Plot
from perturbdiff.report.loading.metric_columns import ENERGY, Column, named
from perturbdiff.report.loading.results import Run
from perturbdiff.report.sections.chapter_data import ChapterData, Section

_CONDITIONS = 6
_CHANCE = "chance"


def cells(subject: ChapterData) -> Section:
    """Return the section on predicted cells as populations."""
    section = Section("Populations of cells", f"{subject.anchor}-populations")
    if (plot := _energy(subject)) is not None:
        section.figures.append((plot, _ENERGY))
    if (plot := _realism(subject)) is not None:
        section.figures.append((plot, _REALISM))
    for i, run in enumerate(r for r in (subject.focus, subject.other) if r is not None):
        drawn = _embedded(subject, run, i)
        if not drawn:
            continue
        title = (
            f"Cells predicted by {run.method} beside real cells"
            if i == 0
            else f"The same cells predicted by {run.method}"
        )
        part = Section(title, f"{subject.anchor}-cells-{i}", folded=i > 0, small=True)
        part.figures = [(plot, "") for plot in drawn]
        part.note = _CELLS if i == 0 else ""
        section.parts.append(part)
    return section


_ENERGY = (
    "Each dot is one condition, the thick line its middle half, the tick the median; methods are sorted by it. Energy "
    "distance compares whole populations, so that a prediction with the right mean but too little spread is found "
    "out. Values around 0 are as near as two samples of the same cells; chance, where given, is the first method's "
    "prediction against the real cells of another perturbation."
)
_REALISM = (
    "Predicted over real, per condition: median and middle half. On the line a method's cells vary as real cells do; "
    "the band is ± 10 %. Left of it they are too much alike. A method that copies a mean to every cell is far left, "
    "however good its scores are. An arrow head: beyond the axis."
)
_CELLS = (
    "All panels share their axes and their principal components, which are fitted on real cells (in brackets their "
    "share of the variance); crosses mark the mean of each population. A good prediction covers the real cells, in "
    "place and in spread, and not the controls."
)


def _energy(subject: ChapterData) -> Plot | None:
    metric = named(subject.every, ENERGY)
    if metric is None:
        return None
    values = {r.method: v for r in subject.runs if not (v := subject.values(r, ENERGY)).empty}
    title = f"Energy distance per condition on {subject.name}"
    if not values:
        return None
    table = subject.focus.conditions
    column = f"chance_{ENERGY}"
    if table is not None and column in table and np.isfinite(table[column].to_numpy(np.float64)).any():
        keys = table["cell_type"] + "|" + table["batch"], table["perturbation"]
        index = pd.MultiIndex.from_arrays(keys, names=["scope", "perturbation"])
        values[_CHANCE] = pd.Series(table[column].to_numpy(np.float64), index=index)
    look = {**subject.look, _CHANCE: Look(GREY, "o")}
    return condition_plots.strips(f"{subject.anchor}-energy", title, values, metric, look)


def _realism(subject: ChapterData) -> Plot | None:
    """Draw the ratios whose best value is 1."""
    panels: list[tuple[Column, pd.DataFrame]] = []
    for metric in subject.every:
        if metric.direction != "one":
            continue
        rows = [_quartiles(run.method, subject.values(run, metric.name)) for run in subject.runs]
        table = pd.DataFrame(rows)
        if np.isfinite(table["median"].to_numpy(np.float64)).any():
            panels.append((metric, table))
    if not panels:
        return None
    title = f"Predicted cells against real cells on {subject.name}"
    return score_plots.realism(f"{subject.anchor}-realism", title, panels, subject.look)


def _quartiles(method: str, values: pd.Series) -> dict[str, object]:
    defined = values.to_numpy(np.float64)
    defined = defined[np.isfinite(defined)]
    low, middle, high = np.percentile(defined, (25, 50, 75)) if defined.size else (float("nan"),) * 3
    return {
        "method": method,
        "median": float(middle),
        "low": float(low),
        "high": float(high),
        "n": len(defined),
    }


def _embedded(subject: ChapterData, run: Run, index: int) -> list[Plot]:
    table = run.table("embedding")
    if table is None or table.empty:
        return []
    limits = condition_plots.shared_limits(table)
    condition = table["condition"].astype(str).to_numpy()
    color = subject.look[run.method].color
    return [
        condition_plots.embedding(
            f"{subject.anchor}-cells-{index}-{i}", label, table.loc[condition == label], limits, color
        )
        for i, label in enumerate(list(dict.fromkeys(condition))[:_CONDITIONS])
    ]
