"""The predicted cells as populations and sets: distances, realism, and where they lie beside real ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures import condition_plots, page_tables, score_plots
from perturbdiff.reporting.figures.svg import GREY, Look, Plot
from perturbdiff.reporting.loading.metric_columns import ENERGY, Column, named, set_columns
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.chapter_data import ChapterData, Section

MOST_PICTURES = 24
_CHANCE = "chance"


@dataclass(frozen=True)
class CellPicture:
    """Real, predicted and control cells of one condition: a short name for the selector, and the figure."""

    label: str
    condition: str
    plot: Plot


def cell_pictures(subject: ChapterData) -> list[CellPicture]:
    """Return the pictures of the focus's cells, for the first screen. Empty if the run holds no cells.

    Their names hold what differs between them: the perturbation, and cell type and batch where there are several.
    """
    drawn = _embedded(subject, subject.focus, 0)
    labels = [condition.split("|") for condition, _ in drawn]
    differing = [i for i, values in enumerate(zip(*labels, strict=True)) if len(set(values)) > 1]
    shown = sorted(
        differing or range(len(labels[0]) if labels else 0), reverse=True
    )  # the perturbation first
    return [
        CellPicture(" · ".join(label[i] for i in shown if label[i]), condition, plot)
        for label, (condition, plot) in zip(labels, drawn, strict=True)
    ]


def cell_figures(subject: ChapterData) -> list[tuple[Plot, str]]:
    """Return distances and realism of the predicted cells, all methods in one figure each."""
    made = ((_energy(subject), _ENERGY), (_realism(subject), _REALISM))
    return [(plot, caption) for plot, caption in made if plot is not None]


def opponent_cells(subject: ChapterData) -> Section:
    """Return the pictures of the cells that the opponent predicts."""
    section = Section("", f"{subject.anchor}-cells-1", folded=True, small=True)
    if subject.other is not None:
        section.title = f"The same cells predicted by {subject.other.method}"
        section.figures = [(plot, "") for _, plot in _embedded(subject, subject.other, 1)]
        section.note = _CELLS
    return section


_ENERGY = (
    "A dot is a condition, the thick line the middle half, the tick the median. The best method is on top. 0 is as "
    "near as two samples of the same cells. Chance: predictions beside the cells of another perturbation."
)
_REALISM = (
    "Predicted divided by real, per condition: median and middle half. Methods are ranked by nearness to 1, the band "
    "is ± 10 %. Left of the line the predicted cells are too much alike. An arrow head: beyond the axis."
)
_CELLS = (
    "All pictures share their axes, the two main directions in which real cells vary. Crosses mark the means."
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
        if metric.direction != "one" or metric.family == "sets":
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


def _embedded(subject: ChapterData, run: Run, index: int) -> list[tuple[str, Plot]]:
    """Return conditions ("cell type|batch|perturbation") and their pictures."""
    table = run.table("embedding")
    if table is None or table.empty:
        return []
    limits = condition_plots.shared_limits(table)
    condition = table["condition"].astype(str).to_numpy()
    color = subject.look[run.method].color
    return [
        (
            label,
            condition_plots.embedding(
                f"{subject.anchor}-cells-{index}-{i}", label, table.loc[condition == label], limits, color
            ),
        )
        for i, label in enumerate(list(dict.fromkeys(condition))[:MOST_PICTURES])
    ]


_INTRO = (
    "Real cells come in sets: wells, guides or donors. Sets of one condition differ because of what nobody recorded. A "
    "good method samples sets that differ just as much and in the same way."
)
_PICTURE = (
    "A point is a set of cells. Sampled sets should cover the true ones and go no farther. A tight heap in the middle: "
    "the method draws every set from the same distribution. Units are roots of energy distances."
)
_NOTE = (
    "Variance between sets is best at 1: at 0 sets are mere draws of cells. Range, recall and precision of a perfect "
    "method are near .9 with many sets, and the ceiling, half of the true sets against the other half, shows what can "
    "be reached here. The energy score counts the middle and the spread together. It is above 0 even for true sets."
)


def set_scores(subject: ChapterData) -> Section:
    """Return the section; it is empty where it is not known which cells were a set."""
    section = Section("Do sampled sets differ as true sets do?", f"{subject.anchor}-sets", "Sets")
    columns = set_columns(subject.every)
    if not columns:
        return section
    section.intro = _INTRO
    focus = subject.focus
    table = focus.table("sets")
    if table is not None and len(table):
        title = f"True and sampled sets on {subject.name}: {focus.method}"
        name = f"{subject.anchor}-sets"
        plot = condition_plots.places(name, title, table, focus.method, subject.look[focus.method])
        section.figures.append((plot, _PICTURE))
    scores = page_tables.scores(subject.runs, columns, subject.look, absent=subject.absent)
    section.tables = [replace(scores, title="Scores of sets", name=f"{scores.name}-sets", note=_NOTE)]
    return section
