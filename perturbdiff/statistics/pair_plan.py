"""Which groups of a store's cells are compared, and with which cells: drawn from its table of conditions alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

MIN_CELLS = 10
"""Fewest cells on a side of a comparison."""
MIN_PAIRS = 10
"""Fewest pairs of a cell type where the pairs are shared among cell types."""
LEVELS: dict[str, list[str]] = {
    "perturbation": ["perturbation"],
    "cell type": ["cell_type", "perturbation"],
    "condition": ["cell_type", "batch", "perturbation"],
}
"""What makes a group: a perturbation over all cells, within a cell type, within a cell type and batch."""


@dataclass(frozen=True)
class Sample:
    """Rows of the store (int64, ascending) drawn from a group, and the group's perturbation."""

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


class PairPlan:
    """Comparisons of one level.

    A group's context is what its perturbation shares with others: the cell type, or the cell type and batch. Only
    groups of one context are compared.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    level
        A key of `LEVELS`.
    pairs
        Most comparisons of each kind. At the level of cell types they are shared among these, with `MIN_PAIRS` or
        more for each.
    cells
        Most cells of a sample.
    seed
        Of every draw.

    Attributes
    ----------
    num_groups
        Groups of perturbed cells.
    num_eligible
        Those with enough cells for two samples.
    """

    def __init__(self, conditions: pd.DataFrame, level: str, *, pairs: int, cells: int, seed: int) -> None:
        self.level, self.pairs, self.cells = level, pairs, cells
        self._rng = np.random.default_rng([seed, list(LEVELS).index(level)])
        self._starts = conditions["start"].to_numpy(np.int64)
        self._condition_sizes = conditions["n_cells"].to_numpy(np.int64)
        keys = LEVELS[level]
        grouped = conditions.groupby(keys, sort=True)
        self._labels = pd.DataFrame(conditions[keys]).drop_duplicates().sort_values(keys, ignore_index=True)
        self._sizes = grouped["n_cells"].sum().to_numpy(np.int64)
        group_of_condition = grouped.ngroup().to_numpy()
        order = np.argsort(group_of_condition, kind="stable")
        self._members = np.split(order, np.cumsum(np.bincount(group_of_condition))[:-1])
        self._context = np.zeros(len(self._labels), np.int64)
        if len(keys) > 1:
            self._context = self._labels.groupby(keys[:-1], sort=True).ngroup().to_numpy()
        is_control = grouped["is_control"].any().to_numpy(np.bool_)
        self._control_of_context = {int(self._context[g]): int(g) for g in np.flatnonzero(is_control)}
        self._eligible = np.flatnonzero(~is_control & (self._sizes >= 2 * MIN_CELLS))
        self._halves_of: dict[int, tuple[Sample, Sample]] = {}
        self.num_groups = int((~is_control).sum())
        self.num_eligible = len(self._eligible)

    def comparisons(self) -> list[list[Comparison]]:
        """Return the comparisons, those of one group together."""
        if self.level != "cell type":
            partners = self._partners(self._eligible, self.pairs)
        else:
            contexts = self._context[self._eligible]
            present = np.unique(contexts)
            budget = min(max(MIN_PAIRS, self.pairs // max(1, len(present))), self.pairs)
            partners = {}
            for context in present:
                partners |= self._partners(self._eligible[contexts == context], budget)
        return [list(self._compare(group, others)) for group, others in partners.items()]

    def _partners(self, eligible: np.ndarray, budget: int) -> dict[int, list[int]]:
        """Draw at most ``budget`` groups and as many pairs; return the other groups that each is compared with.

        The groups of a context form a random circle. Each group is paired with the next one, then with the one after
        it and so on, until there are enough pairs.
        """
        order = self._rng.permutation(eligible).tolist()
        circles: dict[int, list[int]] = {}
        place = {}
        for group in order:
            circle = circles.setdefault(int(self._context[group]), [])
            place[group] = len(circle)
            circle.append(group)
        drawn = order[:budget]
        partners: dict[int, list[int]] = {group: [] for group in sorted(drawn)}
        pairs: set[frozenset[int]] = set()
        longest = max((len(circle) for circle in circles.values()), default=0)
        for step in range(1, longest // 2 + 1):
            if len(pairs) >= budget:
                break
            for group in drawn:
                circle = circles[int(self._context[group])]
                other = circle[(place[group] + step) % len(circle)]
                pair = frozenset((group, other))
                if len(pairs) < budget and step <= len(circle) // 2 and pair not in pairs:
                    pairs.add(pair)
                    partners[group].append(other)
        return {group: sorted(others) for group, others in partners.items()}

    def _compare(self, group: int, others: list[int]) -> Iterator[Comparison]:
        labels = self._labels.iloc[group]
        cell_type, batch = str(labels.get("cell_type", "")), str(labels.get("batch", ""))
        first, second = self._halves(group)
        yield Comparison("within", cell_type, batch, first, second)
        for other in others:
            yield Comparison("between", cell_type, batch, first, self._halves(other)[0])
        control = self._control_of_context.get(int(self._context[group]))
        if control is not None and self._sizes[control] >= MIN_CELLS:
            rows = self._draw(control, min(self.cells, int(self._sizes[control])))
            yield Comparison("control", cell_type, batch, first, self._sample(control, rows))

    def _halves(self, group: int) -> tuple[Sample, Sample]:
        """Return two samples of a group that share no cell, the same ones every time."""
        if group not in self._halves_of:
            size = min(self.cells, int(self._sizes[group]) // 2)
            rows = self._rng.permutation(self._draw(group, 2 * size))
            self._halves_of[group] = self._sample(group, rows[:size]), self._sample(group, rows[size:])
        return self._halves_of[group]

    def _sample(self, group: int, rows: np.ndarray) -> Sample:
        return Sample(str(self._labels["perturbation"].iloc[group]), np.sort(rows))

    def _draw(self, group: int, size: int) -> np.ndarray:
        """Draw rows of a group without replacement.

        The number from each condition is drawn as by a simple random sample. Within a condition the rows follow each
        other from a random one on, because a store's rows are shuffled within conditions.
        """
        members = self._members[group]
        sizes = self._condition_sizes[members]
        counts = self._rng.multivariate_hypergeometric(sizes, size, method="marginals")
        first = self._starts[members] + self._rng.integers(0, sizes - counts + 1)
        return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(size)
