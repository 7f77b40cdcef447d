"""Writing a sharded one-dimensional Zarr array from beginning to end, holding one chunk of it in memory.

zarr encodes a shard as a whole, and every chunk through its pipeline; for arrays that are only ever appended to,
chunks can go to the file one after another and the shard's index after them (Zarr v3 specification:
``sharding_indexed`` with its index at the end). zarr itself writes the metadata, and reads the result like any other
array. Every chunk carries a CRC-32C, so that damage is noticed by whoever reads it: Blosc checks nothing itself.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any, Literal

import google_crc32c
import numpy as np
import pyarrow as pa
import zarr
from numcodecs.blosc import NOSHUFFLE, SHUFFLE, compress  # type: ignore[attr-defined]
from numcodecs.zstd import compress as zstd  # type: ignore[attr-defined]
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

_LEVEL = 2  # as small as level 3, in half the time
_LEVELS = {"zstd": _LEVEL, "lz4hc": 4}
_ABSENT = np.iinfo(np.uint64).max  # offset and size of a chunk that is not there
_BUFFER = 1 << 18

TEXT_ATTRIBUTES = {"encoding-type": "string-array", "encoding-version": "0.2.0"}


class _ShardFiles:
    """The files of an array: encoded chunks one after another, each file ended by its index."""

    def __init__(self, folder: Path, chunks_per_shard: int) -> None:
        self._folder, self._chunks = folder, chunks_per_shard
        self._index = np.full((chunks_per_shard, 2), _ABSENT, "<u8")
        self._filled = self._number = self._end = 0
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self.checksums: dict[str, str] = {}

    def add(self, chunk: bytes) -> None:
        """Write an encoded chunk and its CRC-32C."""
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / str(self._number)).open("wb", buffering=_BUFFER)
        size = self._write(chunk) + self._write(_crc32c(chunk))
        self._index[self._filled] = self._end, size
        self._filled, self._end = self._filled + 1, self._end + size
        if self._filled == self._chunks:
            self.finish()

    def finish(self) -> None:
        """End the file that is open, if there is one, with its index."""
        if self._file is None:
            return
        index = self._index.tobytes()
        self._write(index)
        self._write(_crc32c(index))
        self._file.close()
        self.checksums[f"c/{self._number}"] = self._digest.hexdigest()
        self._file, self._digest = None, hashlib.sha256()
        self._index[:] = _ABSENT
        self._number, self._filled, self._end = self._number + 1, 0, 0

    def release(self) -> None:
        """Close the file as it is."""
        if self._file is not None:
            self._file.close()

    def _write(self, content: bytes) -> int:
        self._digest.update(content)
        return self._file.write(content) if self._file is not None else 0


class ShardWriter:
    """Appends numbers to an array of known length.

    Parameters
    ----------
    path
        Folder of the array, which must not exist.
    length
        Elements it will have.
    dtype
        Their type, a number or bool.
    chunk, shard
        Elements of a chunk and of a file; ``shard`` is a multiple of ``chunk``. An array that is shorter has one
        file of as many chunks as it needs.
    attributes
        Attributes of the array.
    shuffle
        Whether Blosc sorts the bytes of a chunk by their significance.
    codec
        Blosc's compressor.

    Attributes
    ----------
    checksums
        SHA-256 of every file below ``path`` once it is complete, by its path relative to ``path``; all but
        ``zarr.json``.
    """

    def __init__(
        self,
        path: Path,
        length: int,
        dtype: np.dtype,
        chunk: int,
        shard: int,
        attributes: dict[str, Any] | None = None,
        *,
        shuffle: bool = True,
        codec: Literal["zstd", "lz4hc"] = "zstd",
    ) -> None:
        self.path, self.length, self.dtype = path, length, np.dtype(dtype)
        shard = min(shard, max(1, -(-length // chunk)) * chunk)
        self._shuffle = SHUFFLE if shuffle else NOSHUFFLE
        self._codec, self._level = codec.encode(), _LEVELS[codec]
        blosc = BloscCodec(cname=codec, clevel=self._level, shuffle="shuffle" if shuffle else "noshuffle")
        _create(path, length, self.dtype, chunk, shard, (blosc, Crc32cCodec()), attributes)
        self._files = _ShardFiles(path / "c", shard // chunk)
        self.checksums = self._files.checksums
        self._chunk, self._part = np.empty(chunk, self.dtype), 0
        self._written = 0

    def append(self, values: np.ndarray) -> None:
        """Write ``values`` as far as they fill chunks and keep the rest.

        Raises
        ------
        TypeError
            If they do not fit into the array's type.
        """
        values = np.ascontiguousarray(values).astype(self.dtype, casting="safe", copy=False)
        size, start = len(self._chunk), 0
        if self._part:
            start = min(size - self._part, len(values))
            self._chunk[self._part : self._part + start] = values[:start]
            self._part += start
            if self._part < size:
                self._written += len(values)
                return
            self._encode(self._chunk)
        stop = start + (len(values) - start) // size * size
        for first in range(start, stop, size):
            self._encode(values[first : first + size])
        self._part = len(values) - stop
        self._chunk[: self._part] = values[stop:]
        self._written += len(values)

    def close(self) -> None:
        """Write what is left; a last chunk that is not full ends in zeros.

        Raises
        ------
        RuntimeError
            If fewer or more values came than announced.
        """
        if self._part:
            self._chunk[self._part :] = 0
            self._encode(self._chunk)
            self._part = 0
        self._files.finish()
        _check_length(self._written, self.length)

    def release(self) -> None:
        """Close what is open without completing it."""
        self._files.release()

    def _encode(self, chunk: np.ndarray) -> None:
        # zarr has switched off Blosc's threads, with which the order of a chunk's blocks would be left to chance
        self._files.add(compress(chunk, self._codec, self._level, self._shuffle, 0, self.dtype.itemsize))


class TextWriter:
    """Appends text to an array of known length; see `ShardWriter`. All of it lies in one file."""

    def __init__(self, path: Path, length: int, chunk: int) -> None:
        self.path, self.length, self._size = path, length, chunk
        shard = max(1, -(-length // chunk)) * chunk
        codecs = (ZstdCodec(level=_LEVEL), Crc32cCodec())
        _create(path, length, str, chunk, shard, codecs, TEXT_ATTRIBUTES)
        self._files = _ShardFiles(path / "c", shard // chunk)
        self.checksums = self._files.checksums
        self._waiting: list[Any] = []
        self._count = self._written = 0

    def append(self, values: Any) -> None:
        """Write texts, anything that pyarrow makes an array of, as far as they fill chunks; keep the rest."""
        texts = pa.array(values, pa.large_string())
        if isinstance(texts, pa.ChunkedArray):
            texts = texts.combine_chunks()
        self._waiting.append(texts)
        self._count += len(texts)
        self._written += len(texts)
        if self._count >= self._size:
            self._encode(self._count // self._size * self._size)

    def close(self) -> None:
        """Write what is left; a last chunk that is not full ends in empty texts."""
        if self._count:
            self._waiting.append(pa.array([""] * (-self._count % self._size), pa.large_string()))
            self._count += -self._count % self._size
            self._encode(self._count)
        self._files.finish()
        _check_length(self._written, self.length)

    def release(self) -> None:
        """Close what is open without completing it."""
        self._files.release()

    def _encode(self, stop: int) -> None:
        texts = pa.concat_arrays(self._waiting)
        for start in range(0, stop, self._size):
            self._files.add(zstd(encode_texts(texts.slice(start, self._size)), _LEVEL))
        # a copy, since a slice would keep the whole
        self._waiting = [pa.concat_arrays([texts.slice(stop), pa.array([], pa.large_string())])]
        self._count -= stop


def encode_texts(texts: Any) -> bytes:
    """Return a pyarrow large_string array as Zarr's ``vlen-utf8``: the count, then each text after its length."""
    count = len(texts)
    if texts.null_count:
        raise ValueError("missing texts")
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + count + 1]
    lengths = np.diff(offsets).astype("<u4")
    out = np.empty(4 + 4 * count + int(offsets[-1] - offsets[0]), np.uint8)
    out[:4] = np.frombuffer(np.array([count], "<u4").tobytes(), np.uint8)
    places = 4 + 4 * np.arange(count) + (offsets[:-1] - offsets[0])
    body = np.ones(len(out), bool)
    body[:4] = False
    for byte in range(4):
        out[places + byte] = lengths.view(np.uint8)[byte::4]
        body[places + byte] = False
    content = texts.buffers()[2]
    if content is not None:
        out[body] = np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]]
    return out.tobytes()


def _create(
    path: Path, length: int, dtype: Any, chunk: int, shard: int, codecs: tuple[Any, ...], attributes: Any
) -> None:
    """Let zarr write the metadata of an array."""
    zarr.create_array(
        path,
        shape=(length,),
        dtype=dtype,
        chunks=(chunk,),
        shards=(shard,),
        compressors=codecs,
        fill_value="" if dtype is str else 0,
        attributes=attributes,
        overwrite=False,
    )


def _crc32c(content: bytes) -> bytes:
    return google_crc32c.value(content).to_bytes(4, "little")


def _check_length(written: int, announced: int) -> None:
    if written != announced:
        raise RuntimeError(f"{written} values written where {announced} were announced")
