"""Reads chunks of a sharded one-dimensional Zarr array with few system calls.

A window of a few rows needs one read of the file. Zarr's own pipeline takes about twenty times longer for it. This
module reads only the layout that `store_writer` writes (Zarr v3 specification: ``sharding_indexed`` with its index at
the end, inner chunks compressed by Blosc, each with or without a CRC-32C). Zarr reads all other arrays.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs.blosc
import numpy as np
import zarr
from numcodecs.blosc import decompress  # type: ignore[attr-defined]

from perturbdiff.io.damage import explain_damage

_AGAIN = "run preprocess again with --force"
_OPEN_FILES = 128
_ABSENT = np.iinfo(np.uint64).max  # offset and size of a chunk that holds nothing but zeros
_CHECKSUM_BYTES = 4

# Blosc's own threads would hold the interpreter lock and share one global state. Our threads run in parallel.
numcodecs.blosc.use_threads = False  # type: ignore[attr-defined]


class ShardedReader:
    """Chunks and slices of one array. Several threads may read at once.

    Parameters
    ----------
    path
        Folder of the array.

    Attributes
    ----------
    length, dtype
        Number of values in the array, and their type.
    chunk
        Number of values in a chunk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_damage(path, _AGAIN):
            self._open(json.loads((path / "zarr.json").read_text()))
        self._files: OrderedDict[int, FileIO] = OrderedDict()
        self._indices: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def _open(self, layout: dict[str, Any]) -> None:
        self.length, self.dtype = int(layout["shape"][0]), np.dtype(layout["data_type"])
        self._direct = _is_ours(layout)
        if self._direct:
            inner = layout["codecs"][0]["configuration"]
            self.chunk = int(inner["chunk_shape"][0])
            self._shard_chunks = int(layout["chunk_grid"]["configuration"]["chunk_shape"][0]) // self.chunk
            self._summed = inner["codecs"][-1]["name"] == "crc32c"
        else:
            self._array: Any = zarr.open_array(self.path, mode="r")
            self.chunk = int(self._array.chunks[0])

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the array."""
        return -(-self.length // self.chunk)

    def decode(self, numbers: Sequence[int], targets: Sequence[np.ndarray]) -> None:
        """Write each of the chunks ``numbers`` (ascending) into its own array of ``chunk`` values.

        The values of the last chunk beyond the end of the array are undefined.

        Raises
        ------
        UserError
            If a file of the array is missing or damaged.
        """
        with explain_damage(self.path, _AGAIN):
            if self._direct:
                for first, last in self._runs(numbers):
                    self._decode_run(numbers[first], targets[first:last])
                return
            for number, target in zip(numbers, targets, strict=True):
                values = self._array[number * self.chunk : (number + 1) * self.chunk]
                target[: len(values)] = values

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """Write the elements ``start`` to ``stop`` into ``out``.

        Raises
        ------
        UserError
            If a file of the array is missing or damaged.
        """
        numbers = range(start // self.chunk, -(-stop // self.chunk)) if stop > start else range(0)
        targets, edges = [], []
        for number in numbers:
            a, b = number * self.chunk - start, (number + 1) * self.chunk - start
            inside = a >= 0 and b <= stop - start
            target = out[a:b] if inside else np.empty(self.chunk, self.dtype)
            targets.append(target)
            if not inside:
                edges.append((target, a, b))
        self.decode(numbers, targets)
        for values, a, b in edges:
            low, high = max(a, 0), min(b, stop - start)
            out[low:high] = values[low - a : high - a]

    def _runs(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the positions in ``numbers`` where runs of successive chunks of one shard begin and end."""
        first = 0
        for i in range(1, len(numbers) + 1):
            ends = (
                i == len(numbers) or numbers[i] != numbers[i - 1] + 1 or not numbers[i] % self._shard_chunks
            )
            if ends:
                yield first, i
                first = i

    def _decode_run(self, number: int, targets: Sequence[np.ndarray]) -> None:
        """Decode successive chunks of one shard from ``number`` on, by one read if they are adjacent in the file."""
        shard, first = divmod(number, self._shard_chunks)
        file, index = self._shard(shard)
        for place, source in enumerate(_packed(file, index[first : first + len(targets)])):
            if source is None:
                targets[place][:] = 0
            else:
                decompress(_checked(source) if self._summed else source, targets[place])

    def _shard(self, number: int) -> tuple[FileIO, np.ndarray]:
        """Return the open file of a shard and its index (offset and size of every chunk, uint64 [n, 2])."""
        with self._lock:
            file = self._files.pop(number, None)
            if file is None:
                file = FileIO(self.path / "c" / str(number))
            self._files[number] = file
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)  # it is closed when the last thread has finished with it
            if number not in self._indices:
                self._indices[number] = self._read_index(file)
            return file, self._indices[number]

    def _read_index(self, file: FileIO) -> np.ndarray:
        chunks, size = self._shard_chunks, os.fstat(file.fileno()).st_size
        place = size - 16 * chunks - _CHECKSUM_BYTES
        if place < 0:
            raise ValueError(f"shard {Path(str(file.name)).name} is too short")
        index = np.frombuffer(os.pread(file.fileno(), 16 * chunks, place), "<u8").reshape(chunks, 2)
        present = index[:, 0] != _ABSENT
        if (index[present].sum(axis=1) > place).any():
            raise ValueError(f"shard {Path(str(file.name)).name} is cut off")
        return index


def _packed(file: FileIO, index: np.ndarray) -> list[memoryview | None]:
    """Return the compressed bytes of consecutive chunks, by one read if they are adjacent in the file."""
    places: list[tuple[int, int]] = index.tolist()
    present = [place for place in places if place[0] != _ABSENT]
    if present and all(a + n == b for (a, n), (b, _) in pairwise(present)):
        begin, end = present[0][0], sum(present[-1])
        everything = memoryview(os.pread(file.fileno(), end - begin, begin))
        pieces = iter([everything[a - begin : a - begin + n] for a, n in present])
    else:
        pieces = iter([memoryview(os.pread(file.fileno(), n, a)) for a, n in present])
    return [None if a == _ABSENT else next(pieces) for a, _ in places]


def _checked(source: memoryview) -> memoryview:
    """Return the bytes of a chunk without the checksum at their end."""
    content, stored = source[:-_CHECKSUM_BYTES], source[-_CHECKSUM_BYTES:]
    if google_crc32c.value(np.frombuffer(content, np.uint8)) != int.from_bytes(stored, "little"):
        raise ValueError("the checksum of a chunk is wrong")
    return content


def _is_ours(layout: dict[str, Any]) -> bool:
    """Return whether an array's metadata describe the layout this module reads."""
    codecs = layout.get("codecs", [])
    if len(codecs) != 1 or codecs[0]["name"] != "sharding_indexed":
        return False
    inner = codecs[0]["configuration"]
    names = [c["name"] for c in inner["codecs"]]
    index = [c["name"] for c in inner["index_codecs"]]
    endian = inner["codecs"][0].get("configuration", {}).get("endian", "little")
    keys = layout["chunk_key_encoding"]
    return (
        len(layout["shape"]) == 1
        and names in (["bytes", "blosc"], ["bytes", "blosc", "crc32c"])
        and index == ["bytes", "crc32c"]
        and endian == "little"
        and inner.get("index_location") == "end"
        and keys["name"] == "default"
        and keys.get("configuration", {}).get("separator", "/") == "/"
        and layout["fill_value"] == 0
    )
