"""Arms in tables: means with intervals over data sets and seeds, differences, for the page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from perturbdiff.reporting.experiments.experiment import DRAWS, Estimate, Estimates
from perturbdiff.reporting.experiments.run_groups import Line
from perturbdiff.reporting.figures.number_texts import decimals_for, interval, number, plus_minus
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table, aligned, mark
from perturbdiff.reporting.figures.seed_means import markdown_table
from perturbdiff.reporting.figures.svg import slug
from perturbdiff.reporting.loading.comparison import ranks
from perturbdiff.reporting.loading.metric_columns import ENERGY, NO_SPREAD, Column, named

SCORES = (ENERGY, "PDCorr", "R2", "DEOver", "DEOver_10", "AUPRC", "PDS_cos")
REALISM = (
    "nonzero_ratio",
    "gene_sd_ratio",
    "cell_sd_ratio",
    "library_sd_ratio",
    "correlation_agreement",
    "n_DE_pred",
)
ABOUT = (
    "A score is the mean over data sets of the mean over their perturbations (energy distance and realism: over "
    "conditions). Behind ± stands the sample standard deviation over seeds of a seed’s mean over the data sets "
    "(n − 1, none for one seed). In brackets stands the 95 % bootstrap interval: data sets and then their conditions "
    f"are drawn with replacement ({DRAWS:,} draws, fixed seed), after seeds were averaged within each condition. An "
    "interval needs two values, and with few data sets or conditions it is too narrow."
)
GAPS = (
    "Mean difference to the reference, arm minus reference, on the perturbations or conditions where both "
    "are defined, with its 95 % bootstrap interval, drawn as above. Marked where the interval leaves 0 "
    "out. Sharper than two intervals side by side, as what is hard for one arm is hard for the other."
)


def chosen(metrics: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Return the metrics of these names that were scored, in the order of the names."""
    return [metric for name in names if (metric := named(metrics, name)) is not None]


def arms(estimates: Estimates, names: Sequence[str], what: str) -> Table | None:
    """Return lines × metrics of a group, or None if no metric of these names was scored.

    Parameters
    ----------
    names
        Names of the metrics.
    what
        Their common subject, for the title.
    """
    group = estimates.group
    columns = chosen(group.metrics, names)
    if not columns:
        return None
    digits = _digits(estimates, columns)
    places = {metric.name: _places(estimates, metric) for metric in columns}
    rows = []
    for line in group.lines:
        cells = []
        for metric in columns:
            place = places[metric.name].get(line.label)
            cells.append(
                _cell(estimates.of(line, metric.name), digits[metric.name], place, len(group.datasets))
            )
        rows.append(_row(line, cells))
    heads = ("Arm", *(metric.heading for metric in columns))
    below = ("", *(_real(estimates) if metric.name == "n_DE_pred" else "" for metric in columns))
    name = f"arms-{slug(group.title, what)}"
    note = NO_SPREAD if named(columns, "library_sd_ratio") and _spreadless(estimates) else ""
    return Table(heads, tuple(rows), f"{group.title}: {what}", note, name=name, below=below)


def _spreadless(estimates: Estimates) -> bool:
    """Return whether the SD of library sizes lacks conditions that another ratio of cells has."""
    return any(
        estimates.of(line, "library_sd_ratio").conditions < estimates.of(line, "nonzero_ratio").conditions
        for line in estimates.group.lines
    )


def differences(estimates: Estimates, names: Sequence[str]) -> Table | None:
    """Return differences to the reference, lines × metrics, or None without a line that has a reference."""
    group = estimates.group
    columns = chosen(group.metrics, names)
    lines = [line for line in group.lines if line.entries and estimates.reference(line) is not None]
    if not columns or not lines:
        return None
    rows = []
    digits = _digits(estimates, columns)
    for line in lines:
        other = estimates.reference(line)
        cells = [_gap(estimates.of(line, m.name), m, digits[m.name]) for m in columns]
        rows.append(Row(line.label, tuple(cells), note=f"against {other.label}" if other else ""))
    heads = ("Arm", *(metric.heading for metric in columns))
    return Table(heads, tuple(rows), group.title, name=f"differences-{slug(group.title)}")


def _row(line: Line, cells: Sequence[Cell]) -> Row:
    failed = f"{line.missing} run{'s' * (line.missing != 1)} failed" if line.missing else ""
    if not line.entries:
        blank = (Cell("–", "num na", value=math.nan),) * (len(cells) - 1)
        return Row(line.label, (Cell("failed", "num failed", value=math.nan), *blank), "absent", note=failed)
    return Row(line.label, tuple(cells), line.kind, note=", ".join(filter(None, (_counted(line), failed))))


def _counted(line: Line) -> str:
    n, seeds = len(line.datasets), len(line.seeds)
    said = [f"{n} data set{'s' * (n != 1)}"] if n > 1 else []
    return ", ".join([*said, *([f"{seeds} seeds"] if seeds > 1 else [])])


def _digits(estimates: Estimates, columns: Sequence[Column]) -> dict[str, int]:
    lines = estimates.group.lines
    return {m.name: decimals_for([estimates.of(line, m.name).mean for line in lines]) for m in columns}


def _places(estimates: Estimates, metric: Column) -> dict[str, float]:
    """Return the ranks of what competes: lines on all data sets, no ceilings."""
    every = len(estimates.group.datasets)
    means = {
        line.label: e.mean
        for line in estimates.group.lines
        if line.kind in ("model", "baseline") and (e := estimates.of(line, metric.name)).datasets
        and len(line.datasets) == every
    }  # fmt: skip
    if len(means) < 2:
        return {}
    return {str(k): float(v) for k, v in ranks(pd.Series(means, dtype=float), metric.direction).items()}


def _cell(e: Estimate, digits: int, place: float | None, datasets: int) -> Cell:
    kind = "na" if math.isnan(e.mean) else mark(place)
    note = _spread(e, digits)
    count = f"{e.datasets} of {datasets} data sets" if 0 < e.datasets < datasets else ""
    text = number(e.mean, digits)
    return Cell(text, f"num {kind}".strip(), note, value=e.mean, low=e.low, high=e.high, count=count)


def _gap(e: Estimate, metric: Column, digits: int) -> Cell:
    gap = e.difference
    kind = "num"
    if gap.clear and metric.direction in ("higher", "lower"):
        kind = "num mark better" if (gap.value > 0) == metric.higher else "num mark worse"
    text = number(gap.value, digits)
    text = f"+{text}" if gap.value > 0 else text
    note = interval(gap.low, gap.high, digits)
    return Cell(text, kind, note, value=gap.value, low=gap.low, high=gap.high)


def _real(estimates: Estimates) -> str:
    """Return the number of real DE genes, which is the same for all."""
    means = [estimates.of(line, "n_DE_real").mean for line in estimates.group.lines if line.entries]
    means = [value for value in means if not math.isnan(value)]
    return f"real {number(means[0], 1)}" if means else ""


def markdown(every: Sequence[Estimates]) -> str:
    """Return a table in Markdown per group under its heading: main metrics first, differences below."""
    parts = []
    for estimates in every:
        columns = chosen(estimates.group.metrics, (*SCORES, *REALISM))
        parts.append(f"### {estimates.group.title}\n\n{_table(estimates, columns)}")
        if gaps := _gap_table(estimates, columns):
            parts.append(f"#### {estimates.group.title}: differences\n\n{gaps}")
    return "\n".join(parts)


def _table(estimates: Estimates, columns: Sequence[Column]) -> str:
    digits = _digits(estimates, columns)
    rows = []
    for line in estimates.group.lines:
        fields = [line.label, str(len(line.datasets)), str(len(line.seeds) if line.entries else 0)]
        if not line.entries:
            rows.append([*fields, "failed", *("" for _ in columns[1:])])
            continue
        rows.append([*fields, *(_text(estimates.of(line, m.name), digits[m.name]) for m in columns)])
    return markdown_table(["arm", "data sets", "seeds", *(m.heading for m in columns)], rows)


def _text(e: Estimate, digits: int) -> str:
    return f"{number(e.mean, digits)} {_spread(e, digits)}".strip()


def _spread(e: Estimate, digits: int) -> str:
    """Return the standard deviation over seeds and the interval, as far as they are known."""
    return f"{plus_minus(e.sd, digits)} {interval(e.low, e.high, digits)}".strip()


def _gap_table(estimates: Estimates, columns: Sequence[Column]) -> str:
    table = differences(estimates, [m.name for m in columns])
    if table is None:
        return ""
    rows = [
        [row.head, row.note.removeprefix("against "), *(f"{c.text} {c.note}".strip() for c in row.cells)]
        for row in table.rows
    ]
    return markdown_table(["arm", "against", *table.columns[1:]], rows)


def text(every: Sequence[Estimates]) -> str:
    """Return the main scores of each group for a terminal."""
    blocks = []
    for estimates in every:
        columns = chosen(estimates.group.metrics, SCORES)
        digits = _digits(estimates, columns)
        heads = [m.heading for m in columns] or [""]  # none where every run failed
        rows = [[estimates.group.title, *heads]]
        for line in estimates.group.lines:
            if not line.entries:
                rows.append([line.label, "failed", *("–" for _ in heads[1:])])
                continue
            scores = [(estimates.of(line, m.name), digits[m.name]) for m in columns]
            fields = (f"{number(e.mean, n)} {plus_minus(e.sd, n)}".strip() for e, n in scores)
            rows.append([line.label, *fields])
        blocks.append(aligned(rows))
    return "\n\n".join(blocks)
