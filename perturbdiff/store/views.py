"""Shows a store to other tools as AnnData, in memory or lazy, and as dask arrays that are read when needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import anndata
import dask.array as da
import h5py
import numpy as np
import pandas as pd
import zarr
from anndata._core.views import DaskArrayView
from anndata._io.specs.registry import _REGISTRY, IOSpec
from dask.array.dispatch import concatenate_lookup
from scipy import sparse

from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Rows, Store

Scale = Literal["log1p", "counts", "model"]
SCALES: tuple[Scale, ...] = ("log1p", "counts", "model")

_ROWS_PER_BLOCK = 65_536


class CSRRows(sparse.csr_matrix):
    """A CSR matrix with the reductions of a NumPy array.

    dask passes ``keepdims`` and tuples of axes to the blocks of an array, which scipy's matrices refuse. Without them,
    the reductions return what scipy's return.
    """

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, **keepdims: bool) -> Any:
        """Sum over ``axis``."""
        return self._shaped(super().sum(axis=_one(axis), dtype=dtype, out=out), axis, **keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, **keepdims: bool) -> Any:
        """Mean over ``axis``."""
        return self._shaped(super().mean(axis=_one(axis), dtype=dtype, out=out), axis, **keepdims)

    def max(self, axis: Any = None, out: Any = None, **keepdims: bool) -> Any:
        """Largest value over ``axis``."""
        return self._shaped(super().max(axis=_one(axis), out=out), axis, **keepdims)

    def min(self, axis: Any = None, out: Any = None, **keepdims: bool) -> Any:
        """Smallest value over ``axis``."""
        return self._shaped(super().min(axis=_one(axis), out=out), axis, **keepdims)

    def __sub__(self, other: Any) -> Any:
        """Subtract. With a dense array, the result is an array and not a matrix."""
        return self.toarray() - other if isinstance(other, np.ndarray) else super().__sub__(other)

    def _shaped(self, reduced: Any, axis: Any, *, keepdims: bool | None = None) -> Any:
        """Return a reduction over ``axis`` in scipy's shape, or in NumPy's shape if ``keepdims`` is given."""
        if keepdims is None:
            return reduced
        kept = _one(axis)
        values = reduced.toarray() if sparse.issparse(reduced) else np.asarray(reduced)
        if keepdims:
            rows, columns = self.get_shape()
            shape = (1, 1) if kept is None else (1, columns) if kept % 2 == 0 else (rows, 1)
            return values.reshape(shape)
        return values.reshape(()) if kept is None else values.reshape(-1)


def _one(axis: Any) -> int | None:
    """Return the one axis in a tuple of axes, or None if the tuple has both axes."""
    if isinstance(axis, tuple):
        return axis[0] if len(axis) == 1 else None
    return axis


@concatenate_lookup.register(CSRRows)
def _joined(blocks: Sequence[Any], axis: int = 0) -> CSRRows:
    return CSRRows((sparse.hstack if axis else sparse.vstack)(blocks, format="csr"))


def _write_csr(group: Any, key: str, rows: CSRRows, *, _writer: Any, dataset_kwargs: Any = None) -> None:
    _writer.write_elem(group, key, sparse.csr_matrix(rows), dataset_kwargs=dataset_kwargs or {})


def _write_blocks(group: Any, key: str, array: da.Array, *, _writer: Any, dataset_kwargs: Any = None) -> None:
    meta = sparse.csr_matrix((0, 0), dtype=array.dtype)
    plain = array.map_blocks(sparse.csr_matrix, dtype=array.dtype, meta=meta)
    _writer.write_elem(group, key, plain, dataset_kwargs=dataset_kwargs or {})


# anndata chooses how to write an object by its exact type, so it could not write a lazy view without these
for _group in (h5py.Group, zarr.Group):
    _SPEC = IOSpec("csr_matrix", "0.1.0")
    _REGISTRY.register_write(_group, CSRRows, _SPEC)(_write_csr)
    for _array in (da.Array, DaskArrayView):
        _REGISTRY.register_write(_group, (_array, CSRRows), _SPEC)(_write_blocks)  # type: ignore[arg-type]


def read_rows(store: Store, rows: Rows, scale: Scale = "log1p") -> sparse.csr_matrix:
    """Return rows of a store in the given units: float32 ``log1p`` or ``model`` (log1p / scale), or ``counts``."""
    if scale == "counts":
        return store.counts(rows)
    matrix = store.expression(rows)
    if scale == "model":
        matrix.data /= np.float32(store.scale)
    return matrix


def check_scale(store: Store, scale: str) -> Scale:
    """Return ``scale`` if the store can give it.

    Raises
    ------
    UserError
        If the unit does not exist, or if the store was made from log1p values and has no counts.
    """
    if scale not in SCALES:
        raise UserError(f"scale '{scale}': choose one of {', '.join(SCALES)}")
    if scale == "counts" and store.input_scale == "log1p":
        raise UserError(f"{store.path}: holds log1p values, no counts; ask for scale log1p or model")
    return scale


def to_dask(
    store: Store,
    *,
    rows: Rows | None = None,
    rows_per_block: int = _ROWS_PER_BLOCK,
    dense: bool = False,
    scale: Scale = "log1p",
) -> da.Array:
    """Return the cells as a dask array [n, G] in blocks of rows, each read from the store when it is computed.

    Parameters
    ----------
    store
        The store. Workers open it by its path.
    rows
        Row numbers in the order of the result, or a slice. None for all.
    rows_per_block
        Number of cells in a block.
    dense
        Return blocks of NumPy arrays instead of CSR.
    scale
        ``log1p`` (float32), ``model`` (log1p / scale) or ``counts``.

    Raises
    ------
    UserError
        If the store cannot give ``scale``.

    Notes
    -----
    Sparse blocks are `CSRRows`, so that reductions (sum, mean, var, max) work along any axis. ``var`` temporarily makes
    each block dense.
    """
    read = functools.partial(_block, path=store.path, dense=dense, scale=check_scale(store, scale))
    dtype = store.dtype if scale == "counts" else np.dtype(np.float32)
    meta = np.empty((0, 0), dtype) if dense else CSRRows((0, 0), dtype=dtype)
    chunks: Any = rows_per_block
    if rows is None:
        rows = slice(None)
    if isinstance(rows, slice) and rows.indices(store.n_cells)[2] == 1:
        first, stop, _ = rows.indices(store.n_cells)
        numbers: Any = da.arange(first, max(first, stop), chunks=chunks)
    else:
        numbers = da.from_array(store.row_numbers(rows), chunks=chunks)
    sizes = (numbers.chunks[0], (store.n_genes,))
    # a column vector, because each of its blocks becomes a block of all genes
    return numbers[:, None].map_blocks(read, chunks=sizes, dtype=dtype, meta=meta, name=None)


def _block(rows: np.ndarray, path: Path, *, dense: bool, scale: Scale) -> Any:
    """Read the block of the store rows ``rows`` [n, 1]."""
    store, numbers = opened(path), rows[:, 0]
    if dense and scale == "log1p":
        return store.dense(numbers)
    matrix = read_rows(store, numbers, scale)
    return matrix.toarray() if dense else CSRRows(matrix)


def opened(path: Path) -> Store:
    """Return the store at ``path``. A process opens it once for all its threads."""
    manifest = path / "manifest.json"
    return _opened(path, manifest.stat().st_mtime_ns if manifest.exists() else 0)


@functools.lru_cache(maxsize=2)
def _opened(path: Path, _stamp: int) -> Store:
    return Store(path)


def to_anndata(
    store: Store,
    *,
    lazy: bool = False,
    rows: Rows | None = None,
    scale: Scale = "log1p",
    columns: Sequence[str] | None = None,
    rows_per_block: int = _ROWS_PER_BLOCK,
) -> anndata.AnnData:
    """Return a store as one AnnData.

    Parameters
    ----------
    store
        The store.
    lazy
        Leave ``X`` on disk, as a dask array of CSR blocks that are read when something is computed. obs and var are
        always in memory.
    rows
        Row numbers in the order of the result, or a slice. None for all.
    scale
        Units of ``X``: ``log1p`` (float32), ``model`` (log1p / scale) or ``counts``.
    columns
        Columns of obs. None for all.
    rows_per_block
        Number of cells in a lazy block.

    Raises
    ------
    UserError
        If the store cannot give ``scale``, or a column does not exist.
    """
    check_scale(store, scale)
    names = None if columns is None else ["cell", *(c for c in columns if c != "cell")]
    obs = store.obs(names).set_index("cell")
    obs.index = obs.index.astype(object).rename(None)
    if rows is not None:
        obs = obs.iloc[store.row_numbers(rows)]
    if lazy:
        x: Any = to_dask(store, rows=rows, rows_per_block=rows_per_block, scale=scale)
    else:
        x = read_rows(store, slice(None) if rows is None else rows, scale)
    return anndata.AnnData(x, obs, pd.DataFrame(store.var), uns=facts(store, scale))


def facts(store: Store, scale: Scale) -> dict[str, Any]:
    """Return the uns of an AnnData made from a store. The key ``log1p`` tells scanpy that values are logarithms."""
    names = ("target_sum", "input_scale", "control", "seed")
    values = {name: getattr(store, name) for name in names}
    if np.isnan(store.target_sum):
        values.pop("target_sum")
    ours = {**values, "scale": scale, "divided_by": store.scale if scale == "model" else 1.0}
    return {"perturbdiff": ours, **({"log1p": {}} if scale == "log1p" else {})}
