"""Reading slices of a sharded one-dimensional Zarr array with few system calls.

A window of a few rows is one read of the file instead of a run through zarr's whole pipeline, which costs some
twenty times more for so little. Only the layout that `store_writer` writes is read here (Zarr v3 specification:
``sharding_indexed`` with its index at the end, inner chunks compressed by Blosc); any other array is left to zarr.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs.blosc import decompress  # type: ignore[attr-defined]

from perturbdiff.errors import UserError

_OPEN_FILES = 128
_ABSENT = np.iinfo(np.uint64).max  # offset and size of a chunk that holds nothing but zeros
_CHECKSUM_BYTES = 4


class ShardedReader:
    """Slices of one array.

    Parameters
    ----------
    path
        Folder of the array.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        layout = json.loads((path / "zarr.json").read_text())
        self.length, self.dtype = int(layout["shape"][0]), np.dtype(layout["data_type"])
        self._direct = _is_ours(layout)
        if self._direct:
            self._shard = int(layout["chunk_grid"]["configuration"]["chunk_shape"][0])
            self._chunk = int(layout["codecs"][0]["configuration"]["chunk_shape"][0])
        self._files: OrderedDict[int, FileIO] = OrderedDict()
        self._indices: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """Write the elements ``start`` to ``stop`` into ``out``; several threads may read at once.

        Raises
        ------
        UserError
            If a file of the array is missing or damaged.
        """
        try:
            if self._direct:
                for number in range(start // self._shard, -(-stop // self._shard)):
                    base = number * self._shard
                    a, b = max(start, base), min(stop, base + self._shard)
                    self._read_shard(number, a - base, b - base, out[a - start : b - start])
            else:
                out[:] = zarr.open_array(self.path, mode="r")[start:stop]  # type: ignore[index]
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{self.path}: is damaged ({error}); run preprocess again with --force"
            ) from error

    def _read_shard(self, number: int, start: int, stop: int, out: np.ndarray) -> None:
        file, index = self._open(number)
        first, last = start // self._chunk, -(-stop // self._chunk)
        packed = _packed(file, index[first:last])
        for chunk, source in enumerate(packed, first):
            a, b = max(start, chunk * self._chunk), min(stop, (chunk + 1) * self._chunk)
            target = out[a - start : b - start]
            if source is None:
                target[:] = 0
            elif b - a == self._chunk:
                decompress(source, target)
            else:
                values = np.frombuffer(decompress(source), self.dtype)
                target[:] = values[a - chunk * self._chunk : b - chunk * self._chunk]

    def _open(self, number: int) -> tuple[FileIO, np.ndarray]:
        """Return a shard's open file and its index: offset and size of every chunk, uint64 [n, 2]."""
        with self._lock:
            file = self._files.pop(number, None)
            if file is None:
                file = FileIO(self.path / "c" / str(number))
            self._files[number] = file
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)  # closed when no thread holds it any more
            if number not in self._indices:
                self._indices[number] = self._read_index(file)
            return file, self._indices[number]

    def _read_index(self, file: FileIO) -> np.ndarray:
        chunks, size = self._shard // self._chunk, os.fstat(file.fileno()).st_size
        place = size - 16 * chunks - _CHECKSUM_BYTES
        if place < 0:
            raise ValueError(f"shard {Path(str(file.name)).name} is too short")
        index = np.frombuffer(os.pread(file.fileno(), 16 * chunks, place), "<u8").reshape(chunks, 2)
        present = index[:, 0] != _ABSENT
        if (index[present].sum(axis=1) > place).any():
            raise ValueError(f"shard {Path(str(file.name)).name} is cut off")
        return index


def _packed(file: FileIO, index: np.ndarray) -> list[memoryview | None]:
    """Return the compressed bytes of consecutive chunks, read at once where they lie one after another."""
    present = index[index[:, 0] != _ABSENT].astype(np.int64)
    edges = present[:, 0] + present[:, 1]
    if len(present) and (edges[:-1] == present[1:, 0]).all():
        begin = int(present[0, 0])
        everything = memoryview(os.pread(file.fileno(), int(edges[-1]) - begin, begin))
        pieces = iter([everything[o - begin : o - begin + s] for o, s in present])
    else:
        pieces = iter([memoryview(os.pread(file.fileno(), int(s), int(o))) for o, s in present])
    return [None if offset == _ABSENT else next(pieces) for offset in index[:, 0]]


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
        and names == ["bytes", "blosc"]
        and index == ["bytes", "crc32c"]
        and endian == "little"
        and inner.get("index_location") == "end"
        and keys["name"] == "default"
        and keys.get("configuration", {}).get("separator", "/") == "/"
        and layout["fill_value"] == 0
    )
