"""Checks that a Zarr folder is safe to read and as large as it says, before any value is read.

A folder can hold links to files outside it, and it names the code that decodes its values: some of that
code runs whatever a file tells it to. Therefore links are refused, and every codec must be one that only decodes.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perturbdiff.runtime.errors import UserError

# A folder that is no part of a Zarr hierarchy is missing for us, too; our own line names what is missing.
warnings.filterwarnings("ignore", message="Object at .* is not recognized as a component of a Zarr hierarchy")

_LARGEST_DOCUMENT = 64 << 20
_LARGEST_CHUNK = 2 << 30
_COMPRESSION = frozenset({"blosc", "zstd", "gzip", "zlib", "lz4"})
_FILTERS = frozenset(
    {
        "vlen-utf8", "vlen-bytes", "shuffle", "bitshuffle", "delta", "packbits", "astype", "fixedscaleoffset",
        "quantize", "bitround", "crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3",
    }
)  # fmt: skip
_VERSION_3 = frozenset({"bytes", "transpose", "sharding_indexed", "crc32c", "vlen-utf8", "vlen-bytes"})
_TABLES = ("obs/", "var/", "raw/var/")


def check_zarr(path: Path) -> None:
    """Refuse a folder that leads out of itself, decodes by anything but known codecs, or declares what it lacks.

    Raises
    ------
    UserError
        In one line that names the file.
    """
    size, arrays = _contents(path)
    for place, array in arrays.items():
        if place.startswith(_TABLES) and array.shape and array.shape[0] > size:
            raise UserError(
                f"{path / place}: declares {array.shape[0]} entries, more than the folder has bytes ({size})"
            )
        _check_whole(path, place, array)


def check_part(path: Path) -> int:
    """Refuse a part of a store that leads out of itself or decodes by unknown codecs; return the bytes it has.

    Raises
    ------
    UserError
        In one line that names the file.
    """
    return _contents(path)[0]


def open_group(path: Path) -> Any:
    """Open a group for reading by the metadata that were checked: not by a second copy of them in one file."""
    import zarr  # an h5ad file does without, and it takes a quarter of a second

    return zarr.open_group(path, mode="r", use_consolidated=False)


def _entries(folder: Path, name: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files of a folder with their paths below it, in the order of the folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            below = f"{name}{entry.name}"
            if entry.is_symlink():
                raise UserError(
                    f"{entry.path}: is a link, which is not followed; copy the folder with the files themselves"
                )
            if entry.is_dir(follow_symlinks=False):
                if entry.name[0].isdigit() and not any(os.scandir(entry.path)):
                    raise _damaged(Path(entry.path), "an empty folder lies where values belong")
                yield from _entries(folder / entry.name, f"{below}/")
            elif entry.is_file(follow_symlinks=False):
                yield below, entry
            else:
                raise UserError(f"{entry.path}: is neither a file nor a folder")


def _contents(path: Path) -> tuple[int, dict[str, _Array]]:
    """Return the bytes of all files, and what each array declares, by its path below the folder."""
    size, arrays = 0, {}
    for name, entry in _entries(path):
        size += entry.stat(follow_symlinks=False).st_size
        if entry.name in ("zarr.json", ".zarray"):
            array = _array(Path(entry.path), _document(Path(entry.path)))
            if array is not None:
                arrays[name.rpartition("/")[0]] = array
    return size, arrays


class _Array:
    """What an array's metadata declare."""

    def __init__(self, shape: list[int], chunks: list[int]) -> None:
        self.shape, self.chunks = shape, chunks


def _document(path: Path) -> dict[str, Any]:
    """Return a metadata document."""
    try:
        if path.stat().st_size > _LARGEST_DOCUMENT:
            raise ValueError("it is too large")
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, " ".join(str(error).split())) from None
    return document


def _array(path: Path, document: Mapping[str, Any]) -> _Array | None:
    """Check an array's metadata, those of a group are None."""
    try:
        if path.name == ".zarray":
            return _version_2(path, document)
        return _version_3(path, document) if document["node_type"] == "array" else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {' '.join(str(error).split())}") from None


def _version_2(path: Path, document: Mapping[str, Any]) -> _Array:
    filters = [str(entry["id"]) for entry in document.get("filters") or ()]
    compressor = document.get("compressor")
    for codec in filters:
        _allow(path, codec, _FILTERS)
    if compressor is not None:
        _allow(path, str(compressor["id"]), _COMPRESSION)
    _check_separator(path, document.get("dimension_separator", "."))
    array = _Array(_sizes(document["shape"]), _sizes(document["chunks"]))
    kind = document["dtype"]
    kind = np.dtype(kind if isinstance(kind, str) else [tuple(field) for field in kind])
    if kind.hasobject and not set(filters) & {"vlen-utf8", "vlen-bytes"}:
        raise UserError(f"{path}: holds Python objects, which are not read; write texts as texts")
    _check_chunk(path, array.chunks, kind.itemsize)
    return array


def _version_3(path: Path, document: Mapping[str, Any]) -> _Array:
    if document.get("storage_transformers"):
        raise UserError(f"{path}: has storage transformers, which are not read; write the folder again")
    grid, keys = document["chunk_grid"], document["chunk_key_encoding"]
    if grid["name"] != "regular" or keys["name"] not in ("default", "v2"):
        raise UserError(f"{path}: has an unknown grid or naming of chunks; write the folder again")
    separator = "/" if keys["name"] == "default" else "."
    _check_separator(path, (keys.get("configuration") or {}).get("separator", separator))
    chunks = _sizes(grid["configuration"]["chunk_shape"])
    kind = document["data_type"]
    item = np.dtype(kind).itemsize if isinstance(kind, str) and kind in np.sctypeDict else 1
    _check_chunk(path, _codecs(path, document["codecs"], chunks), item)
    return _Array(_sizes(document["shape"]), chunks)


def _codecs(path: Path, codecs: Any, chunks: list[int]) -> list[int]:
    """Allow the codecs of version 3; return the shape of what is decoded at once."""
    for codec in codecs:
        name = str(codec["name"])
        _allow(path, name.removeprefix("numcodecs."), _VERSION_3 | _COMPRESSION | _FILTERS)
        if name == "sharding_indexed":
            inner = codec["configuration"]
            _codecs(path, inner["index_codecs"], [])
            chunks = _codecs(path, inner["codecs"], _sizes(inner["chunk_shape"]))
    return chunks


def _allow(path: Path, codec: str, known: frozenset[str]) -> None:
    if codec not in known:
        raise UserError(
            f"{path}: is decoded by '{codec}', which is not among the codecs that are trusted; write it again with "
            "blosc, zstd, gzip or without compression"
        )


def _check_separator(path: Path, separator: Any) -> None:
    if separator not in (".", "/"):
        raise UserError(f"{path}: separates the names of chunks by {separator!r}; it can be . or /")


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"a shape of {values!r}")
    return values


def _check_chunk(path: Path, chunks: list[int], item: int) -> None:
    size = math.prod(chunks) * item
    if size > _LARGEST_CHUNK:
        raise UserError(
            f"{path}: is stored in pieces of {size / 2**30:.1f} GiB; write it again in smaller ones"
        )


def _check_whole(path: Path, place: str, array: _Array) -> None:
    """Refuse names of cells or genes, and values of a sparse matrix, of which a piece is missing.

    A missing piece is read as zeros, which the numbers of a dense matrix or of labels may be.
    """
    folder = path / place
    attributes = folder.parent / ".zattrs"
    if not attributes.is_file():
        attributes = folder.parent / "zarr.json"
    if len(array.shape) != 1 or not attributes.is_file():
        return
    document = _document(attributes)
    kind: Any = document.get("attributes", {}) if attributes.name == "zarr.json" else document
    index = str(kind.get("encoding-type", "")) == "dataframe" and kind.get("_index") == folder.name
    values = str(kind.get("encoding-type", "")) in ("csr_matrix", "csc_matrix") and folder.name == "data"
    if (not index and not values) or not array.chunks[0]:
        return
    stored = folder / "c" if (folder / "c").is_dir() else folder
    number, there = -(-array.shape[0] // array.chunks[0]), {p.name for p in stored.iterdir()}
    if len(there) < number or any(str(i) not in there and f"c.{i}" not in there for i in range(number)):
        raise _damaged(folder, "some of its files are missing")


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: is damaged or incomplete ({reason}); copy or make the folder again")
