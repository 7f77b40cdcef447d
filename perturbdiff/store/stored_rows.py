"""Where the rows of a store lie: row pointers at four bytes a cell, and rows found in decoded chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zarr

from perturbdiff.runtime.errors import UserError
from perturbdiff.store import row_kernels
from perturbdiff.store.zarr_shards import ShardedReader

CACHE_BYTES = 256 << 20
"""Decoded chunks that a store keeps: far more than a step needs, so that small sets share what they read."""
_POINTERS_PER_READ = 1 << 20
_BATCHES = 4  # a reader holds at most this fraction of the cache, so that several can go on

_AWAITED, _READY, _FAILED = 0, 1, 2

Decode = Callable[[Sequence[int], Sequence[int]], None]
"""Decodes chunks (numbers, ascending) into slots of the cache."""


class ChunkCache:
    """Slots for decoded chunks: their column numbers and values.

    Parameters
    ----------
    chunks
        Chunks there are.
    length
        Values in the largest chunk.
    index_dtype, dtype
        Of column numbers and values.
    budget
        Bytes that the slots may take together.
    fewest
        Slots that there are whatever the budget.

    Attributes
    ----------
    indices, data
        [slots, length].
    slot_of
        int32 [chunks]: the slot of each chunk, -1 if it has none.
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

        A chunk that another thread is decoding is waited for.
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
            self._fill(failed, decode)  # the thread that was to do it could not: find out why
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
        """Decode chunks into their slots and tell who waits for them."""
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
    """Rows of a request as stretches of flat arrays; see `row_kernels`.

    Attributes
    ----------
    begin, size, row
        int64 [pieces]: first value, number of values, and the row of the request.
    indices, data
        Column numbers and values, flat.
    """

    begin: np.ndarray
    size: np.ndarray
    row: np.ndarray
    indices: np.ndarray
    data: np.ndarray


class RowPointers:
    """Place of each row's values within its part.

    Parameters
    ----------
    parts
        Folders of the parts.
    edges
        int64 [parts + 1]: first row of each part, and the number of rows.
    num_values
        Values in all parts together, which is checked.
    places
        What another one of the same store read; by default it is read here.

    Attributes
    ----------
    places
        `dtype_for` [rows + parts]: place of each row's first value within its part, and after a part's rows the end.
    base
        int64 [parts + 1]: values before each part.

    Raises
    ------
    UserError
        If the pointers of a part are damaged.
    """

    def __init__(
        self, parts: Sequence[Path], edges: np.ndarray, num_values: int, places: np.ndarray | None = None
    ) -> None:
        self._edges = edges
        if places is None:
            places = np.empty(int(edges[-1]) + len(parts), self.dtype_for(num_values))
            for p, path in enumerate(parts):
                _read_pointers(path, places[int(edges[p]) + p : int(edges[p + 1]) + p + 1], num_values)
        self.places = places
        self.base = np.cumsum([0, *places[edges[1:] + np.arange(len(parts))].astype(np.int64)])
        if self.base[-1] != num_values:
            raise _damaged(parts[0].parent)

    @staticmethod
    def dtype_for(num_values: int) -> np.dtype:
        """Return the type of the places in a store of so many values."""
        return np.dtype(np.uint32 if num_values <= np.iinfo(np.uint32).max else np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.places.nbytes

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each row's part, and where its values start and stop within the part, int64 [n]."""
        if len(self._edges) == 2:
            part = np.zeros(len(rows), np.int64)
        else:
            part = np.searchsorted(self._edges, rows, "right") - 1
        places = rows + part
        return part, self.places[places].astype(np.int64), self.places[places + 1].astype(np.int64)

    def flat(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where rows start among the values of all parts end to end, and their lengths, int64 [n]."""
        part, starts, stops = self.find(rows)
        return starts + self.base[part], stops - starts

    def occupied(self, start: int, stop: int) -> np.ndarray:
        """Return which of the rows ``start`` to ``stop`` have values."""
        _, begin, end = self.find(np.arange(start, stop))
        return end > begin


def _read_pointers(part: Path, places: np.ndarray, most: int) -> None:
    stored = zarr.open_array(part / "X" / "indptr", mode="r")
    if stored.shape != places.shape:
        raise _damaged(part)
    before = 0
    for start in range(0, len(places), _POINTERS_PER_READ):
        piece = np.asarray(stored[start : start + _POINTERS_PER_READ], np.int64)
        if piece[0] < before or (np.diff(piece) < 0).any() or piece[-1] > most:
            raise _damaged(part)
        places[start : start + len(piece)] = piece
        before = int(piece[-1])


def _damaged(path: Path) -> UserError:
    return UserError(f"{path}: row pointers are damaged; run preprocess again with --force")


class RowsOnDisk:
    """Rows of the parts' matrices, found in decoded chunks.

    Every chunk that a request touches is read once; successive chunks are one read of the file.

    Parameters
    ----------
    parts
        Folders of the parts.
    pointers
        Of their rows.
    num_genes
        Columns; a larger column number is damage.
    """

    def __init__(self, parts: Sequence[Path], pointers: RowPointers, num_genes: int) -> None:
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
            budget=CACHE_BYTES, fewest=_BATCHES * longest_row,
        )  # fmt: skip
        self._limit = max(len(self.cache) // _BATCHES, min(longest_row, len(self.cache)))

    def pieces(self, rows: np.ndarray) -> Iterator[Pieces]:
        """Yield the pieces of ``rows`` in batches; each is valid until the next one is asked for."""
        request = np.arange(len(rows))
        if len(rows) > 1 and (np.diff(rows) < 0).any():
            request = np.argsort(rows, kind="stable")
            rows = rows[request]
        part, starts, stops = self._pointers.find(rows)
        chunk = self._chunk[part]
        touched = np.where(stops > starts, (stops - 1) // chunk - starts // chunk + 1, 1)
        numbers = np.empty(int(touched.sum()), np.int64)
        cuts = np.empty((len(rows) + 1, 2), np.int64)
        batches = row_kernels.plan_chunks(
            starts, stops, part, self._chunk, self._base, self._limit, numbers, cuts
        )
        row, number = 0, 0
        for last_row, last_number in cuts[:batches].tolist():
            wanted, here = numbers[number:last_number], slice(row, last_row)
            # in the order of the request: writing in order pays more than reading in order
            turn = row + np.argsort(request[here])
            with self.cache.lent(wanted, self._decode):
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
                own, here, chunk = [n - base for n in numbers[first:last]], slots[first:last], indices.chunk
                columns = [self.cache.indices[slot, :chunk] for slot in here]
                indices.decode(own, columns)
                data.decode(own, [self.cache.data[slot, :chunk] for slot in here])
                self._check(columns, own, indices)
            first = last

    def _check(self, columns: Sequence[np.ndarray], numbers: Sequence[int], reader: ShardedReader) -> None:
        """Refuse column numbers that are none: the compiled loops would write beyond the end."""
        for number, found in zip(numbers, columns, strict=True):
            used = found[: max(reader.length - number * reader.chunk, 0)]
            if len(used) and used.view(f"u{used.itemsize}").max() >= self._genes:
                raise UserError(
                    f"{reader.path}: is damaged (a column number is too large); run preprocess again with --force"
                )
