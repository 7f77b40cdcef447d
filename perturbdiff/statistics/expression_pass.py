"""One pass over a store: sums by gene, and how many cells have how many genes or how many counts.

What a pass keeps can be added up, and its size does not depend on the number of cells. Integer histograms give exact
quantiles of the number of genes. Depths are floating-point numbers. They are first counted by their leading 16 bits
and then, where a quantile lies, by the others (a radix selection), so that their quantiles are exact too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np

from perturbdiff.runtime.compiled import kernel
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.store.row_reader import RowReader
from perturbdiff.store.store import Store

ROWS_PER_TASK = 524_288
"""Rows of one task. Large, because what a task returns is about as large as all results together."""

_ROWS_PER_BLOCK = 4096

QUANTILES = {"minimum": 0.0, "quartile_1": 0.25, "median": 0.5, "quartile_3": 0.75, "maximum": 1.0}


@dataclass
class ExpressionSums:
    """What the pass counts.

    Attributes
    ----------
    total, squares
        Sum of log1p values and of their squares, float64 [G].
    expressed
        Cells with a positive value, int64 [G].
    genes
        By cell type (its number): cells by number of expressed genes, int64 [G + 1].
    listed
        The same counting the genes of a list alone.
    depth_bits
        Cells by the leading 16 bits of their depth (float32).
    depth_total, depth_range
        Sum of depths, the smallest and the largest.
    """

    total: np.ndarray
    squares: np.ndarray
    expressed: np.ndarray
    genes: dict[int, np.ndarray] = field(default_factory=dict)
    listed: dict[int, np.ndarray] = field(default_factory=dict)
    depth_bits: dict[int, int] = field(default_factory=dict)
    depth_total: float = 0.0
    depth_range: tuple[float, float] = (float("inf"), float("-inf"))

    def add(self, other: ExpressionSums) -> ExpressionSums:
        """Return this with ``other`` added to it."""
        self.total += other.total
        self.squares += other.squares
        self.expressed += other.expressed
        for histograms, added in ((self.genes, other.genes), (self.listed, other.listed)):
            for code, counts in added.items():
                histograms[code] = histograms[code] + counts if code in histograms else counts
        for bits, count in other.depth_bits.items():
            self.depth_bits[bits] = self.depth_bits.get(bits, 0) + count
        self.depth_total += other.depth_total
        low, high = zip(self.depth_range, other.depth_range, strict=True)
        self.depth_range = min(low), max(high)
        return self


@dataclass(frozen=True)
class _Range:
    """Rows ``start`` to ``stop`` of a store.

    ``runs`` has the first row and the cell type's number of each run of rows of one cell type, int64 [runs, 2];
    ``listed`` says which genes belong to a second list.
    """

    store: Path
    start: int
    stop: int
    runs: np.ndarray
    listed: np.ndarray | None


def sum_expression(
    store: Store, runner: TaskRunner, cell_types: Sequence[str], listed: np.ndarray | None
) -> ExpressionSums:
    """Return the sums over a whole store.

    Parameters
    ----------
    store
        The store.
    runner
        Runs the tasks; the sums do not depend on it.
    cell_types
        Names of the cell types by number.
    listed
        Which genes belong to a second list, bool [G], or None.

    Raises
    ------
    UserError
        If the store is damaged.
    """
    number = {name: code for code, name in enumerate(cell_types)}
    conditions = store.conditions
    codes = np.array([number[name] for name in conditions["cell_type"]], np.int64)
    first = np.concatenate([[True], np.diff(codes) != 0])
    runs = np.stack([conditions["start"].to_numpy(np.int64)[first], codes[first]], axis=1)
    tasks = []
    for start in range(0, store.n_cells, ROWS_PER_TASK):
        stop = min(start + ROWS_PER_TASK, store.n_cells)
        a, b = np.searchsorted(runs[:, 0], start, "right") - 1, np.searchsorted(runs[:, 0], stop)
        tasks.append(_Range(store.path, start, stop, runs[a:b], listed))
    sizes = [task.stop - task.start for task in tasks]
    sums = reduce(ExpressionSums.add, runner.run(_sum_range, tasks, weights=sizes, label="reading cells"))
    # Zarr reads a chunk whose file is gone as zeros, but a store keeps positive values only.
    if int(sums.expressed.sum()) != store.n_values:
        raise UserError(f"{store.path}: values are missing; run preprocess again with --force")
    return sums


def _sum_range(task: _Range) -> ExpressionSums:
    store = Store(task.store)
    reader, genes = RowReader(store), store.n_genes
    sums = ExpressionSums(np.zeros(genes), np.zeros(genes), np.zeros(genes, np.int64))
    codes, place = np.unique(task.runs[:, 1], return_inverse=True)
    listed = np.zeros(genes, np.bool_) if task.listed is None else task.listed
    of_all, of_list = (np.zeros((len(codes), genes + 1), np.int64) for _ in range(2))
    for start in range(task.start, task.stop, _ROWS_PER_BLOCK):
        stop = min(start + _ROWS_PER_BLOCK, task.stop)
        block = reader.stretch(start, stop)
        group = place[np.searchsorted(task.runs[:, 0], np.arange(start, stop), "right") - 1]
        add_block(
            block.indptr, block.indices, block.data, group, listed,
            sums.total, sums.squares, sums.expressed, of_all, of_list,
        )  # fmt: skip
    depth = reader.depth(task.start, task.stop)
    sums.depth_total = float(depth.sum(dtype=np.float64))
    sums.depth_range = float(depth.min()), float(depth.max())
    bits, counts = np.unique(depth.view(np.uint32) >> np.uint32(16), return_counts=True)
    sums.depth_bits = dict(zip(bits.tolist(), counts.tolist(), strict=True))
    sums.genes = dict(zip(codes.tolist(), of_all, strict=True))
    if task.listed is not None:
        sums.listed = dict(zip(codes.tolist(), of_list, strict=True))
    return sums


@kernel
def add_block(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    group: np.ndarray,
    listed: np.ndarray,
    total: np.ndarray,
    squares: np.ndarray,
    expressed: np.ndarray,
    of_all: np.ndarray,
    of_list: np.ndarray,
) -> None:
    """Add rows to the sums by gene and to the histograms of their cell types."""
    for i in range(len(indptr) - 1):
        positive, in_list = 0, 0
        for k in range(indptr[i], indptr[i + 1]):
            value = np.float64(data[k])
            if value > 0:
                j = indices[k]
                total[j] += value
                squares[j] += value * value
                expressed[j] += 1
                positive += 1
                in_list += listed[j]
        of_all[group[i], positive] += 1
        of_list[group[i], in_list] += 1


@dataclass(frozen=True)
class _Refinement:
    store: Path
    start: int
    stop: int
    keys: tuple[int, ...]
    edges: np.ndarray


def describe_depth(
    store: Store, runner: TaskRunner, sums: ExpressionSums, num_bins: int
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Return exact quantiles and the mean of the depth, and its histogram (counts [bins], edges [bins + 1])."""
    keys = sorted(sums.depth_bits)
    ends = np.cumsum([sums.depth_bits[key] for key in keys])
    ranks = sorted({rank for q in QUANTILES.values() for rank in _ranks(q, store.n_cells)})
    wanted = tuple(sorted({keys[int(np.searchsorted(ends, rank, "right"))] for rank in ranks}))
    edges = np.histogram_bin_edges(np.array(sums.depth_range), num_bins)
    depths_of_key, histogram = _refine(store, runner, wanted, edges)
    at_rank = {}
    for rank in ranks:
        place = int(np.searchsorted(ends, rank, "right"))
        values, counts = depths_of_key[keys[place]]
        before = int(ends[place - 1]) if place else 0
        at_rank[rank] = float(values[np.searchsorted(np.cumsum(counts), rank - before, "right")])
    described = {name: _between(at_rank, q, store.n_cells) for name, q in QUANTILES.items()}
    return {**described, "mean": sums.depth_total / store.n_cells}, histogram, edges


def _refine(
    store: Store, runner: TaskRunner, keys: tuple[int, ...], edges: np.ndarray
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Return the depths that begin with each of ``keys`` and how many cells have each; and the cells by bin."""
    tasks = [
        _Refinement(store.path, start, min(start + ROWS_PER_TASK, store.n_cells), keys, edges)
        for start in range(0, store.n_cells, ROWS_PER_TASK)
    ]
    sizes = [task.stop - task.start for task in tasks]
    total: dict[int, dict[float, int]] = {key: {} for key in keys}
    histogram = np.zeros(len(edges) - 1, np.int64)
    for counts_of_key, bins in runner.run(_refine_range, tasks, weights=sizes, label="reading depths"):
        histogram += bins
        for key, counts in counts_of_key.items():
            for value, count in counts.items():
                total[key][value] = total[key].get(value, 0) + count
    tables = {}
    for key, counts in total.items():
        values = np.array(sorted(counts))
        tables[key] = values, np.array([counts[v] for v in values.tolist()], np.int64)
    return tables, histogram


def _refine_range(task: _Refinement) -> tuple[Mapping[int, Mapping[float, int]], np.ndarray]:
    depth = RowReader(Store(task.store)).depth(task.start, task.stop)
    bits = depth.view(np.uint32) >> np.uint32(16)
    counts_of_key = {}
    for key in task.keys:
        values, counts = np.unique(depth[bits == key], return_counts=True)
        counts_of_key[key] = dict(zip(values.astype(np.float64).tolist(), counts.tolist(), strict=True))
    return counts_of_key, np.histogram(depth, task.edges)[0]


def _ranks(quantile: float, total: int) -> tuple[int, int]:
    """Return the ranks (from 0) between which numpy's quantile of ``total`` values is interpolated."""
    place = quantile * (total - 1)
    return int(np.floor(place)), int(np.ceil(place))


def _between(at_rank: Mapping[int, float], quantile: float, total: int) -> float:
    low, high = _ranks(quantile, total)
    share = quantile * (total - 1) - low
    return at_rank[low] + (at_rank[high] - at_rank[low]) * share


def describe_histogram(counts: np.ndarray) -> dict[str, float]:
    """Return quantiles (as `numpy.quantile`) and mean of integers 0, 1, … of which there are ``counts`` [n]."""
    total, ends = int(counts.sum()), np.cumsum(counts)
    ranks = {rank for q in QUANTILES.values() for rank in _ranks(q, total)}
    at_rank = {rank: float(np.searchsorted(ends, rank, "right")) for rank in ranks}
    described = {name: _between(at_rank, q, total) for name, q in QUANTILES.items()}
    return {**described, "mean": float(np.arange(len(counts)) @ counts) / total}
