"""The values of a set of cells, gene by gene in rising order: all that a rank test needs of them.

Values are log1p, never negative: what a sparse matrix does not store is the smallest value. The bit patterns of
positive floating-point numbers are in the order of the numbers, so the compiled loops sort and compare whole
numbers, which needs no branches. None of the loops holds the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.compiled import kernel

New = Callable[[int, np.dtype], np.ndarray]
"""Makes an array of a length and a type, for instance `perturbdiff.runtime.large_arrays.ScratchArrays.empty`."""

_RUN = 64  # values sorted by counting before runs are merged


@kernel
def _count(data: np.ndarray, indices: np.ndarray, counts: np.ndarray) -> bool:
    """Add the number of non-zero values of each gene to ``counts``; return whether all are at least 0."""
    sound = True
    for i in range(indices.size):
        counts[indices[i]] += data[i] != 0
        sound &= data[i] >= 0  # NaN is not
    return sound


@kernel
def _scatter(data: np.ndarray, indices: np.ndarray, place: np.ndarray, out: np.ndarray) -> None:
    """Write each non-zero value to its gene's next place in ``out``: columns of a CSR matrix, rows forgotten."""
    for i in range(indices.size):
        if data[i] != 0:
            out[place[indices[i]]] = data[i]
            place[indices[i]] += 1


@kernel
def _merge(
    source: np.ndarray,
    start: int,
    middle: int,
    other: np.ndarray,
    first: int,
    last: int,
    out: np.ndarray,
    at: int,
) -> None:
    """Write the sorted ``source[start:middle]`` and ``other[first:last]`` as one to ``out`` from ``at`` on."""
    while start < middle and first < last:
        a, b = source[start], other[first]
        later = b < a
        out[at] = b if later else a
        first += later
        start += not later
        at += 1
    while start < middle:
        out[at] = source[start]
        start += 1
        at += 1
    while first < last:
        out[at] = other[first]
        first += 1
        at += 1


@kernel
def _sort_run(keys: np.ndarray, taken: np.ndarray, out: np.ndarray) -> None:
    """Sort a few keys in place: each goes where as many lie below it, which the processor counts by the dozen."""
    taken[: keys.size] = 0
    for i in range(keys.size):
        key, below = keys[i], np.int32(0)
        for j in range(keys.size):
            below += np.int32(keys[j] < key)
        out[below + taken[below]] = key  # equal keys one after the other
        taken[below] += np.int32(1)
    keys[:] = out[: keys.size]


@kernel
def _sort(keys: np.ndarray, taken: np.ndarray, scratch: np.ndarray) -> None:
    """Sort ``keys`` in place: short runs first, then merged two by two."""
    n, width = keys.size, _RUN
    for run in range(0, n, _RUN):
        _sort_run(keys[run : run + _RUN], taken, scratch)
    while width < n:
        scratch[:n] = keys
        for left in range(0, n, 2 * width):
            middle = min(left + width, n)
            _merge(scratch, left, middle, scratch, middle, min(middle + width, n), keys, left)
        width *= 2


@kernel
def _sort_columns(keys: np.ndarray, starts: np.ndarray) -> None:
    """Sort each column in place."""
    longest = 0
    for gene in range(starts.size - 1):
        longest = max(longest, starts[gene + 1] - starts[gene])
    scratch, taken = np.empty(max(longest, _RUN), keys.dtype), np.zeros(_RUN, np.int32)
    for gene in range(starts.size - 1):
        _sort(keys[starts[gene] : starts[gene + 1]], taken, scratch)


@kernel
def _summarise(
    keys: np.ndarray, values: np.ndarray, starts: np.ndarray, ties: np.ndarray, sums: np.ndarray
) -> None:
    """Note each sorted column's sum and Σ(t³ − t) over its runs of equal values."""
    for gene in range(starts.size - 1):
        stop = starts[gene + 1]
        run, total, added = 1, 0.0, 0.0
        for i in range(starts[gene], stop):
            added += values[i]
            if i + 1 < stop and keys[i + 1] == keys[i]:
                run += 1
            elif run > 1:
                total += float(run) ** 3 - run
                run = 1
        ties[gene], sums[gene] = total, added


@kernel
def _join(
    first: np.ndarray,
    first_starts: np.ndarray,
    second: np.ndarray,
    second_starts: np.ndarray,
    out: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Merge two sets of sorted columns."""
    for gene in range(starts.size - 1):
        _merge(
            first,
            first_starts[gene],
            first_starts[gene + 1],
            second,
            second_starts[gene],
            second_starts[gene + 1],
            out,
            starts[gene],
        )


@dataclass(frozen=True)
class Columns:
    """The non-zero values of each gene in rising order.

    Attributes
    ----------
    values
        Those of gene g are ``values[starts[g]:starts[g + 1]]``; log1p, float32 or float64.
    starts
        int64 [G + 1].
    ties
        Σ(t³ − t) over the runs of equal values of each gene, zeros left out, float64 [G].
    mean
        Mean over all cells, float64 [G]. Neither it nor the values depend on the order of the cells.
    num_cells
        Number of cells.
    """

    values: np.ndarray
    starts: np.ndarray
    ties: np.ndarray
    mean: np.ndarray
    num_cells: int

    @property
    def keys(self) -> np.ndarray:
        """The values' bit patterns, whole numbers in the same order."""
        return _keys(self.values)

    @classmethod
    def of(cls, blocks: Sequence[Sparse], new: New = np.empty) -> Columns:
        """Sort the values of cells, sparse log1p [cells, G] in one or several parts, into an array that ``new`` makes.

        Raises
        ------
        ValueError
            If there is no cell, or a value is negative or not a number.
        """
        if not sum(block.shape[0] for block in blocks):
            raise ValueError("a rank test needs at least one cell on either side")
        blocks = [_plain(block) for block in blocks]
        lengths = np.zeros(blocks[0].shape[1], np.int64)
        for block in blocks:
            count_values(block, lengths)
        return cls._sorted(blocks, lengths, np.result_type(*(b.dtype for b in blocks)), new)

    @classmethod
    def streamed(cls, blocks: Iterable[Sparse], lengths: np.ndarray, dtype: type[np.floating]) -> Columns:
        """Do the same for blocks that come one after the other and were counted before.

        Parameters
        ----------
        blocks
            As for `of`; at least one cell.
        lengths
            Non-zero values of each gene in all of them, int64 [G]; `count_values` finds them.
        dtype
            Type of the values.

        Raises
        ------
        ValueError
            If a value is negative or not a number, or there are other values than were counted.
        """
        return cls._sorted(_as_counted(blocks, lengths), lengths, np.dtype(dtype), np.empty)

    @classmethod
    def _sorted(cls, blocks: Iterable[Sparse], lengths: np.ndarray, dtype: np.dtype, new: New) -> Columns:
        starts, num_cells = _starts(lengths), 0
        values, place = new(int(starts[-1]), dtype), starts[:-1].copy()
        for block in blocks:
            _scatter(block.data, block.indices, place, values)
            num_cells += block.shape[0]
        _sort_columns(_keys(values), starts)
        return cls._summarised(values, starts, num_cells)

    @classmethod
    def joined(cls, parts: Sequence[Columns], new: New = np.empty) -> Columns:
        """Return the columns of the cells of all ``parts`` together: equal to sorting them all, but faster.

        ``new`` makes the arrays.
        """
        if len(parts) == 1:
            return parts[0]
        dtype = np.result_type(*(part.values.dtype for part in parts))
        pending = [(part.values.astype(dtype, copy=False), part.starts) for part in parts]
        while len(pending) > 1:  # neighbours two by two, so that a value is copied log2(parts) times
            pairs = [pending[i : i + 2] for i in range(0, len(pending), 2)]
            pending = [_joined(*pair, new) if len(pair) == 2 else pair[0] for pair in pairs]
        values, starts = pending[0]
        return cls._summarised(values, starts, sum(part.num_cells for part in parts))

    @classmethod
    def _summarised(cls, values: np.ndarray, starts: np.ndarray, num_cells: int) -> Columns:
        ties, sums = np.zeros(len(starts) - 1), np.zeros(len(starts) - 1)
        _summarise(_keys(values), values, starts, ties, sums)
        return cls(values, starts, ties, sums / num_cells, num_cells)

    def astype(self, dtype: np.dtype) -> Columns:
        """Return the same columns with values of another, wider type."""
        if self.values.dtype == dtype:
            return self
        return Columns(self.values.astype(dtype), self.starts, self.ties, self.mean, self.num_cells)


def count_values(block: Sparse, lengths: np.ndarray) -> None:
    """Add the number of non-zero values of each gene, canonical CSR [cells, G], to ``lengths`` (int64 [G]).

    Raises
    ------
    ValueError
        If a value is negative or not a number.
    """
    if not _count(block.data, block.indices, lengths):
        raise ValueError("negative values or NaN: a rank test needs log1p values, at least 0")


def _as_counted(blocks: Iterable[Sparse], lengths: np.ndarray) -> Iterator[Sparse]:
    """Yield blocks that have no more values than were counted: more would be written beyond the array's end."""
    seen = np.zeros_like(lengths)
    for block in blocks:
        plain = _plain(block)
        count_values(plain, seen)
        if (seen > lengths).any():
            raise ValueError("the cells have other values than when they were counted")
        yield plain
    if (seen < lengths).any():
        raise ValueError("the cells have other values than when they were counted")


def _joined(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray], new: New
) -> tuple[np.ndarray, np.ndarray]:
    starts = first[1] + second[1]
    values = new(int(starts[-1]), first[0].dtype)
    _join(_keys(first[0]), first[1], _keys(second[0]), second[1], _keys(values), starts)
    return values, starts


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _keys(values: np.ndarray) -> np.ndarray:
    return values.view(np.int32 if values.dtype == np.float32 else np.int64)


def _plain(block: Sparse) -> Sparse:
    """Return ``block`` as CSR without repeated entries, of float32 or float64."""
    if not (sp.issparse(block) and block.format == "csr"):
        block = sp.csr_matrix(block)
    if not block.has_canonical_format:
        block = block.copy()
        block.sum_duplicates()
    if block.dtype in (np.float32, np.float64):
        return block
    return block.astype(np.float32 if block.dtype == np.float16 else np.float64)
