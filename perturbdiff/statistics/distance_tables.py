"""Distances within and between groups of a store's cells: computed for the planned comparisons, summed up in tables."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.statistics.group_distances import interval, mean_distance, mean_distance_within
from perturbdiff.statistics.group_pairs import LEVELS, MIN_CELLS, Comparison, PairPlan
from perturbdiff.store.row_reader import Located, RowReader
from perturbdiff.store.store import Store

KINDS = ("within", "between", "control")
COLUMNS = ["level", "kind", "cell_type", "batch", "group_a", "group_b", "n_a", "n_b", "ed", "root"]
SUMMARY_COLUMNS = [
    "level", "kind", "cell_type", "n_pairs", "n_perturbations", "mean", "low", "high", "sd", "median", "mean_root",
    "above_within", "interval_over",
]  # fmt: skip

_GROUPS_PER_TASK = 16
_BYTES_KEPT = 96 * 2**20  # of dense samples that a task holds


@dataclass(frozen=True)
class _Task:
    """Samples, by where their rows lie, and which of them to compare with which, int64 [n, 2]."""

    store: Path
    samples: list[Located]
    pairs: np.ndarray


def distances(
    store: Store, crew: TaskRunner, *, pairs: int, cells: int, seed: int
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
        A table with `COLUMNS`: ``ed`` is the energy distance (`group_distances`) in log1p units and
        ``root`` its root, 0 where it is negative.
    """
    frames, groups = [pd.DataFrame(columns=pd.Index(COLUMNS))], {}
    single = store.conditions["cell_type"].nunique() == 1
    for level in LEVELS if pairs else ():
        if single and level == "cell type":
            continue  # the same as perturbations
        plan = PairPlan(store.conditions, level, pairs=pairs, cells=cells, seed=seed)
        groups[level] = {"n_groups": plan.num_groups, "n_with_enough_cells": plan.num_eligible}
        found = plan.comparisons()
        tasks = _tasks(store, found)
        sizes = [len(task.pairs) for task in tasks]
        values = crew.run(_compare, tasks, weights=sizes, label=f"distances by {level}", unit="pairs")
        if found:
            frames.append(_table(level, [c for group in found for c in group], np.concatenate(values)))
    frames = frames[1:] or frames
    return pd.concat(frames, ignore_index=True), groups


def _tasks(store: Store, found: list[list[Comparison]]) -> list[_Task]:
    """Cut comparisons into tasks, and look up where all their rows lie in one go through the store."""
    drawn = [sample.rows for group in found for c in group for sample in (c.a, c.b)]
    rows = np.unique(np.concatenate([np.empty(0, np.int64), *drawn]))
    located = RowReader(store).locate(rows)
    tasks = []
    for first in range(0, len(found), _GROUPS_PER_TASK):
        number: dict[bytes, int] = {}
        samples, pairs = [], []
        for comparison in (c for group in found[first : first + _GROUPS_PER_TASK] for c in group):
            for sample in (comparison.a, comparison.b):
                if number.setdefault(sample.rows.tobytes(), len(number)) == len(samples):
                    samples.append(located.take(np.searchsorted(rows, sample.rows)))
            pairs.append([number[s.rows.tobytes()] for s in (comparison.a, comparison.b)])
        tasks.append(_Task(store.path, samples, np.array(pairs, np.int64)))
    return tasks


def _compare(task: _Task) -> np.ndarray:
    """Return the energy distance of each pair."""
    loaded = _Loaded(RowReader(Store(task.store)), task.samples)
    found = np.empty(len(task.pairs))
    for i, (a, b) in enumerate(task.pairs.tolist()):
        (x, own_x), (y, own_y) = loaded.get(a), loaded.get(b)
        found[i] = 2.0 * mean_distance(x, y) - own_x - own_y
    return found


class _Loaded:
    """Samples as dense cells with their mean distance within; the last few are kept."""

    def __init__(self, reader: RowReader, samples: list[Located]) -> None:
        self._reader, self._samples = reader, samples
        self._kept: OrderedDict[int, tuple[np.ndarray, float]] = OrderedDict()

    def get(self, number: int) -> tuple[np.ndarray, float]:
        if number not in self._kept:
            cells = self._reader.read(self._samples[number]).astype(np.float64).toarray()
            self._kept[number] = cells, mean_distance_within(cells)
            while len(self._kept) > max(2, _BYTES_KEPT // cells.nbytes):
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


def _table(level: str, comparisons: list[Comparison], ed: np.ndarray) -> pd.DataFrame:
    rows = [
        (
            level,
            c.kind,
            c.cell_type,
            c.batch,
            c.a.perturbation,
            c.b.perturbation,
            len(c.a.rows),
            len(c.b.rows),
        )
        for c in comparisons
    ]
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
            own = pd.DataFrame(of_level[of_level["kind"] == kind])
            if len(own):
                rows.append((level, kind, cell_type, *_summary(own, within, kind, seed)))
    return pd.DataFrame(rows, columns=pd.Index(SUMMARY_COLUMNS))


def _summary(own: pd.DataFrame, within: np.ndarray, kind: str, seed: int) -> tuple[float | str, ...]:
    ed = own["ed"].to_numpy(np.float64)
    first, second, unit = _labels(own, kind)
    low, high = interval(ed, first, second, seed=seed)
    above = (
        float((ed > np.quantile(within, 0.95)).mean()) if len(within) and kind != "within" else float("nan")
    )
    spread = float(ed.std(ddof=1)) if len(ed) > 1 else float("nan")
    sides = set(own["group_a"]) | (set(own["group_b"]) if kind == "between" else set())
    over = "" if np.isnan(low) else unit
    middle, root = float(np.median(ed)), float(own["root"].mean())
    return len(ed), len(sides), float(ed.mean()), low, high, spread, middle, root, above, over


def _labels(own: pd.DataFrame, kind: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the labels of both sides that the bootstrap draws: perturbations, or groups where these are too few."""
    a, b = own["group_a"].to_numpy(str), own["group_b"].to_numpy(str)
    second = b if kind == "between" else a
    if len(set(a) | set(second)) >= 3:
        return a, second, "perturbations"
    where = own["cell_type"].to_numpy(str), own["batch"].to_numpy(str)
    names = [
        np.array(["\0".join(row) for row in zip(*where, side, strict=True)], str) for side in (a, second)
    ]
    return names[0], names[1], "groups"


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
        numbers = {key: _plain(row[key]) for key in ("n_pairs", "mean", "low", "high")}
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


def _plain(value: Any) -> float | int | None:
    return None if pd.isna(value) else (int(value) if float(value).is_integer() else float(value))
