"""Writing a store: parts that are complete AnnData Zarr v3 folders, written from the first row to the last.

Of what is appended, a part keeps one chunk per array, whatever its size.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anndata
import numpy as np
import pandas as pd
import zarr

from perturbdiff.runtime.files import sha256
from perturbdiff.store.shard_writer import ShardWriter, TextWriter

ROWS_PER_CHUNK = 64
ROWS_PER_SHARD = 524_288
"""About four files of values and column numbers for a million cells; see `_even`."""

_OBS_CHUNK = 65_536
_WHOLE = 1 << 40  # all of an array in one file

_PLAIN = {"encoding-type": "array", "encoding-version": "0.2.0"}
_CATEGORICAL = {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
_FRAME = {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"}

Array = TypeVar("Array", ShardWriter, TextWriter)


class _Column(Protocol):
    """Writes one column of obs."""

    def append(self, values: Any) -> None: ...

    def close(self) -> None: ...

    def release(self) -> None: ...


class PartWriter:
    """One part of a store, written in row order.

    Parameters
    ----------
    path
        Folder of the part, which must not exist.
    num_cells, num_values
        Rows and stored values it will have.
    num_genes
        Columns.
    mean_values
        Stored values per cell in the whole store, which sets the size of chunks.
    rows_per_shard
        See `rows_per_shard`; files hold up to half as many rows more or less, so that they are equal.
    dtype, index_dtype, pointer_dtype
        Of the values, the column numbers and the row pointers.
    rows_per_chunk
        Rows of an average chunk; by default `ROWS_PER_CHUNK`.

    Attributes
    ----------
    checksums
        After `close`, the SHA-256 of every file by its path below the part.
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
        # normalised values repeat as a whole, which shuffling their bytes hides: half the size without
        shuffle = np.dtype(dtype).kind != "f"
        self._data = self._keep(
            ShardWriter(path / "X" / "data", num_values, dtype, chunk, shard, shuffle=shuffle)
        )
        # LZ4 makes ascending column numbers as small as zstd does, in the same time, and reads four times faster
        self._indices = self._keep(
            ShardWriter(path / "X" / "indices", num_values, index_dtype, chunk, shard, codec="lz4hc")
        )
        self._indptr = self._numbers("X/indptr", num_cells + 1, np.dtype(pointer_dtype), None)
        self._indptr.append(np.zeros(1, pointer_dtype))

    def append(self, obs: pd.DataFrame, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """Add rows given as CSR with their obs, whose columns, types and categories never change.

        The index of ``obs`` holds the names of the cells.

        Raises
        ------
        ValueError
            If the obs differ in kind from those before.
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
        """Write what is left of the part: the ends of its arrays, var and uns."""
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
        """What the manifest says of the part, by which a reader knows it again: name, cells, stored values."""
        return {"name": self.path.name, "n_cells": self.num_cells, "n_values": self._values}

    def release(self) -> None:
        """Close the files as they are, of a part that is given up."""
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
        """Create an array of obs for values like these."""
        if isinstance(values.dtype, pd.CategoricalDtype):
            own = group.create_group(name, attributes=_CATEGORICAL)
            categories = values.cat.categories
            anndata.io.write_elem(own, "categories", categories.to_numpy())
            dtype = values.cat.codes.dtype
            return _Codes(self._numbers(f"obs/{name}/codes", self.num_cells, dtype, _PLAIN), categories)
        if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biuf":
            return _Numbers(self._numbers(f"obs/{name}", self.num_cells, values.dtype, _PLAIN))
        if pd.api.types.is_numeric_dtype(values.dtype):  # with pandas' own missing values
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
    """A column of labels: the place of each among the categories, -1 if it is missing."""

    def __init__(self, array: ShardWriter, categories: pd.Index) -> None:
        self._array, self._categories = array, categories
        self.close, self.release = array.close, array.release

    def append(self, values: pd.Series) -> None:
        if not values.cat.categories.equals(self._categories):
            raise ValueError(f"categories of obs column '{values.name}' change")
        self._array.append(values.cat.codes.to_numpy())


def _even(length: int, chunk: int, shard: int) -> int:
    """Return a size of shards near ``shard`` that cuts an array into equal files, without a small one at its end."""
    files = max(1, round(length / shard))
    return -(-length // (files * chunk)) * chunk if length else shard


def rows_per_shard(num_cells: int) -> int:
    """Return the rows of a shard in a store of ``num_cells``."""
    return min(ROWS_PER_SHARD, -(-num_cells // ROWS_PER_CHUNK) * ROWS_PER_CHUNK)
