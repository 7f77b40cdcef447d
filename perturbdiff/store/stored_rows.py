"""Finds the rows of a store: row pointers of four bytes per cell, and rows in decoded chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zarr

from perturbdiff.io.damage import explain_damage
from perturbdiff.runtime.errors import UserError
from perturbdiff.store import row_kernels
from perturbdiff.store.row_blocks import RowBlocks
from perturbdiff.store.zarr_shards import ShardedReader

CACHE_BYTES = 256 << 20
"""Size of the decoded chunks that a store keeps. It is far more than a step needs, so that small sets share chunks."""
_AGAIN = "run preprocess again with --force"
_READERS = 4  # one reader uses at most 1/4 of the cache, so that several can work at once

_AWAITED, _READY, _FAILED = 0, 1, 2  # states of a slot

Decode = Callable[[Sequence[int], Sequence[int]], None]
"""Decodes chunks (numbers, ascending) into slots of the cache."""


class ChunkCache:
    """Slots for decoded chunks: their column numbers and values.

    Parameters
    ----------
    chunks
        Number of chunks.
    length
        Number of values in the largest chunk.
    index_dtype, dtype
        Types of column numbers and values.
    budget
        Bytes that all slots may take together.
    fewest
        Minimum number of slots, whatever the budget.

    Attributes
    ----------
    indices, data
        [slots, length].
    slot_of
        int32 [chunks]: the slot of each chunk, or -1 if it has none.
    """

    def __init__(
        self,
        chunks: int,
        length: int,
        index_dtype: np.dtype,
        dtype: np.dtype,
        *,
        budget: int,
        fewest: int,
    ) -> None:
        size = length * (index_dtype.itemsize + dtype.itemsize)
        slots = max(min(chunks, max(fewest, budget // max(size, 1))), 1)
        self.indices, self.data = np.empty((slots, length), index_dtype), np.empty((slots, length), dtype)
        self.slot_of = np.full(chunks, -1, np.int32)
        self._owner = np.full(slots, -1, np.int64)
        self._pins = np.zeros(slots, np.int32)
        self._used = np.zeros(slots, bool)
        self._state = np.full(slots, _FAILED, np.uint8)
        self._hand = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._owner)

    @contextmanager
    def lent(self, numbers: np.ndarray, decode: Decode) -> Iterator[None]:
        """Keep these chunks (ascending, at most a quarter of the slots) in their slots while the block runs.

        If another thread is decoding a chunk, this thread waits for it.
        """
        absent = np.empty(len(numbers), np.int64)
        with self._changed:
            while (count := self._take(numbers, absent)) < 0:
                self._changed.wait()
            slots, absent = self.slot_of[numbers], absent[:count]
            self._state[self.slot_of[absent]] = _AWAITED
        try:
            self._fill(absent, decode)
            with self._changed:
                self._changed.wait_for(lambda: not (self._state[slots] == _AWAITED).any())
                failed = numbers[self._state[slots] == _FAILED]
            self._fill(failed, decode)  # another thread failed: decode again, to raise the error here too
            yield
        finally:
            with self._changed:
                self._pins[slots] -= 1
                self._changed.notify_all()

    def _take(self, numbers: np.ndarray, absent: np.ndarray) -> int:
        self._hand, count = row_kernels.take_slots(
            numbers, self.slot_of, self._owner, self._pins, self._used, self._hand, absent
        )
        return count

    def _fill(self, numbers: np.ndarray, decode: Decode) -> None:
        """Decode chunks into their slots, and wake the threads that wait for them."""
        if not len(numbers):
            return
        slots, state = self.slot_of[numbers], _FAILED
        try:
            decode(numbers.tolist(), slots.tolist())
            state = _READY
        finally:
            with self._changed:
                self._state[slots] = state
                self._changed.notify_all()


class Pieces(NamedTuple):
    """Requested rows as pieces of flat arrays (see `row_kernels`).

    Attributes
    ----------
    begin, size, row
        int64 [pieces]: position of the first value, number of values, and the row in the request.
    indices, data
        Flat arrays of column numbers and values.
    """

    begin: np.ndarray
    size: np.ndarray
    row: np.ndarray
    indices: np.ndarray
    data: np.ndarray


class RowPointers:
    """Position of each row's values within its partition, read where they are asked for.

    Parameters
    ----------
    parts
        Folders of the partitions.
    edges
        int64 [parts + 1]: first row of each partition, and the number of rows.
    num_values
        Number of values in all partitions together, which is checked.
    places
        Positions that another object has read from the same store. By default, they are read from ``parts``.

    Attributes
    ----------
    base
        int64 [parts + 1]: number of values before each partition.

    Raises
    ------
    UserError
        If the pointers of a partition are damaged; for most rows when they are asked for.
    """

    def __init__(
        self, parts: Sequence[Path], edges: np.ndarray, num_values: int, places: np.ndarray | None = None
    ) -> None:
        self._parts, self._edges, self._most = parts, edges, num_values
        self._first = edges[:-1] + np.arange(len(parts))  # where the places of a partition begin
        if places is None:
            self._stored = [zarr.open_array(part / "X" / "indptr", mode="r") for part in parts]
            if [stored.shape for stored in self._stored] != [(n + 1,) for n in np.diff(edges).tolist()]:
                raise _damaged(parts[0].parent)
            number = int(edges[-1]) + len(parts)
            self._blocks = RowBlocks(number, self.dtype_for(num_values), self._read)
            ends = np.array([stored[-1] for stored in self._stored], np.int64)
        else:
            self._blocks = RowBlocks.held(places)
            ends = places[edges[1:] + np.arange(len(parts))].astype(np.int64)
        self.base = np.cumsum([0, *ends])
        if self.base[-1] != num_values:
            raise _damaged(parts[0].parent)

    def _read(self, start: int, stop: int, out: np.ndarray) -> None:
        """Read the places ``start`` to ``stop``."""
        for part, stored, first in zip(self._parts, self._stored, self._first.tolist(), strict=True):
            low, high = max(start - first, 0), min(stop - first, stored.shape[0])
            if low >= high:
                continue
            with explain_damage(part, _AGAIN):
                # with the next place, so that the order is known across blocks
                piece = np.asarray(stored[low : min(high + 1, stored.shape[0])], np.int64)
            if piece[0] < 0 or (np.diff(piece) < 0).any() or piece[-1] > self._most:
                raise _damaged(part)
            out[first + low - start : first + high - start] = piece[: high - low]

    @staticmethod
    def dtype_for(num_values: int) -> np.dtype:
        """Return the type of positions in a store with this number of values."""
        return np.dtype(np.uint32 if num_values <= np.iinfo(np.uint32).max else np.uint64)

    @property
    def places(self) -> np.ndarray:
        """Position of each row's first value in its partition, `dtype_for` [rows + parts].

        The rows of a partition are followed by the end of its last row.
        """
        return self._blocks.every

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the partition of each row, and the start and end of its values in the partition, int64 [n]."""
        if len(self._edges) == 2:
            part = np.zeros(len(rows), np.int64)
        else:
            part = np.searchsorted(self._edges, rows, "right") - 1
        places = rows + part
        begin, end = self._blocks.at(places), self._blocks.at(places + 1)
        return part, begin.astype(np.int64), end.astype(np.int64)

    def flat(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts of rows in the concatenated values of all partitions, and their lengths, int64 [n]."""
        part, starts, stops = self.find(rows)
        return starts + self.base[part], stops - starts

    def occupied(self, start: int, stop: int) -> np.ndarray:
        """Return whether each of the rows ``start`` to ``stop`` has values, bool [n]."""
        _, begin, end = self.find(np.arange(start, stop))
        return end > begin


def _damaged(path: Path) -> UserError:
    return UserError(f"{path}: row pointers are damaged; {_AGAIN}")


class RowsOnDisk:
    """Reads rows of the partitions' matrices by decoding chunks.

    Every chunk that holds requested rows is read once. Successive chunks need one read of the file.

    Parameters
    ----------
    parts
        Folders of the partitions.
    pointers
        Positions of their rows.
    num_genes
        Number of columns. A larger column number means that the store is damaged.
    cache
        Bytes of decoded chunks that are kept.
    """

    def __init__(self, parts: Sequence[Path], pointers: RowPointers, num_genes: int, cache: int) -> None:
        self._pointers, self._genes = pointers, num_genes
        self._readers = [
            (ShardedReader(path / "X" / "indices"), ShardedReader(path / "X" / "data")) for path in parts
        ]
        for (indices, data), path in zip(self._readers, parts, strict=True):
            if (indices.chunk, indices.length) != (data.chunk, data.length):
                raise UserError(
                    f"{path}: column numbers and values do not fit together; run preprocess again with --force"
                )
        self._chunk = np.array([indices.chunk for indices, _ in self._readers], np.int64)
        self._base = np.cumsum([0, *(indices.num_chunks for indices, _ in self._readers)])
        longest_row = -(-num_genes // int(self._chunk.min())) + 1
        indices, data = self._readers[0]
        self.cache = ChunkCache(
            int(self._base[-1]), int(self._chunk.max()), indices.dtype, data.dtype,
            budget=cache, fewest=_READERS * longest_row,
        )  # fmt: skip
        self._limit = max(len(self.cache) // _READERS, min(longest_row, len(self.cache)))

    def pieces(self, rows: np.ndarray) -> Iterator[Pieces]:
        """Yield the pieces of ``rows`` in groups. Each group is valid until the next one is requested."""
        request = np.arange(len(rows))
        if len(rows) > 1 and (np.diff(rows) < 0).any():
            request = np.argsort(rows, kind="stable")
            rows = rows[request]
        part, starts, stops = self._pointers.find(rows)
        chunk = self._chunk[part]
        touched = np.where(stops > starts, (stops - 1) // chunk - starts // chunk + 1, 1)
        numbers = np.empty(int(touched.sum()), np.int64)
        cuts = np.empty((len(rows) + 1, 2), np.int64)
        groups = row_kernels.plan_chunks(
            starts, stops, part, self._chunk, self._base, self._limit, numbers, cuts
        )
        row, number = 0, 0
        for last_row, last_number in cuts[:groups].tolist():
            here = slice(row, last_row)
            # in the order of the request: writing in order saves more time than reading in order
            turn = row + np.argsort(request[here])
            with self.cache.lent(numbers[number:last_number], self._decode):
                yield self._cut(
                    starts[turn], stops[turn], part[turn], request[turn], int(touched[here].sum())
                )
            row, number = last_row, last_number

    def _cut(
        self, starts: np.ndarray, stops: np.ndarray, part: np.ndarray, request: np.ndarray, most: int
    ) -> Pieces:
        cache = self.cache
        begin, size, row = (np.empty(most, np.int64) for _ in range(3))
        count = row_kernels.cut_into_pieces(
            starts, stops, part, request, self._chunk, self._base,
            cache.slot_of, cache.indices.shape[1], begin, size, row,
        )  # fmt: skip
        return Pieces(
            begin[:count], size[:count], row[:count], cache.indices.reshape(-1), cache.data.reshape(-1)
        )

    def _decode(self, numbers: Sequence[int], slots: Sequence[int]) -> None:
        first = 0
        for part, (indices, data) in enumerate(self._readers):
            base, end = int(self._base[part]), int(self._base[part + 1])
            last = first
            while last < len(numbers) and numbers[last] < end:
                last += 1
            if last > first:
                local, here, chunk = [n - base for n in numbers[first:last]], slots[first:last], indices.chunk
                columns = [self.cache.indices[slot, :chunk] for slot in here]
                indices.decode(local, columns)
                data.decode(local, [self.cache.data[slot, :chunk] for slot in here])
                self._check(columns, local, indices)
            first = last

    def _check(self, columns: Sequence[np.ndarray], numbers: Sequence[int], reader: ShardedReader) -> None:
        """Refuse column numbers that are too large, because the compiled loops would write beyond the end of a row."""
        for number, decoded in zip(numbers, columns, strict=True):
            used = decoded[: max(reader.length - number * reader.chunk, 0)]
            if len(used) and used.view(f"u{used.itemsize}").max() >= self._genes:
                raise UserError(
                    f"{reader.path}: is damaged (a column number is too large); run preprocess again with --force"
                )
