"""Writes the partitions of a store, each a complete AnnData Zarr v3 folder, from the first row to the last.

A writer keeps one chunk per array in memory, whatever the size of the partition.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar

import anndata
import google_crc32c
import numpy as np
import pandas as pd
import pyarrow as pa
import zarr
from numcodecs.blosc import NOSHUFFLE, SHUFFLE, compress  # type: ignore[attr-defined]
from numcodecs.zstd import compress as zstd  # type: ignore[attr-defined]
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from perturbdiff.runtime.files import sha256

_LEVEL = 2  # output as small as with level 3, in half the time
_ABSENT = np.iinfo(np.uint64).max  # offset and size of a chunk that is not stored
_BUFFER = 1 << 18
TEXT_ATTRIBUTES = {"encoding-type": "string-array", "encoding-version": "0.2.0"}
ROWS_PER_CHUNK = 64
ROWS_PER_SHARD = 524_288
"""A million cells get about four files of values and column numbers (see `_even`)."""
_OBS_CHUNK = 65_536
_WHOLE = 1 << 40  # puts a complete array into one file
_PLAIN = {"encoding-type": "array", "encoding-version": "0.2.0"}
_CATEGORICAL = {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
_FRAME = {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"}

_LEVELS = {"zstd": _LEVEL, "lz4hc": 4}


class _ShardFiles:
    """The files of an array. Each file holds encoded chunks, followed by their index."""

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
        """Write the index of the open file, if there is one, and close it."""
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
        """Close the file without its index."""
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
        Number of elements that it will have.
    dtype
        Type of the elements, a number or bool.
    chunk, shard
        Number of elements in a chunk and in a file. ``shard`` is a multiple of ``chunk``. A shorter array has one
        file with as many chunks as it needs.
    attributes
        Attributes of the array.
    shuffle
        Whether Blosc sorts the bytes of a chunk by their significance.
    codec
        Compressor that Blosc uses.

    Attributes
    ----------
    checksums
        SHA-256 of every complete file below ``path`` except ``zarr.json``, by its path relative to ``path``.
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
        """Write the complete chunks, and keep the remaining values.

        Raises
        ------
        TypeError
            If the values do not fit into the array's type.
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
        """Write the remaining values. The last chunk is filled up with zeros.

        Raises
        ------
        RuntimeError
            If the number of values differs from ``length``.
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
        # zarr has switched off Blosc's threads, which would put the blocks of a chunk into a random order
        self._files.add(compress(chunk, self._codec, self._level, self._shuffle, 0, self.dtype.itemsize))


class TextWriter:
    """Appends texts to an array of known length, as `ShardWriter` does for numbers. The array is one file."""

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
        """Write complete chunks of texts, and keep the remaining texts. ``values`` is anything pyarrow can convert."""
        texts = pa.array(values, pa.large_string())
        if isinstance(texts, pa.ChunkedArray):
            texts = texts.combine_chunks()
        self._waiting.append(texts)
        self._count += len(texts)
        self._written += len(texts)
        if self._count >= self._size:
            self._encode(self._count // self._size * self._size)

    def close(self) -> None:
        """Write the remaining texts. The last chunk is filled up with empty texts."""
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
        # copied, because a slice would keep all texts in memory
        self._waiting = [pa.concat_arrays([texts.slice(stop), pa.array([], pa.large_string())])]
        self._count -= stop


def encode_texts(texts: Any) -> bytes:
    """Encode a pyarrow large_string array as Zarr's ``vlen-utf8``: the count, then each text preceded by its length."""
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
    """Create an array, whose metadata zarr writes."""
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


Array = TypeVar("Array", ShardWriter, TextWriter)


class _Column(Protocol):
    """Writes one column of obs."""

    def append(self, values: Any) -> None: ...

    def close(self) -> None: ...

    def release(self) -> None: ...


class PartWriter:
    """Writes one partition of a store in row order.

    Parameters
    ----------
    path
        Folder of the partition, which must not exist.
    num_cells, num_values
        Number of rows and of stored values that it will have.
    num_genes
        Number of columns.
    mean_values
        Mean number of stored values per cell in the complete store, which determines the size of chunks.
    rows_per_shard
        Rows in a file (see `rows_per_shard`). To make files equal, they hold up to half as many rows more or less.
    dtype, index_dtype, pointer_dtype
        Types of the values, the column numbers and the row pointers.
    rows_per_chunk
        Rows in an average chunk. By default `ROWS_PER_CHUNK`.

    Attributes
    ----------
    checksums
        After `close`, the SHA-256 of every file by its path below the partition.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_cells: int,
        num_values: int,
        num_genes: int,
        mean_values: float,
        rows_per_shard: int,
        dtype: np.dtype,
        index_dtype: np.dtype,
        pointer_dtype: np.dtype | type = np.int64,
        rows_per_chunk: int | None = None,
    ) -> None:
        self.path, self.num_cells = path, num_cells
        self.checksums: dict[str, str] = {}
        self._columns: dict[str, _Column] = {}
        self._arrays: list[ShardWriter | TextWriter] = []
        self._values = 0
        self._root = zarr.open_group(path, mode="w-", zarr_format=3)
        self._root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = self._root.create_group("X")
        matrix.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [num_cells, num_genes]}
        )
        rows_per_chunk = rows_per_chunk or ROWS_PER_CHUNK
        chunk = max(1, round(mean_values * rows_per_chunk))
        shard = _even(num_values, chunk, chunk * max(1, rows_per_shard // rows_per_chunk))
        # not for normalised values: equal values repeat, and without shuffling they compress to half the size
        shuffle = np.dtype(dtype).kind != "f"
        self._data = self._keep(
            ShardWriter(path / "X" / "data", num_values, dtype, chunk, shard, shuffle=shuffle)
        )
        # for ascending column numbers, LZ4 equals zstd in size and time, and is read four times faster
        self._indices = self._keep(
            ShardWriter(path / "X" / "indices", num_values, index_dtype, chunk, shard, codec="lz4hc")
        )
        self._indptr = self._numbers("X/indptr", num_cells + 1, np.dtype(pointer_dtype), None)
        self._indptr.append(np.zeros(1, pointer_dtype))

    def append(self, obs: pd.DataFrame, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """Add rows in CSR form with their obs. The columns, types and categories of obs must never change.

        The index of ``obs`` holds the names of the cells.

        Raises
        ------
        ValueError
            If obs has other columns or categories than before.
        """
        if not self._columns:
            self._columns = self._open_columns(obs)
        if list(obs.columns) != list(self._columns)[1:]:
            raise ValueError(f"obs columns {list(obs.columns)} after {list(self._columns)[1:]}")
        self._columns["_index"].append(obs.index)
        for name in obs.columns:
            self._columns[name].append(obs[name])
        ends = np.asarray(indptr[1:], np.int64) - int(indptr[0]) + self._values
        self._indptr.append(ends.astype(self._indptr.dtype))
        self._indices.append(indices)
        self._data.append(data)
        self._values += len(data)

    def close(self, var: pd.DataFrame, uns: Mapping[str, Any]) -> None:
        """Finish the partition: write the ends of its arrays, var and uns."""
        for writer in (*self._columns.values(), self._data, self._indices, self._indptr):
            writer.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning)  # string arrays in Zarr v3, consolidation
            if not self._columns:
                anndata.io.write_elem(self._root, "obs", pd.DataFrame(index=pd.Index([], dtype=object)))
            anndata.io.write_elem(self._root, "var", var)
            anndata.io.write_elem(self._root, "uns", dict(uns))
            for empty in ("layers", "obsm", "obsp", "varm", "varp"):
                anndata.io.write_elem(self._root, empty, {})
            zarr.consolidate_metadata(self._root.store)
        for array in self._arrays:
            folder = array.path.relative_to(self.path)
            self.checksums |= {f"{folder.as_posix()}/{name}": h for name, h in array.checksums.items()}
        for file in self.path.rglob("*"):
            name = file.relative_to(self.path).as_posix()
            if file.is_file() and name not in self.checksums:
                self.checksums[name] = sha256(file)

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of the partition in the manifest, by which a reader finds it: name, cells, stored values."""
        return {"name": self.path.name, "n_cells": self.num_cells, "n_values": self._values}

    def release(self) -> None:
        """Close the files of a partition that will not be finished."""
        for array in self._arrays:
            array.release()

    def _open_columns(self, obs: pd.DataFrame) -> dict[str, _Column]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning)
            group = self._root.create_group("obs", attributes={**_FRAME, "column-order": list(obs.columns)})
            columns: dict[str, _Column] = {"_index": self._text("obs/_index")}
            return columns | {str(n): self._open_column(group, str(n), column) for n, column in obs.items()}

    def _open_column(self, group: zarr.Group, name: str, values: pd.Series) -> _Column:
        """Create the arrays of an obs column for values of this type."""
        if isinstance(values.dtype, pd.CategoricalDtype):
            of_column = group.create_group(name, attributes=_CATEGORICAL)
            categories = values.cat.categories
            anndata.io.write_elem(of_column, "categories", categories.to_numpy())
            dtype = values.cat.codes.dtype
            return _Codes(self._numbers(f"obs/{name}/codes", self.num_cells, dtype, _PLAIN), categories)
        if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biuf":
            return _Numbers(self._numbers(f"obs/{name}", self.num_cells, values.dtype, _PLAIN))
        if pd.api.types.is_numeric_dtype(values.dtype):  # a pandas type that has missing values
            return _Numbers(self._numbers(f"obs/{name}", self.num_cells, np.dtype(np.float64), _PLAIN))
        return self._text(f"obs/{name}")

    def _numbers(
        self, name: str, length: int, dtype: np.dtype, attributes: dict[str, Any] | None
    ) -> ShardWriter:
        return self._keep(ShardWriter(self.path / name, length, dtype, _OBS_CHUNK, _WHOLE, attributes))

    def _text(self, name: str) -> TextWriter:
        return self._keep(TextWriter(self.path / name, self.num_cells, _OBS_CHUNK))

    def _keep(self, array: Array) -> Array:
        self._arrays.append(array)
        return array


class _Numbers:
    """A column of numbers."""

    def __init__(self, array: ShardWriter) -> None:
        self._array = array
        self.close, self.release = array.close, array.release

    def append(self, values: pd.Series) -> None:
        self._array.append(values.to_numpy(self._array.dtype))


class _Codes:
    """A column of labels, written as positions in the categories. -1 stands for a missing label."""

    def __init__(self, array: ShardWriter, categories: pd.Index) -> None:
        self._array, self._categories = array, categories
        self.close, self.release = array.close, array.release

    def append(self, values: pd.Series) -> None:
        if not values.cat.categories.equals(self._categories):
            raise ValueError(f"categories of obs column '{values.name}' change")
        self._array.append(values.cat.codes.to_numpy())


def _even(length: int, chunk: int, shard: int) -> int:
    """Return a shard size near ``shard`` that divides an array into equal files, without a small last one."""
    files = max(1, round(length / shard))
    return -(-length // (files * chunk)) * chunk if length else shard


def rows_per_shard(num_cells: int) -> int:
    """Return the rows of a shard in a store of ``num_cells``."""
    return min(ROWS_PER_SHARD, -(-num_cells // ROWS_PER_CHUNK) * ROWS_PER_CHUNK)
