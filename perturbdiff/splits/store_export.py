"""Exports cells of a store to one h5ad file or Zarr folder, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import anndata
import h5py
import numpy as np
import pandas as pd
import zarr

from perturbdiff.io import h5_output
from perturbdiff.io.zarr_check import open_group
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.progress import track
from perturbdiff.store.store import Store, reading
from perturbdiff.store.store_writer import PartWriter, rows_per_shard
from perturbdiff.store.views import Scale, check_scale, facts, read_rows

Compression = Literal["gzip", "lzf", "none"]

_ROWS = 65_536
_ROWS_PER_BLOCK = 16_384
_ROWS_PER_CHUNK = 1024
_FEW_VALUES = np.iinfo(np.int32).max


def export(
    store: Path,
    out: Path,
    *,
    scale: Scale = "log1p",
    labels: Mapping[str, Sequence[str]] | None = None,
    split: Path | None = None,
    part: str | None = None,
    compression: Compression = "gzip",
    force: bool = False,
) -> Path:
    """Write cells of a store as one AnnData. The memory needed does not grow with the number of cells.

    Parameters
    ----------
    store
        Folder of the store.
    out
        ``.h5ad`` file or ``.zarr`` folder.
    scale
        Units of ``X``: ``log1p`` (float32), ``model`` (log1p / scale) or ``counts`` as stored.
    labels
        Labels to keep, by column ``cell_type``, ``batch`` or ``perturbation``. A column without labels keeps all.
    split, part
        Keep only the conditions in this part of a split.
    compression
        Compression of the matrix in an h5ad file.
    force
        Run even if an equal output exists.

    Raises
    ------
    UserError
        If a label or a part does not exist, no cell is left, or the output cannot be written.
    """
    if out.suffix not in (".h5ad", ".zarr"):
        raise UserError(f"{out}: give the output the ending .h5ad or .zarr")
    opened = Store(store)
    check_scale(opened, scale)
    rows = _Rows(opened, select(opened, labels or {}, split, part))
    chosen = {name: sorted(values) for name, values in (labels or {}).items() if values}
    settings = {"scale": scale, "labels": chosen, "part": part, "compression": compression}
    inputs = {"store": store} | ({} if split is None else {"split": split})
    folder = out.suffix == ".zarr"
    with provenance.stage(
        "store export", out, config=settings, inputs=inputs, folder=folder, force=force
    ) as run:
        if not run.skip:
            if folder:
                run.path.rmdir()  # the writer makes it
            _write(opened, rows, run.path, scale, compression, folder=folder)
            run.results["n_cells"] = len(rows)
    return out


def select(
    store: Store, labels: Mapping[str, Sequence[str]], split: Path | None, part: str | None
) -> np.ndarray:
    """Return the mask of conditions to export, bool [conditions].

    Raises
    ------
    UserError
        If a label or a part does not exist, or no condition is left.
    """
    table = store.conditions
    keep = np.ones(len(table), bool)
    for column, wanted in labels.items():
        have = set(table[column])
        for label in wanted:
            if label not in have:
                raise UserError(f"{store.path}: no {column} '{label}'{nearest(label, have)}")
        if wanted:
            keep &= table[column].isin(list(wanted)).to_numpy()
    if (split is None) != (part is None):
        raise UserError("--part and --split belong together: give both or none")
    if split is not None:
        from perturbdiff.splits.splits import parts, read_split

        part_of = np.asarray(parts(table, read_split(split), store.path))
        if part not in part_of:
            raise UserError(
                f"{split}: no condition is in part '{part}'; parts: {listing(sorted(set(part_of)))}"
            )
        keep &= part_of == part
    if not keep.any():
        raise UserError(f"{store.path}: no cell has all of the labels asked for")
    return keep


class _Rows:
    """The store rows of conditions, ascending. They are made where they are asked for."""

    def __init__(self, store: Store, keep: np.ndarray) -> None:
        kept = pd.DataFrame(store.conditions[keep])
        self._ends = np.cumsum(kept["n_cells"].to_numpy(np.int64))
        self._shift = kept["stop"].to_numpy(np.int64) - self._ends

    def __len__(self) -> int:
        return int(self._ends[-1])

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all rows, int64 [at most 16,384]."""
        for first in range(0, len(self), _ROWS_PER_BLOCK):
            places = np.arange(first, min(first + _ROWS_PER_BLOCK, len(self)))
            yield places + self._shift[np.searchsorted(self._ends, places, side="right")]


class _Writer(Protocol):
    def append(
        self, obs: pd.DataFrame, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray
    ) -> None: ...

    def close(self, var: pd.DataFrame, uns: Mapping[str, Any]) -> None: ...

    def release(self) -> None: ...


def _write(
    store: Store, rows: _Rows, path: Path, scale: Scale, compression: Compression, *, folder: bool
) -> None:
    """Copy the rows to ``path``."""
    dtype = store.dtype if scale == "counts" else np.dtype(np.float32)
    reader = ObsReader(store)
    values = sum(map(reader.count_values, rows.blocks()))
    integer = np.dtype(np.int32 if values <= _FEW_VALUES else np.int64)
    if folder:
        writer: _Writer = PartWriter(
            path,
            num_cells=len(rows),
            num_values=values,
            num_genes=store.n_genes,
            mean_values=values / len(rows),
            rows_per_shard=rows_per_shard(len(rows)),
            rows_per_chunk=_ROWS_PER_CHUNK,
            dtype=dtype,
            index_dtype=integer,
            pointer_dtype=integer,
        )
    else:
        writer = H5Writer(path, (len(rows), store.n_genes), values, dtype, integer, compression)
    try:
        with track("exporting cells", len(rows)) as progress:
            for wanted in rows.blocks():
                block = read_rows(store, wanted, scale)
                indices = np.asarray(block.indices).astype(integer, copy=False)
                writer.append(reader.take(wanted), np.asarray(block.indptr), indices, np.asarray(block.data))
                progress.advance(len(wanted))
        writer.close(store.var, facts(store, scale))
    finally:
        writer.release()


class ObsReader:
    """Reads obs for some rows of a store at a time."""

    def __init__(self, store: Store) -> None:
        self._store, self._parts, self._edges = store, store.parts, store.edges
        self._kept: tuple[tuple[int, int], pd.DataFrame] | None = None
        self._categories: dict[str, pd.Index] = {}

    def take(self, rows: np.ndarray) -> pd.DataFrame:
        """Return obs of ascending ``rows``, indexed by cell name."""
        part = np.searchsorted(self._edges, rows, "right") - 1
        local = rows - self._edges[part]
        cuts = np.flatnonzero((np.diff(part) != 0) | (np.diff(local // _ROWS) != 0)) + 1
        frames = []
        for piece in np.split(np.arange(len(rows)), cuts):
            p, block = int(part[piece[0]]), int(local[piece[0]]) // _ROWS
            frames.append(self._frame(p, block).iloc[local[piece] - block * _ROWS])
        return frames[0] if len(frames) == 1 else pd.concat(frames)

    def count_values(self, rows: np.ndarray) -> int:
        """Return the number of stored values of ``rows``."""
        return int(self._store.lengths(rows).sum())

    def _frame(self, part: int, block: int) -> pd.DataFrame:
        """Return a block of a partition's obs. The last block is cached."""
        if self._kept is None or self._kept[0] != (part, block):
            self._store.require(f"{self._parts[part].name}/obs/")
            with reading(self._parts[part]):
                group: Any = open_group(self._parts[part] / "obs")
                cut = slice(block * _ROWS, (block + 1) * _ROWS)
                columns = {name: self._column(group[name], name, cut) for name in group.attrs["column-order"]}
                names = pd.Index(np.asarray(group[group.attrs["_index"]][cut], object), dtype=object)
                self._kept = (part, block), pd.DataFrame(columns, index=names)
        return self._kept[1]

    def _column(self, stored: Any, name: str, cut: slice) -> Any:
        if not isinstance(stored, zarr.Group):
            return np.asarray(stored[cut])
        if name not in self._categories:
            self._categories[name] = pd.Index(anndata.io.read_elem(stored["categories"]))
        codes: Any = stored["codes"]
        return pd.Categorical.from_codes(codes[cut], self._categories[name])


class H5Writer:
    """Writes an h5ad file of known size from the first row to the last. It is used like `PartWriter`."""

    def __init__(
        self,
        path: Path,
        shape: tuple[int, int],
        num_values: int,
        dtype: np.dtype,
        index_dtype: np.dtype,
        compression: Compression,
    ) -> None:
        self._file = h5_output.create(path)
        self._file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = self._file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
        packing: dict[str, Any] = (
            {} if compression == "none" else {"compression": compression, "shuffle": True}
        )
        if compression == "gzip":
            packing["compression_opts"] = 1
        if num_values:
            packing["chunks"] = (min(1 << 18, num_values),)
        for name, kind in (("data", dtype), ("indices", index_dtype)):
            matrix.create_dataset(name, (num_values,), kind, **(packing if num_values else {}))
        matrix.create_dataset("indptr", (shape[0] + 1,), index_dtype)
        self._matrix: Any = matrix
        self._cells, self._rows, self._values = shape[0], 0, 0
        self._columns: dict[str, Any] = {}

    def append(self, obs: pd.DataFrame, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """Add rows in CSR form with their obs."""
        if not self._columns:
            self._open_columns(obs)
        start, stop = self._rows, self._rows + len(obs)
        self._columns["_index"][start:stop] = obs.index.to_numpy(object)
        for name, column in obs.items():
            categorical = isinstance(column.dtype, pd.CategoricalDtype)
            self._columns[str(name)][start:stop] = column.cat.codes if categorical else column.to_numpy()
        end = self._values + len(data)
        self._matrix["data"][self._values : end] = data
        self._matrix["indices"][self._values : end] = indices
        ends = indptr[1:].astype(np.int64) + self._values
        self._matrix["indptr"][start + 1 : stop + 1] = ends
        self._rows, self._values = stop, end

    def close(self, var: pd.DataFrame, uns: Mapping[str, Any]) -> None:
        """Finish the file: write var, uns and the empty groups of an AnnData."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            anndata.io.write_elem(self._file, "var", var)
            anndata.io.write_elem(self._file, "uns", dict(uns))
            for empty in ("layers", "obsm", "obsp", "varm", "varp"):
                anndata.io.write_elem(self._file, empty, {})
        h5_output.finish(self._file)

    def release(self) -> None:
        """Close the file, whether it is finished or not."""
        h5_output.abandon(self._file)

    def _open_columns(self, obs: pd.DataFrame) -> None:
        group = self._file.create_group("obs")
        order = np.array(list(obs.columns), h5py.string_dtype())
        frame = {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"}
        group.attrs.update({**frame, "column-order": order})
        self._columns["_index"] = self._texts(group, "_index")
        for name, column in obs.items():
            if isinstance(column.dtype, pd.CategoricalDtype):
                of_column = group.create_group(str(name))
                of_column.attrs.update(
                    {
                        "encoding-type": "categorical",
                        "encoding-version": "0.2.0",
                        "ordered": bool(column.cat.ordered),
                    }
                )
                anndata.io.write_elem(of_column, "categories", column.cat.categories.to_numpy())
                array = of_column.create_dataset("codes", (self._cells,), column.cat.codes.dtype)
            elif column.dtype.kind in "biuf":
                array = group.create_dataset(str(name), (self._cells,), column.dtype)
            else:
                self._columns[str(name)] = self._texts(group, str(name))
                continue
            array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
            self._columns[str(name)] = array

    def _texts(self, group: h5py.Group, name: str) -> Any:
        array = group.create_dataset(name, (self._cells,), h5py.string_dtype())
        array.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
        return array
