"""Exact medians by group of values that come in pieces, from counts of equal values instead of the values."""

from __future__ import annotations

import itertools

import numpy as np

_MOST_WAITING = 400_000  # 16 bytes each


class StreamingMedian:
    """How often each value occurs in each group; memory follows the number of different values.

    Values are non-negative float32 numbers: their bit patterns are in the same order as they.
    """

    def __init__(self) -> None:
        self._keys: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []

    def add(self, group: np.ndarray, values: np.ndarray) -> None:
        """Count ``values`` (float32 [n], not negative), each in its ``group`` (int [n], 0 or more)."""
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        key = (group.astype(np.uint64) << np.uint64(32)) | bits
        keys, counts = np.unique(key, return_counts=True)
        self._keys.append(keys)
        self._counts.append(counts)
        if sum(map(len, self._keys)) > _MOST_WAITING:
            self._merge()

    def _merge(self) -> tuple[np.ndarray, np.ndarray]:
        every = np.concatenate([np.empty(0, np.uint64), *self._keys])
        keys, place = np.unique(every, return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, place, np.concatenate([np.empty(0, np.int64), *self._counts]))
        self._keys, self._counts = [keys], [counts]
        return keys, counts

    def medians(self, num_groups: int) -> np.ndarray:
        """Return the median of each group, float64 [num_groups]; nan for one without values."""
        keys, counts = self._merge()
        edges = np.searchsorted(keys, np.arange(num_groups + 1, dtype=np.uint64) << np.uint64(32))
        values = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
        return np.array(
            [_median(values[a:b], counts[a:b]) for a, b in itertools.pairwise(edges)],
            np.float64,
        )


def _median(values: np.ndarray, counts: np.ndarray) -> float:
    """Return the median of ascending ``values`` that occur ``counts`` times, computed as numpy does for float32."""
    if not len(values):
        return float("nan")
    ends = np.cumsum(counts)
    middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], "right")
    return float(np.mean(values[middle]))
