"""Predicted or real cells, indexed by condition: what an evaluation compares, whatever files they come from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import scipy.sparse as sp

from perturbdiff.conditions.condition import ALL, Condition, Group
from perturbdiff.io.columns import row_ranges
from perturbdiff.io.derived_matrices import HIGHEST
from perturbdiff.io.matrices import Sparse
from perturbdiff.method import Method
from perturbdiff.runtime.errors import UserError, listing

COVARIATES = ("cell_type", "batch")
_WHOLE = 1e-3  # largest distance of a count from a whole number
_ENOUGH = 200  # non-zero values, too many to be all whole numbers by chance

Key = TypeVar("Key", Condition, Group)


class Reader(Protocol):
    """Rows of values by number.

    Attributes
    ----------
    path
        The file or folder.
    genes
        Names of the columns.
    """

    path: Path
    genes: list[str]

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return the values [len(rows), G] as CSR in the order of ``rows``, with ascending columns."""
        ...

    def depths(self) -> np.ndarray:
        """Return the sum of each cell's values, float64 [number of cells]; the array is the caller's."""
        ...

    def cell_name(self, row: int) -> str:
        """Return the name of a cell."""
        ...


@dataclass(frozen=True)
class Cells:
    """Cells of one file or store by condition.

    Attributes
    ----------
    reader
        Where the values are.
    rows
        Row numbers (int64, ascending) of each condition that is not control.
    controls
        Row numbers of the controls of each (cell type, batch).
    contexts
        The context of each condition; empty if there are none.
    control
        Label of the control.
    covariates
        Which of ``cell_type`` and ``batch`` the data have.
    scale
        ``log1p`` or ``counts``.
    target_sum
        Depth to which cells were normalised, if the file says it.
    complete
        Whether every condition has to be predicted; a store does not say so.
    names
        ``method`` and ``dataset``, if the file says them.
    trained_on
        Predicted conditions that the model was trained on: their number and the first ones; None if not said.
    made_by
        What the file says of how its cells were made.
    depths
        With counts: the depth of each cell of the file over all genes that were measured, if the file says it
        (``uns["perturbdiff"]["depth"]`` names the column). Else it is the sum of the cell's counts.
    sets
        The number of the set of each cell of the file (int64), below 0 for a cell of none; None if it is not known
        which cells were a set.
    """

    reader: Reader
    rows: Mapping[Condition, np.ndarray]
    controls: Mapping[Group, np.ndarray]
    contexts: Mapping[Condition, str] = field(default_factory=dict)
    control: str | None = None
    covariates: frozenset[str] = frozenset()
    scale: str = "log1p"
    target_sum: float | None = None
    complete: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    trained_on: tuple[int, tuple[str, ...]] | None = None
    made_by: Method = field(default_factory=Method)
    depths: np.ndarray | None = None
    sets: np.ndarray | None = None

    def pooled_over(self, dropped: frozenset[str]) -> Cells:
        """Return the same cells without the labels of the ``dropped`` covariates.

        Conditions that are then the same become one; their contexts are those of the first.
        """
        if not dropped:
            return self
        forgotten = dict.fromkeys(dropped, ALL)

        def forget(condition: Condition) -> Condition:
            return condition._replace(**forgotten)

        def group(of: Group) -> Group:
            return Condition("", *of)._replace(**forgotten).group

        contexts = {forget(c): label for c, label in self.contexts.items()}
        several = len({(forget(c), label) for c, label in self.contexts.items()}) > len(contexts)
        return replace(
            self,
            rows=_joined(self.rows, forget),
            controls=_joined(self.controls, group),
            contexts={} if several else contexts,
            covariates=self.covariates - dropped,
        )


def single_context(contexts: list[str], condition: Condition, column: str, path: Path) -> str:
    """Return the one context of a condition.

    Raises
    ------
    UserError
        If there are several.
    """
    if len(contexts) != 1:
        raise UserError(
            f"{path}: cells of condition {condition} lie in several contexts of '{column}' "
            f"({listing(sorted(contexts))}); choose a column that is constant within a condition"
        )
    return contexts[0]


class RowRanges(Mapping[Key, np.ndarray]):
    """Rows (int64, ascending) by key where those of a key are a few ranges: made when they are asked for.

    Parameters
    ----------
    ranges
        The ranges [start, stop) of each key; no two of them share a row.
    """

    def __init__(self, ranges: Mapping[Key, list[tuple[int, int]]]) -> None:
        self._ranges = ranges

    def __getitem__(self, key: Key) -> np.ndarray:
        return np.concatenate([np.arange(*ends, dtype=np.int64) for ends in sorted(self._ranges[key])])

    def __contains__(self, key: object) -> bool:
        return key in self._ranges

    def __iter__(self) -> Iterator[Key]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def under(self, new: Callable[[Key], Key]) -> RowRanges[Key]:
        """Return the rows under other keys."""
        ranges: dict[Key, list[tuple[int, int]]] = {}
        for key, some in self._ranges.items():
            ranges.setdefault(new(key), []).extend(some)
        return RowRanges(ranges)


def _joined(rows: Mapping[Key, np.ndarray], new: Callable[[Key], Key]) -> Mapping[Key, np.ndarray]:
    """Return rows under other keys, sorted where several keys become one."""
    if isinstance(rows, RowRanges):
        return rows.under(new)
    joined: dict[Key, list[np.ndarray]] = {}
    for key, some in rows.items():
        joined.setdefault(new(key), []).append(some)
    return {k: v[0] if len(v) == 1 else np.sort(np.concatenate(v)) for k, v in joined.items()}


@dataclass
class ExpressionView:
    """Reads cells in the shared gene order and checks every value. Threads may share it.

    Attributes
    ----------
    reader
        Where the values are.
    rows
        Rows of each condition.
    columns
        Positions of the shared genes among the reader's, or None where they are the same.
    depth
        Counts are normalised to this depth and log1p-ed; None: the values are log1p.
    own_depths
        Depth of each cell of the reader, if it is known; else the sum of its counts.
    highest
        Largest log1p value seen so far.
    """

    reader: Reader
    rows: Mapping[Condition, np.ndarray]
    columns: np.ndarray | None = None
    depth: float | None = None
    own_depths: np.ndarray | None = None
    highest: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def cells(self, rows: np.ndarray) -> Sparse:
        """Return log1p values of ``rows`` over the shared genes, float32 CSR without stored zeros.

        Raises
        ------
        UserError
            If a value is negative, not finite, or no log1p value though it should be.
        """
        cells: Sparse = sp.csr_matrix(self.reader.expression(rows))
        cells = cells.astype(np.float32, copy=False)  # equal on both sides, so that equal values stay ties
        if cells.nnz:
            self._check(cells, rows)
            if self.depth is not None:
                own = None if self.own_depths is None else self.own_depths[rows]
                cells = log_normalised(cells, self.depth, own)
            highest = float(cells.data.max())
            with self._lock:
                self.highest = max(self.highest, highest)
        return cells if self.columns is None else cells[:, self.columns]

    def _check(self, cells: Sparse, rows: np.ndarray) -> None:
        low, high = float(cells.data.min()), float(cells.data.max())
        if not np.isfinite(low + high):
            place = self._place(cells, rows, ~np.isfinite(cells.data))
            raise UserError(
                f"{self.reader.path}: X has values that are not finite (first: {place}); correct or drop these cells"
            )
        if low < 0:
            place = self._place(cells, rows, cells.data < 0)
            raise UserError(
                f"{self.reader.path}: X has negative values (first: {place}); expression is at least 0, clip it there"
            )
        if self.depth is not None:
            if (wrong := np.abs(cells.data - np.rint(cells.data)) > _WHOLE).any():
                place = self._place(cells, rows, wrong)
                raise UserError(
                    f"{self.reader.path}: X has values that are not whole numbers (first: {place}), but is said to be "
                    "counts; if they are log1p of normalised counts, say so (--scale log1p, or declare it in uns)"
                )
            return
        remedy = "if these are counts, say so: --scale counts, or uns['perturbdiff']['scale'] = 'counts'"
        if high >= HIGHEST:
            place = self._place(cells, rows, cells.data >= HIGHEST)
            raise UserError(
                f"{self.reader.path}: X has values too large for log1p of normalised counts (first: {place}, at most "
                f"{HIGHEST:g}); {remedy}"
            )
        if _whole(cells.data):
            raise UserError(
                f"{self.reader.path}: X has only whole numbers, which log1p values are not; {remedy}"
            )

    def _place(self, cells: Sparse, rows: np.ndarray, wrong: np.ndarray) -> str:
        """Say value, cell and gene of the first wrong value."""
        k = int(np.argmax(wrong))
        row = int(rows[int(np.searchsorted(cells.indptr, k, "right")) - 1])
        gene = self.reader.genes[int(cells.indices[k])]
        return f"{cells.data[k]:g}, cell '{self.reader.cell_name(row)}', gene '{gene}'"


def log_normalised(counts: Sparse, depth: float, sums: np.ndarray | None = None) -> Sparse:
    """Return log1p of counts scaled to ``depth`` in each cell; a cell without counts stays zero.

    ``sums`` are the cells' depths, by default the sums of their counts.
    """
    if sums is None:
        sums = np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel()
    factor = (depth / np.where(sums > 0, sums, 1.0)).astype(np.float32)
    values = np.log1p(counts.data * np.repeat(factor, np.diff(counts.indptr)))
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def median_depth(reader: Reader) -> float:
    """Return the median of the cells' sums, those without any value left out.

    Raises
    ------
    UserError
        If no cell has a value.
    """
    sums = reader.depths()
    if not sums.max(initial=0.0) > 0:
        raise UserError(f"{reader.path}: no cell has a count; there is no depth to normalise to")
    number = 0
    for start, stop in row_ranges(len(sums)):  # in place, because there may be many cells
        some = sums[start:stop][sums[start:stop] > 0]
        sums[number : number + len(some)] = some
        number += len(some)
    return float(np.median(sums[:number], overwrite_input=True))


def _whole(values: np.ndarray) -> bool:
    """Return whether there are enough values to judge and all are whole numbers."""
    if len(values) < _ENOUGH:
        return False
    first = values[:_ENOUGH]
    return bool((first == np.rint(first)).all()) and bool((values == np.rint(values)).all())
