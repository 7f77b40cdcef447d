"""Which groups of cells are compared with which, and which of their cells.

Everything is drawn here, before any cell is read, so that a comparison depends on the store and the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

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
