"""The first screen of runs by the definition cell-eval2: scaled scores between the mean response and a replicate."""

from __future__ import annotations

import math

import pandas as pd

from perturbdiff.evaluation.cell_eval2.metrics import METRICS, SCORED
from perturbdiff.evaluation.cell_eval2.rules import DEFINITION
from perturbdiff.evaluation.cell_eval2.scaled_scores import SCORE
from perturbdiff.reporting.figures import number_texts
from perturbdiff.reporting.figures.number_texts import number
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.figures.svg import slug
from perturbdiff.reporting.loading.results import Run
from perturbdiff.reporting.sections.chapter_data import ChapterData
from perturbdiff.reporting.sections.verdict import Level, Verdict

_NUMBERS = ("nanmean", "baseline", "replicate", "scaled", "scaled_low", "scaled_high")
_SCALE = "0 is the mean response given to every perturbation, 1 is a replicate"


def is_scaled(about: ChapterData) -> bool:
    """Return whether the runs were scored by cell-eval2; all or none of a data set are."""
    return about.focus.definition == DEFINITION


def scaled_table(about: ChapterData) -> Table:
    """Return the scored metrics: ours, both ends, and the scaled scores of every method."""
    scores = {run.method: scores_of(run) for run in about.ranked}
    ours = scores[about.focus.method]
    heads = ("Metric", about.focus.method, "Mean response", "Replicate")
    heads += tuple(f"Scaled: {method}" for method in scores)
    rows = tuple(_row(name, ours, scores) for name in (SCORE, *SCORED) if name in ours.index)
    return Table(heads, rows, note=f"Scaled scores: {_SCALE}.", name=f"scaled-scores-{slug(about.name)}")


def scores_of(run: Run) -> pd.DataFrame:
    """Return scores, ends and scaled scores by metric: those of the pool, or of the mean of the contexts."""
    table = run.aggregate
    first = table[table["scope"] == table["scope"].iloc[0]]
    numbers = {column: pd.Series(pd.to_numeric(first[column], errors="coerce")) for column in _NUMBERS}
    return pd.DataFrame(numbers).set_index(pd.Index(first["metric"]))


def _row(name: str, ours: pd.DataFrame, scores: dict[str, pd.DataFrame]) -> Row:
    arrow = "↓" if name != SCORE and METRICS[name].direction == "lower" else "↑"
    values = [float(ours.loc[name, column]) for column in _NUMBERS[:3]]
    digits = number_texts.decimals_for([v for v in values if not math.isnan(v)])
    raw = (
        [Cell("", "num")] * 3 if name == SCORE else [Cell(number(v, digits), "num", value=v) for v in values]
    )
    cells = [*raw, *(_scaled(table, name) for table in scores.values())]
    head = "Mean of the six" if name == SCORE else name
    note = "" if name == SCORE else METRICS[name].meaning
    return Row(f"{head}\u00a0{arrow}", tuple(cells), note=note)


def _scaled(table: pd.DataFrame, name: str) -> Cell:
    if name not in table.index:
        return Cell("n/a", "num")
    value, low, high = (float(table.loc[name, column]) for column in _NUMBERS[3:])
    return Cell(
        number(value, 2), "num ours", number_texts.interval(low, high, 2), value=value, low=low, high=high
    )


def scaled_verdict(about: ChapterData) -> Verdict:
    """Return what the scaled scores say.

    Good: the interval of their mean is above the mean response, and so is each of the six. Mixed: only their mean is.
    """
    table = scores_of(about.focus)
    value, low, high = (float(table.loc[SCORE, column]) for column in _NUMBERS[3:])
    if math.isnan(value):
        return Verdict(
            "unknown",
            "Cannot be judged: there is no scaled score",
            tells="Unknown. The cautions below say why.",
        )
    each = {name: float(table.loc[name, "scaled"]) for name in SCORED}
    above = [name for name, score in each.items() if score > 0]
    shown = f"{number(value, 2)} {number_texts.interval(low, high, 2)}".strip()
    if not low > 0:
        level: Level = "poor" if high < 0 else "level"
        title = "Not better than the mean response given to every perturbation"
    elif len(above) < len(SCORED):
        level, title = "mixed", f"Better than the mean response on average, and by {len(above)} of 6 metrics"
    else:
        level, title = "good", "Better than the mean response by all six metrics"
    worst = min(each, key=lambda name: each[name])
    return Verdict(
        level,
        title,
        f"The mean of the six scaled scores is {shown}: {_SCALE}.",
        f"Better than the mean response: {', '.join(above) or 'nothing'}.",
        f"The mean goes {round(100 * value)} % of the way to a replicate. The lowest of the six is {worst}, "
        f"{number(each[worst], 2)}.",
        "The intervals are over perturbations; the noise of the shared controls is not in them.",
    )
