"""Writing cells with another list of genes as h5ad: a stream, one block of rows and one obs column at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.genes.counted_cells import CellSource
from perturbdiff.io import h5_output
from perturbdiff.io.matrices import Block
from perturbdiff.runtime.progress import track

DEPTH = "depth_before_alignment"
"""obs column: sum of a cell's values over all genes of the source. Genes that are dropped cannot be summed later."""

_CHUNK = 1 << 18
_NAMES_PER_WRITE = 1 << 16
_INT32_MAX = np.iinfo(np.int32).max


def write_aligned(cells: CellSource, match: GeneMap, path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``cells`` with the genes of ``match`` to an h5ad file.

    ``X`` is CSR with the values as stored, float32 if all are exact in it, otherwise float64; a gene that the source
    lacks has no value. ``obs`` is copied, with `DEPTH` added; ``var`` tells whether the source has a gene. Layers,
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
    """Appends row blocks to a CSR group; float64 from the first value on that float32 cannot hold."""

    def __init__(self, group: Any, match: GeneMap) -> None:
        self._group, self._match = group, match
        self.dtype, self.num_values = np.dtype(np.float32), 0
        self.depth: list[np.ndarray] = [np.empty(0)]
        for name, dtype in (("data", self.dtype), ("indices", np.int32), ("indptr", np.int64)):
            _create(group, name, np.dtype(dtype))
        _append(group["indptr"], np.zeros(1, np.int64))

    def append(self, block: Block) -> None:
        shape = (len(block.indptr) - 1, len(self._match.source))
        whole = sparse.csr_matrix((block.data, block.indices, block.indptr), shape=shape)
        self.depth.append(np.asarray(whole.sum(axis=1, dtype=np.float64)).ravel())
        part = self._match.apply(whole)
        data = np.asarray(part.data)
        if self.dtype == np.float32 and (data.astype(np.float32) != data).any():
            self._widen()
        _append(self._group["data"], data.astype(self.dtype))
        _append(self._group["indices"], np.asarray(part.indices, np.int32))
        _append(self._group["indptr"], np.asarray(part.indptr[1:], np.int64) + self.num_values)
        self.num_values += len(data)

    def _widen(self) -> None:
        """Turn the values written so far into float64, a chunk at a time."""
        self.dtype = np.dtype(np.float64)
        old = self._group["data"]
        del self._group["data"]
        new = _create(self._group, "data", self.dtype)
        for start in range(0, self.num_values, _CHUNK):
            _append(new, old[start : start + _CHUNK].astype(self.dtype))

    def finish(self) -> None:
        """Make row pointers and column numbers of one type, which scikit-learn and with it scanpy wants."""
        name, dtype = ("indptr", np.int32) if self.num_values <= _INT32_MAX else ("indices", np.int64)
        old = self._group[name]
        del self._group[name]
        new = _create(self._group, name, np.dtype(dtype))
        for start in range(0, old.shape[0], _CHUNK):
            _append(new, old[start : start + _CHUNK].astype(dtype))


def _write_obs(root: Any, cells: CellSource, depth: np.ndarray) -> None:
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
        found = pd.Categorical(values)
        return found.remove_categories([""]) if "" in found.categories else found
    if pd.api.types.is_extension_array_dtype(values.dtype):
        return values.array
    return values.to_numpy()


def _create(group: Any, name: str, dtype: np.dtype) -> Any:
    return group.create_dataset(
        name,
        (0,),
        dtype,
        maxshape=(None,),
        chunks=(_CHUNK,),
        compression="gzip",
        compression_opts=1,
        shuffle=True,
    )


def _append(array: Any, values: np.ndarray) -> None:
    if len(values):
        start = array.shape[0]
        array.resize((start + len(values),))
        array[start:] = values
