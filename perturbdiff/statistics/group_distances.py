"""Distances within and between groups of a store's cells: plan, energy distances with intervals, tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from perturbdiff.conditions.cell_distances import energy_distance, mean_distance_within
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.store.row_reader import Located, RowReader
from perturbdiff.store.store import Store

DRAWS = 2000
"""Bootstrap draws of an interval."""
MIN_CELLS = 10
"""Fewest cells on a side of a comparison."""
MIN_PAIRS = 10
"""Fewest pairs of a cell type where they are shared among cell types."""
LEVELS: dict[str, list[str]] = {
    "perturbation": ["perturbation"],
    "cell type": ["cell_type", "perturbation"],
    "condition": ["cell_type", "batch", "perturbation"],
}
"""What makes a group: a perturbation over all cells, within a cell type, within a cell type and batch."""
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
    Statist. 49:845); a pair of a label with itself as often as the label.

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
class Sample:
    """Rows of the store (int64, ascending) drawn from a group, and what to call it."""

    perturbation: str
    rows: np.ndarray


@dataclass(frozen=True)
class Comparison:
    """Two samples to compare; ``kind`` is within, between or control."""

    kind: str
    cell_type: str
    batch: str
    a: Sample
    b: Sample


@dataclass(frozen=True)
class _Groups:
    """Groups of one level: their labels, sizes, conditions, and the groups of controls by context."""

    labels: pd.DataFrame
    sizes: np.ndarray
    context: np.ndarray
    members: list[np.ndarray]
    eligible: np.ndarray
    controls: dict[int, int]


class PairPlan:
    """Comparisons of one level.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    level
        A key of `LEVELS`.
    pairs
        Most comparisons of each kind; at the level of cell types shared among these, `MIN_PAIRS` or more each.
    cells
        Most cells of a sample.
    seed
        Of every draw.
    """

    def __init__(self, conditions: pd.DataFrame, level: str, *, pairs: int, cells: int, seed: int) -> None:
        self.level, self.pairs, self.cells = level, pairs, cells
        self._rng = np.random.default_rng([seed, list(LEVELS).index(level)])
        self._starts = conditions["start"].to_numpy(np.int64)
        self._sizes = conditions["n_cells"].to_numpy(np.int64)
        self._groups = _groups(conditions, LEVELS[level])
        self._drawn: dict[int, tuple[Sample, Sample]] = {}
        self.num_groups = len(self._groups.labels) - len(self._groups.controls)
        self.num_eligible = len(self._groups.eligible)

    def comparisons(self) -> list[list[Comparison]]:
        """Return the comparisons, those of one group together."""
        return [list(self._compare(*chosen)) for chosen in self._choose()]

    def _choose(self) -> list[tuple[int, list[int]]]:
        """Return groups and, for each, the others of its context that it is compared with."""
        groups, eligible = self._groups, self._groups.eligible
        if self.level != "cell type":
            return self._pair(eligible, self.pairs)
        contexts = np.unique(groups.context[eligible])
        budget = max(MIN_PAIRS, self.pairs // max(1, len(contexts)))
        return [
            found
            for context in contexts
            for found in self._pair(eligible[groups.context[eligible] == context], min(budget, self.pairs))
        ]

    def _pair(self, eligible: np.ndarray, budget: int) -> list[tuple[int, list[int]]]:
        """Draw at most ``budget`` groups, and as many pairs: each with the next ones on a circle of its context."""
        context = self._groups.context
        order = self._rng.permutation(eligible)
        circles: dict[int, list[int]] = {}
        place = {}
        for group in order.tolist():
            circle = circles.setdefault(int(context[group]), [])
            place[group] = len(circle)
            circle.append(group)
        chosen = sorted(order[:budget].tolist())
        partners: dict[int, list[int]] = {group: [] for group in chosen}
        seen: set[frozenset[int]] = set()
        longest = max((len(circle) for circle in circles.values()), default=0)
        for step in range(1, longest // 2 + 1):
            for group in order[:budget].tolist():
                circle = circles[int(context[group])]
                if len(seen) >= budget or step > len(circle) // 2:
                    continue
                other = circle[(place[group] + step) % len(circle)]
                if frozenset((group, other)) not in seen:
                    seen.add(frozenset((group, other)))
                    partners[group].append(other)
            if len(seen) >= budget:
                break
        return [(group, sorted(others)) for group, others in partners.items()]

    def _compare(self, group: int, others: list[int]) -> Iterator[Comparison]:
        groups = self._groups
        labels = groups.labels.iloc[group]
        cell_type, batch = str(labels.get("cell_type", "")), str(labels.get("batch", ""))
        first, second = self._halves(group)
        yield Comparison("within", cell_type, batch, first, second)
        for other in others:
            yield Comparison("between", cell_type, batch, first, self._halves(other)[0])
        control = groups.controls.get(int(groups.context[group]))
        if control is not None and groups.sizes[control] >= MIN_CELLS:
            size = min(self.cells, int(groups.sizes[control]))
            yield Comparison(
                "control", cell_type, batch, first, self._sample(control, self._draw(control, size))
            )

    def _halves(self, group: int) -> tuple[Sample, Sample]:
        """Return two samples of a group that share no cell, the same ones every time."""
        if group not in self._drawn:
            size = min(self.cells, int(self._groups.sizes[group]) // 2)
            rows = self._rng.permutation(self._draw(group, 2 * size))
            self._drawn[group] = self._sample(group, rows[:size]), self._sample(group, rows[size:])
        return self._drawn[group]

    def _sample(self, group: int, rows: np.ndarray) -> Sample:
        return Sample(str(self._groups.labels["perturbation"].iloc[group]), np.sort(rows))

    def _draw(self, group: int, size: int) -> np.ndarray:
        """Draw rows of a group without replacement.

        The number from each condition is drawn as by a simple random sample; within it they lie side by side
        from a random row on, since a store's rows are shuffled within conditions.
        """
        members = self._groups.members[group]
        sizes = self._sizes[members]
        counts = self._rng.multivariate_hypergeometric(sizes, size, method="marginals")
        first = self._starts[members] + self._rng.integers(0, sizes - counts + 1)
        return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(size)


def _groups(conditions: pd.DataFrame, keys: list[str]) -> _Groups:
    grouped = conditions.groupby(keys, sort=True)
    number = grouped.ngroup().to_numpy()
    labels = conditions.loc[~pd.Series(number).duplicated().to_numpy(), keys].assign(
        _number=pd.unique(number)
    )
    labels = labels.sort_values("_number").drop(columns="_number").reset_index(drop=True)
    order = np.argsort(number, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(number))[:-1])
    sizes = np.bincount(number, conditions["n_cells"].to_numpy(np.float64)).astype(np.int64)
    is_control = np.zeros(len(labels), np.bool_)
    is_control[number[conditions["is_control"].to_numpy(np.bool_)]] = True
    context = np.zeros(len(labels), np.int64)
    if len(keys) > 1:
        context = labels.groupby(keys[:-1], sort=True).ngroup().to_numpy()
    controls = {int(context[g]): int(g) for g in np.flatnonzero(is_control)}
    eligible = np.flatnonzero(~is_control & (sizes >= 2 * MIN_CELLS))
    return _Groups(labels, sizes, context, members, eligible, controls)


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
        (x, within_x), (y, within_y) = loaded.get(a), loaded.get(b)
        found[i] = energy_distance(x, y, within=(within_x, within_y))
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
