"""The cells of a store or a file of counts, and the h5ad file of them with just the genes of a list."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import DataConfig
from perturbdiff.io import h5_output
from perturbdiff.io.counts import CountsFile
from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block
from perturbdiff.io.zarr_check import open_group
from perturbdiff.runtime.progress import track
from perturbdiff.store.store import Store

DEPTH = "depth_before_alignment"
"""obs column: sum of a cell's values over all genes of the source. Genes that are dropped cannot be summed later."""
_CHUNK = 1 << 18
_NAMES_PER_WRITE = 1 << 16
_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Cells:
    """Cells of a store or of a file, whichever it is.

    Attributes
    ----------
    path
        Where they are.
    genes
        Names of the columns of blocks.
    n_cells
        Number of rows.
    unit
        ``counts`` or ``log1p``: what the values are.
    blocks
        Yields all rows in consecutive blocks.
    columns
        Returns the names of the obs columns.
    column
        Returns an obs column by its name.
    cell_names
        Returns the names of rows from the first number to before the second, object array of str.
    """

    path: Path
    genes: list[str]
    n_cells: int
    unit: str
    blocks: Callable[[], Iterator[Block]]
    columns: Callable[[], list[str]]
    column: Callable[[str], pd.Series]
    cell_names: Callable[[int, int], np.ndarray]


@contextlib.contextmanager
def open_cells(path: Path, config: DataConfig, scratch: Path) -> Iterator[Cells]:
    """Open a store or a file of counts; a matrix that is stored by columns is put in row order in ``scratch``.

    Raises
    ------
    UserError
        If it is neither, or is damaged.
    """
    if (path / "conditions.parquet").is_file():
        yield _cells_of_store(Store(path))
        return
    file = CountsFile(path, config, scratch)

    def blocks() -> Iterator[Block]:
        file.prepare()
        yield from file.blocks()

    try:
        yield Cells(
            path=file.path,
            genes=list(file.genes),
            n_cells=file.n_cells,
            unit=file.unit,
            blocks=blocks,
            columns=lambda: file.columns,
            column=lambda name: file.column(name, "to copy"),
            cell_names=file.cell_names,
        )
    finally:
        file.close()


def _cells_of_store(store: Store) -> Cells:
    def blocks() -> Iterator[Block]:
        rows = max(1, int(VALUES_PER_BLOCK * store.n_cells / max(1, store.n_values)))
        exact = np.float64 if store.dtype == np.uint32 else np.float32
        for start in range(0, store.n_cells, rows):
            stop = min(start + rows, store.n_cells)
            counts = store.counts(slice(start, stop))
            indptr, indices = np.asarray(counts.indptr, np.int64), np.asarray(counts.indices, np.int32)
            yield Block(start, stop, indptr, indices, np.asarray(counts.data, exact))

    def columns() -> list[str]:
        obs: Any = open_group(store.parts[0])["obs"]
        return [str(name) for name in obs.attrs["column-order"]]

    return Cells(
        path=store.path,
        genes=list(store.genes),
        n_cells=store.n_cells,
        unit=store.input_scale,
        blocks=blocks,
        columns=columns,
        column=lambda name: pd.Series(store.obs([name])[name]),
        cell_names=store.cell_names,
    )


def write_aligned(cells: Cells, match: GeneMap, path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``cells`` with the genes of ``match`` to an h5ad file.

    ``X`` is CSR with the values as stored, float32 if all are exact in it, otherwise float64. A gene that the source
    lacks has no value. ``obs`` is copied, with `DEPTH` added. ``var`` says whether the source has a gene. Layers,
    obsm and the like are not copied.

    Returns
    -------
    dict
        Cells, genes and values written, and their type.
    """
    with h5_output.writing(path) as root:
        root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = root.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        matrix.attrs["shape"] = [cells.n_cells, len(match.target)]
        writer = _Matrix(matrix, match)
        with track("writing", cells.n_cells) as progress:
            for block in cells.blocks():
                writer.append(block)
                progress.advance(block.stop - block.start)
        writer.finish()
        _write_obs(root, cells, np.concatenate(writer.depth))
        shared = ~np.isin(np.array(match.target, object), np.array(match.missing, object))
        var = pd.DataFrame({"in_source": shared}, index=pd.Index(match.target, dtype=object))
        anndata.io.write_elem(root, "var", var)
        anndata.io.write_elem(root, "uns", {"perturbdiff": {**facts, "unit": cells.unit}})
        for name in ("layers", "obsm", "varm", "obsp", "varp"):
            anndata.io.write_elem(root, name, {})
    return {
        "cells": cells.n_cells,
        "genes": len(match.target),
        "values": writer.num_values,
        "dtype": writer.dtype.name,
    }


class _Matrix:
    """Appends row blocks to a CSR group; it becomes float64 as soon as float32 cannot hold a value."""

    def __init__(self, group: Any, match: GeneMap) -> None:
        self._group, self._match = group, match
        self.dtype, self.num_values = np.dtype(np.float32), 0
        self.depth: list[np.ndarray] = [np.empty(0)]
        for name, dtype in (("data", self.dtype), ("indices", np.int32), ("indptr", np.int64)):
            h5_output.growing(group, name, dtype, _CHUNK)
        h5_output.append(group["indptr"], np.zeros(1, np.int64))

    def append(self, block: Block) -> None:
        shape = (len(block.indptr) - 1, len(self._match.source))
        whole = sparse.csr_matrix((block.data, block.indices, block.indptr), shape=shape)
        self.depth.append(np.asarray(whole.sum(axis=1, dtype=np.float64)).ravel())
        aligned = self._match.apply(whole)
        data = np.asarray(aligned.data)
        if self.dtype == np.float32 and (data.astype(np.float32) != data).any():
            self._widen()
        h5_output.append(self._group["data"], data.astype(self.dtype))
        h5_output.append(self._group["indices"], np.asarray(aligned.indices, np.int32))
        h5_output.append(self._group["indptr"], np.asarray(aligned.indptr[1:], np.int64) + self.num_values)
        self.num_values += len(data)

    def _widen(self) -> None:
        """Turn the values written so far into float64, a chunk at a time."""
        self.dtype = np.dtype(np.float64)
        h5_output.recast(self._group, "data", self.dtype, _CHUNK)

    def finish(self) -> None:
        """Give row pointers and column numbers one type, because scikit-learn, and so scanpy, needs that."""
        name, dtype = ("indptr", np.int32) if self.num_values <= _INT32_MAX else ("indices", np.int64)
        h5_output.recast(self._group, name, dtype, _CHUNK)


def _write_obs(root: Any, cells: Cells, depth: np.ndarray) -> None:
    obs = root.create_group("obs")
    names = obs.create_dataset(
        "_index", (cells.n_cells,), h5py.string_dtype(), chunks=(min(4096, cells.n_cells),)
    )
    names.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    for start in range(0, cells.n_cells, _NAMES_PER_WRITE):
        stop = min(start + _NAMES_PER_WRITE, cells.n_cells)
        names[start:stop] = cells.cell_names(start, stop)
    columns = [name for name in cells.columns() if name not in ("_index", DEPTH)]
    for name in columns:
        anndata.io.write_elem(obs, name, _storable(cells.column(name)))
    anndata.io.write_elem(obs, DEPTH, depth)
    obs.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"})
    obs.attrs["column-order"] = [*columns, DEPTH]


def _storable(values: pd.Series) -> Any:
    """Return an obs column as anndata can write it: text as categories, an empty text as missing."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        categories = pd.Categorical(values)
        return categories.remove_categories([""]) if "" in categories.categories else categories
    if pd.api.types.is_extension_array_dtype(values.dtype):
        return values.array
    return values.to_numpy()
