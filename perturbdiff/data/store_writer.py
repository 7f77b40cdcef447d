"""Writing a store: parts that are complete AnnData Zarr v3 folders, filled bucket by bucket in shard-sized pieces."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import zarr
from zarr.codecs import BloscCodec

ROWS_PER_CHUNK = 64
ROWS_PER_SHARD = 65_536
ROWS_PER_LARGE_SHARD = 262_144
LARGE_STORE = 10_000_000
"""From this many cells on, shards are larger, to keep the number of files small."""

_OBS_CHUNK = 65_536


class ShardedArray:
    """A one-dimensional Zarr array of known length that is appended to; only whole shards are written."""

    def __init__(
        self, group: zarr.Group, name: str, length: int, dtype: np.dtype, chunk: int, shard: int
    ) -> None:
        codec = BloscCodec(cname="zstd", clevel=3, shuffle="shuffle")
        self._array = group.create_array(
            name,
            shape=(length,),
            dtype=dtype,
            chunks=(chunk,),
            shards=(shard,),
            compressors=[codec],
            fill_value=0,
            config={"write_empty_chunks": True},  # so that a missing file always means damage
        )
        self._shard, self._written, self._waiting = shard, 0, np.empty(0, dtype)

    def append(self, values: np.ndarray) -> None:
        """Write ``values`` as far as they fill shards and keep the rest."""
        self._waiting = np.concatenate([self._waiting, values])
        full = len(self._waiting) // self._shard * self._shard
        self._write(self._waiting[:full])
        self._waiting = self._waiting[full:].copy()

    def close(self) -> None:
        """Write what is left.

        Raises
        ------
        RuntimeError
            If fewer or more values came than announced.
        """
        self._write(self._waiting)
        if self._written != self._array.shape[0]:
            raise RuntimeError(f"{self._written} values written where {self._array.shape[0]} were announced")

    def _write(self, values: np.ndarray) -> None:
        for start in range(0, len(values), self._shard):
            piece = values[start : start + self._shard]
            self._array[self._written : self._written + len(piece)] = piece
            self._written += len(piece)


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
        See `rows_per_shard`.
    dtype, index_dtype
        Of the values and the column numbers.
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
    ) -> None:
        self.path, self.num_cells = path, num_cells
        self._obs: list[pd.DataFrame] = []
        self._indptr = np.zeros(num_cells + 1, np.int64)
        self._rows = 0
        self._root = zarr.open_group(path, mode="w-", zarr_format=3)
        self._root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = self._root.create_group("X")
        matrix.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [num_cells, num_genes]}
        )
        chunk = max(1, round(mean_values * ROWS_PER_CHUNK))
        shard = chunk * (rows_per_shard // ROWS_PER_CHUNK)
        self._matrix = matrix
        self._data = ShardedArray(matrix, "data", num_values, dtype, chunk, shard)
        self._indices = ShardedArray(matrix, "indices", num_values, index_dtype, chunk, shard)

    def append(self, obs: pd.DataFrame, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """Add rows given as CSR with their obs."""
        rows = len(obs)
        self._indptr[self._rows + 1 : self._rows + rows + 1] = self._indptr[self._rows] + indptr[1:]
        self._rows += rows
        self._obs.append(obs)
        self._indices.append(indices)
        self._data.append(data)

    def close(self, var: pd.DataFrame, uns: Mapping[str, Any]) -> None:
        """Write the rest of the part: row pointers, obs, var and uns."""
        self._data.close()
        self._indices.close()
        pointers = ShardedArray(
            self._matrix, "indptr", self.num_cells + 1, np.dtype(np.int64), _OBS_CHUNK, _OBS_CHUNK * 64
        )
        pointers.append(self._indptr)
        pointers.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning)  # string arrays in Zarr v3, consolidation
            obs = pd.concat(self._obs)
            sizes = {"chunks": (_OBS_CHUNK,), "shards": (_OBS_CHUNK * 64,)}
            anndata.io.write_elem(self._root, "obs", obs, dataset_kwargs=sizes)
            anndata.io.write_elem(self._root, "var", var)
            anndata.io.write_elem(self._root, "uns", dict(uns))
            for empty in ("layers", "obsm", "obsp", "varm", "varp"):
                anndata.io.write_elem(self._root, empty, {})
            zarr.consolidate_metadata(self._root.store)


def rows_per_shard(num_cells: int) -> int:
    """Return the rows of a shard in a store of ``num_cells``."""
    return ROWS_PER_LARGE_SHARD if num_cells >= LARGE_STORE else ROWS_PER_SHARD
