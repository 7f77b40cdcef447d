"""Energy distances within and between groups of a store's cells, with intervals of their means."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from threadpoolctl import threadpool_limits

from perturbdiff.conditions.cell_distances import energy_distance, mean_distance_within
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.statistics.pair_plan import LEVELS, MIN_CELLS, Comparison, PairPlan
from perturbdiff.store.row_reader import Located, RowReader
from perturbdiff.store.store import Store

DRAWS = 2000
"""Bootstrap draws of an interval."""
KINDS = ("within", "between", "control")
COLUMNS = ["level", "kind", "cell_type", "batch", "group_a", "group_b", "n_a", "n_b", "ed", "root"]
SUMMARY_COLUMNS = [
    "level", "kind", "cell_type", "n_pairs", "n_perturbations", "mean", "low", "high", "sd", "median", "mean_root",
    "above_within", "interval_over",
]  # fmt: skip
_GROUPS_PER_TASK = 16
_BYTES_KEPT = 96 * 2**20  # of dense samples that a task holds


def interval(
    values: np.ndarray, first: np.ndarray, second: np.ndarray, *, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Return a percentile bootstrap interval of the mean of values that belong to pairs of labels.

    Pairs that share a label are not independent. Labels are therefore drawn with replacement, not pairs, and a
    pair counts as often as the product of the times that its two labels were drawn (Davezies et al. 2021, Ann.
    Statist. 49:845); a pair of a label with itself counts as often as the label.

    Parameters
    ----------
    values
        [n].
    first, second
        Labels of the two sides, [n] each; equal where a group is compared with itself or with a reference.

    Returns
    -------
    tuple
        (nan, nan) for fewer than three labels.
    """
    labels, place = np.unique(np.concatenate([first, second]), return_inverse=True)
    if len(labels) < 3:
        return float("nan"), float("nan")
    a, b = place[: len(first)], place[len(first) :]
    rng = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    for draw in range(DRAWS):
        times = np.bincount(rng.integers(0, len(labels), len(labels)), minlength=len(labels))
        weight = np.where(a == b, times[a], times[a] * times[b])
        total = weight.sum()
        means[draw] = weight @ values / total if total else np.nan
    tail = 50.0 * (1.0 - level)
    low, high = np.nanpercentile(means, (tail, 100.0 - tail))
    return float(low), float(high)


@dataclass(frozen=True)
class _Task:
    """Samples, by where their rows lie, and which of them to compare with which, int64 [n, 2]."""

    store: Path
    samples: list[Located]
    pairs: np.ndarray


def distances(
    store: Store, runner: TaskRunner, *, pairs: int, cells: int, seed: int
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the table of distances and, by level, how many groups there are and how many have enough cells.

    Parameters
    ----------
    pairs
        Most pairs of each kind at each level; 0: none.
    cells
        Most cells of a sample.

    Returns
    -------
    tuple
        A table with `COLUMNS`: ``ed`` is the energy distance in log1p units and ``root`` its root, 0 where it is
        negative.
    """
    tables, groups = [], {}
    one_cell_type = store.conditions["cell_type"].nunique() == 1
    for level in LEVELS if pairs else ():
        if one_cell_type and level == "cell type":
            continue  # the same as perturbations
        plan = PairPlan(store.conditions, level, pairs=pairs, cells=cells, seed=seed)
        groups[level] = {"n_groups": plan.num_groups, "n_with_enough_cells": plan.num_eligible}
        comparisons = plan.comparisons()
        tasks = _tasks(store, comparisons)
        sizes = [len(task.pairs) for task in tasks]
        values = runner.run(_compare, tasks, weights=sizes, label=f"distances by {level}", unit="pairs")
        if comparisons:
            tables.append(_table(level, list(chain(*comparisons)), np.concatenate(values)))
    return pd.concat(tables or [pd.DataFrame(columns=pd.Index(COLUMNS))], ignore_index=True), groups


def _tasks(store: Store, comparisons: list[list[Comparison]]) -> list[_Task]:
    """Cut comparisons into tasks, and look up where all their rows lie in one go through the store."""
    drawn = [sample.rows for c in chain(*comparisons) for sample in (c.a, c.b)]
    rows = np.unique(np.concatenate([np.empty(0, np.int64), *drawn]))
    located = RowReader(store).locate(rows)
    tasks = []
    for first in range(0, len(comparisons), _GROUPS_PER_TASK):
        of_task = list(chain(*comparisons[first : first + _GROUPS_PER_TASK]))
        samples = {s.rows.tobytes(): s.rows for c in of_task for s in (c.a, c.b)}  # most occur more than once
        number = {key: i for i, key in enumerate(samples)}
        pairs = [[number[s.rows.tobytes()] for s in (c.a, c.b)] for c in of_task]
        places = [located.take(np.searchsorted(rows, of_sample)) for of_sample in samples.values()]
        tasks.append(_Task(store.path, places, np.array(pairs, np.int64)))
    return tasks


def _compare(task: _Task) -> np.ndarray:
    """Return the energy distance of each pair."""
    reader = RowReader(Store(task.store))
    largest = 8 * reader.store.n_genes * max(len(sample.depth) for sample in task.samples)

    @lru_cache(max(2, _BYTES_KEPT // largest))
    def load(number: int) -> tuple[np.ndarray, float]:
        """Return a sample as dense cells and its mean distance within."""
        cells = reader.read(task.samples[number]).astype(np.float64).toarray()
        return cells, mean_distance_within(cells)

    values = np.empty(len(task.pairs))
    # Products are too small to share between threads, which on a busy machine wait for each other.
    with threadpool_limits(1, "blas"):
        for i, (a, b) in enumerate(task.pairs.tolist()):
            (x, within_x), (y, within_y) = load(a), load(b)
            values[i] = energy_distance(x, y, within=(within_x, within_y))
    return values


def _table(level: str, comparisons: list[Comparison], ed: np.ndarray) -> pd.DataFrame:
    rows = [
        (level, c.kind, c.cell_type, c.batch, c.a.perturbation, c.b.perturbation, len(c.a.rows), len(c.b.rows))
        for c in comparisons
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=pd.Index(COLUMNS[:-2]))
    return table.assign(ed=ed, root=np.sqrt(np.maximum(ed, 0.0)))


def summarise(table: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Return mean, spread and interval of the distances of each level and kind, by cell type where that is a level.

    Parameters
    ----------
    table
        As `distances` returns it.
    seed
        Of the bootstrap.

    Returns
    -------
    pd.DataFrame
        `SUMMARY_COLUMNS`: ``low`` and ``high`` bound a 95 % bootstrap interval of the mean
        (`group_distances.interval`) over perturbations, or over groups where there are fewer than three
        perturbations (column ``interval_over``); ``above_within`` is the share of pairs beyond the 95 % quantile of
        the distances within groups of the same level and cell type.
    """
    scope = table["cell_type"].where(table["level"] == "cell type", "all")
    rows = []
    for key, places in table.groupby(["level", scope], sort=False).indices.items():
        level, cell_type = np.asarray(key, object).tolist()
        of_level = table.iloc[np.sort(places)]
        within = of_level.loc[of_level["kind"] == "within", "ed"].to_numpy(np.float64)
        for kind in KINDS:
            of_kind = pd.DataFrame(of_level[of_level["kind"] == kind])
            if len(of_kind):
                rows.append((level, kind, cell_type, *_summary(of_kind, within, kind, seed)))
    return pd.DataFrame(rows, columns=pd.Index(SUMMARY_COLUMNS))


def _summary(table: pd.DataFrame, within: np.ndarray, kind: str, seed: int) -> tuple[float | str, ...]:
    """Return what `SUMMARY_COLUMNS` say of the distances of one kind, from ``n_pairs`` on."""
    ed = table["ed"].to_numpy(np.float64)
    first, second, unit = _bootstrap_labels(table, kind)
    low, high = interval(ed, first, second, seed=seed)
    above = float("nan")
    if len(within) and kind != "within":
        above = float((ed > np.quantile(within, 0.95)).mean())
    spread = float(ed.std(ddof=1)) if len(ed) > 1 else float("nan")
    perturbations = set(table["group_a"]) | (set(table["group_b"]) if kind == "between" else set())
    over = "" if np.isnan(low) else unit
    middle, root = float(np.median(ed)), float(table["root"].mean())
    return len(ed), len(perturbations), float(ed.mean()), low, high, spread, middle, root, above, over


def _bootstrap_labels(table: pd.DataFrame, kind: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the labels of both sides that the bootstrap draws: perturbations, or groups where these are too few."""
    first = table["group_a"].to_numpy(str)
    second = table["group_b"].to_numpy(str) if kind == "between" else first
    if len(set(first) | set(second)) >= 3:
        return first, second, "perturbations"
    context = [
        f"{cell_type}\0{batch}\0" for cell_type, batch in zip(table["cell_type"], table["batch"], strict=True)
    ]
    a, b = (
        np.array([c + name for c, name in zip(context, side, strict=True)], str) for side in (first, second)
    )
    return a, b, "groups"


def facts(
    summary: pd.DataFrame,
    groups: dict[str, Any],
    cell_types: pd.DataFrame,
    *,
    pairs: int,
    cells: int,
    seed: int,
) -> dict[str, Any]:
    """Return what summary.json says about distances: the definition, the settings, the means.

    ``cells_and_distance`` is Spearman's correlation over cell types between the number of cells and the mean
    distance between perturbations.
    """
    means: dict[str, dict[str, Any]] = {}
    for row in pd.DataFrame(summary[summary["cell_type"] == "all"]).to_dict("records"):
        numbers = {key: _as_json(row[key]) for key in ("n_pairs", "mean", "low", "high")}
        means.setdefault(str(row["level"]), {})[str(row["kind"])] = numbers
    between = summary[(summary["level"] == "cell type") & (summary["kind"] == "between")]
    joined = between.merge(cell_types[["cell_type", "n_cells"]], on="cell_type")
    known = len(joined) > 2 and joined["n_cells"].nunique() > 1
    rho = float(stats.spearmanr(joined["n_cells"], joined["mean"])[0]) if known else None  # type: ignore[arg-type]
    return {
        "estimator": "2E|x-y| - E|x-x'| - E|y-y'|, without pairs of a cell with itself",
        "units": "log1p",
        "settings": {"pairs": pairs, "cells_per_group": cells, "least_cells": MIN_CELLS, "seed": seed},
        "groups": groups,
        "means": means,
        "cells_and_distance": {"spearman": rho, "n_cell_types": len(joined)},
    }


def _as_json(value: Any) -> float | int | None:
    return None if pd.isna(value) else (int(value) if float(value).is_integer() else float(value))
