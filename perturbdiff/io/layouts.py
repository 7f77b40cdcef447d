"""Finds values, genes and labels in AnnData (h5ad, Zarr v2 and v3), MuData, 10x h5 files and Parquet of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from perturbdiff.io.columns import Column, num_entries, open_column, whole_column
from perturbdiff.io.derived_matrices import CscMatrix
from perturbdiff.io.matrices import (
    CsrMatrix,
    DenseMatrix,
    RowMatrix,
    SomeColumns,
    check_pointers,
    some_values,
)
from perturbdiff.io.token_layout import layout_of
from perturbdiff.io.token_parquet import TokenParquet
from perturbdiff.runtime.errors import UserError, listing, nearest

_GENES = "Gene Expression"
_OBSM = "obsm/"
_RNA = ("rna", "gex")
"""Names of gene expression in MuData."""


class Layout(Protocol):
    """How an opened file is read."""

    n_cells: int

    @property
    def left_out(self) -> Mapping[str, int]:
        """Number of features that are not genes, by their type."""
        ...

    def gene_names(self, key: str | None) -> list[str]:
        """Return the names of the genes by the var column ``key``, or as the file has them."""
        ...

    def unique_keys(self) -> list[str]:
        """Return the values of ``key`` that give all genes different names."""
        ...

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the names of cells as an object array of str."""
        ...

    def obs_columns(self) -> list[str]:
        """Return the names of the columns of obs."""
        ...

    def obs_column(self, name: str) -> Column:
        """Return one of them."""
        ...

    def matrix(self, scratch: Path) -> RowMatrix:
        """Return the values, cells in rows."""
        ...

    def places(self) -> list[str]:
        """Return where values are stored: ``X``, ``raw`` and ``layers/NAME``, as far as the file has them."""
        ...

    def some_values(self, place: str) -> np.ndarray:
        """Return some of the values stored at a place, float64."""
        ...


def find_layout(path: Path, root: Any, layer: str) -> Layout:
    """Return the layout of an opened file.

    Raises
    ------
    UserError
        If it is neither AnnData nor a 10x file, or has no such ``layer``.
    """
    if isinstance(root, TokenParquet):
        if layer != "X":
            raise UserError(
                f"{path}: Parquet files of cells have one matrix, not '{layer}'; set data.layer=X"
            )
        return layout_of(root)
    if "mod" in root:
        root = _modality(path, root["mod"])
    if "obs" in root and "var" in root:
        return _AnnData(path, root, layer)
    groups = {name: root[name] for name in root if hasattr(root[name], "keys")}
    tenx = {
        name: g for name, g in groups.items() if {"barcodes", "data", "indices", "indptr", "shape"} <= set(g)
    }
    if not tenx:
        raise UserError(f"{path}: is not an AnnData file (no obs and var), nor an h5 file of 10x Genomics")
    if len(tenx) > 1:
        raise UserError(
            f"{path}: has several genomes ({listing(tenx, 4)}); keep one of them and write the file again"
        )
    if layer != "X":
        raise UserError(f"{path}: a 10x file has one matrix, not '{layer}'; set data.layer=X")
    return _TenX(path, *tenx.values())


def _modality(path: Path, parts: Any) -> Any:
    """Return the AnnData of gene expression in a MuData file: the only one, or the one of a usual name."""
    names = list(parts)
    chosen = names if len(names) == 1 else [name for name in names if name.lower() in _RNA]
    if len(chosen) != 1:
        raise UserError(
            f"{path}: is a MuData file of {listing(names)}, none or several of them called {listing(_RNA)}; write the "
            "part with gene expression as h5ad"
        )
    return parts[chosen[0]]


def declared(root: Any) -> dict[str, Any]:
    """Return what ``uns["perturbdiff"]`` of an opened file says: texts, numbers and lists of these."""
    group = root["uns"]["perturbdiff"] if "uns" in root and "perturbdiff" in root["uns"] else {}
    facts: dict[str, Any] = {}
    for name in group:
        element = group[name]
        if hasattr(element, "keys") or element.shape is None:
            continue
        value = element[()] if element.shape == () else element[:]
        values = [v.decode() if isinstance(v, bytes) else v for v in np.atleast_1d(value).tolist()]
        facts[str(name)] = values[0] if element.shape == () else values
    return facts


def _texts(values: Any) -> list[str]:
    return [v.decode() if isinstance(v, bytes) else str(v) for v in np.asarray(values, object).tolist()]


class _AnnData:
    """AnnData in HDF5 or Zarr."""

    left_out: Mapping[str, int] = {}

    def __init__(self, path: Path, root: Any, layer: str) -> None:
        self._path, self._root, self._layer = path, root, _full_name(root, layer)
        for frame in ("obs", "var"):
            if not hasattr(root[frame], "keys"):
                raise UserError(
                    f"{path}: written by anndata older than 0.7; read and write it again with a newer one"
                )
        if self._layer == "raw" and "raw" not in root:
            raise UserError(f"{path}: has no raw; data.layer can be {listing(self.places())}")
        self._var = root["raw/var" if self._layer == "raw" else "var"]
        self._cells = _index(root["obs"])
        self.n_cells = num_entries(self._cells)

    def gene_names(self, key: str | None) -> list[str]:
        index = str(self._var.attrs["_index"])
        if key is not None and key != index and key not in self._var:
            columns = _columns(self._var)
            hint = (
                nearest(key, columns) or "; columns: " + listing(columns)
                if columns
                else "; it has no columns"
            )
            raise UserError(f"{self._path}: no var column '{key}' (data.gene_key){hint}")
        values = pd.Series(whole_column(self._var[index if key is None else key])).astype(object)
        missing = values.isna() | (values == "")
        if key is not None and missing.any():
            row = int(np.flatnonzero(missing)[0])
            raise UserError(
                f"{self._path}: var column '{key}' (data.gene_key) has no name for {int(missing.sum())} genes (first: "
                f"gene '{self.gene_names(None)[row]}'); fill it in or choose another column"
            )
        names = _texts(values)
        return self._of_obsm(names) if self._layer.startswith(_OBSM) else names

    def _of_obsm(self, names: list[str]) -> list[str]:
        """Return the genes of a matrix in obsm: those that uns lists, or the highly variable ones of var."""
        place = self._layer.removeprefix(_OBSM)
        if self._layer not in self._root:
            return []  # `matrix` says that it is not there
        shape = getattr(self._root[self._layer], "shape", None) or self._root[self._layer].attrs.get(
            "shape", ()
        )
        width = int(shape[1]) if len(shape) == 2 else 0
        listed = f"uns/{place}_genes"
        if listed in self._root and getattr(self._root[listed], "shape", ()) == (width,):
            known = _texts(whole_column(self._root[listed]))
        elif "highly_variable" in self._var:
            chosen = whole_column(self._var["highly_variable"]).astype(bool)
            known = [name for name, one in zip(names, chosen, strict=True) if one]
        else:
            known = names if len(names) == width else []
        if len(known) != width:
            raise UserError(
                f"{self._path}: the genes of the {width} columns of {self._layer} are not known: neither uns"
                f"['{place}_genes'] nor var['highly_variable'] names {width}; write their names, in the order of the "
                f"columns, to uns['{place}_genes']"
            )
        return known

    def unique_keys(self) -> list[str]:
        keys = []
        for name in _columns(self._var):
            values = pd.Series(whole_column(self._var[name]))
            text = not pd.api.types.is_numeric_dtype(values.dtype)
            if text and values.is_unique and not values.isna().any():
                keys.append(name)
        return keys

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        if hasattr(self._cells, "keys"):  # nullable or categorical
            return np.array(_texts(open_column(self._cells).values(start, stop)), object)
        return np.array(_texts(self._cells[start:stop]), object)

    def obs_columns(self) -> list[str]:
        return _columns(self._root["obs"])

    def obs_column(self, name: str) -> Column:
        element = self._root["obs"][name]
        if (length := num_entries(element)) != self.n_cells:
            raise ValueError(f"obs column '{name}' has {length} entries for {self.n_cells} cells")
        return open_column(element)

    def places(self) -> list[str]:
        have = [name for name, place in (("X", "X"), ("raw", "raw/X")) if place in self._root]
        return [*have, *(f"layers/{name}" for name in _layers(self._root))]

    def matrix(self, scratch: Path) -> RowMatrix:
        place = "raw/X" if self._layer == "raw" else self._layer
        if place not in self._root:
            have = [name.removeprefix("layers/") for name in self.places()]
            hint = nearest(self._layer.removeprefix("layers/"), have)
            raise UserError(
                f"{self._path}: has no '{self._layer}'{hint or ';'} data.layer can be {listing(have)}"
            )
        element = self._root[place]
        if not hasattr(element, "keys"):
            return DenseMatrix(element)
        kind = element.attrs.get("encoding-type", element.attrs.get("h5sparse_format", "csr"))
        shape = element.attrs.get("shape", element.attrs.get("h5sparse_shape"))
        if shape is None:
            raise UserError(f"{self._path}: {self._layer} is not a matrix")
        size = (int(shape[0]), int(shape[1]))
        check_pointers(element, size)
        return CscMatrix(element, size, scratch) if str(kind).startswith("csc") else CsrMatrix(element, size)

    def some_values(self, place: str) -> np.ndarray:
        return some_values(self._root["raw/X" if place == "raw" else _full_name(self._root, place)])


def _layers(root: Any) -> list[str]:
    return list(root["layers"]) if "layers" in root else []


def _full_name(root: Any, layer: str) -> str:
    """Return where a layer is: ``counts`` means ``layers/counts`` if there is one, ``raw.X`` and ``raw/X`` mean raw."""
    if layer in ("raw.X", "raw/X"):
        return "raw"
    return f"layers/{layer}" if layer != "X" and layer in _layers(root) else layer


def _keys(element: Any) -> list[str]:
    return list(element.keys()) if hasattr(element, "keys") else []


def _index(frame: Any) -> Any:
    return frame[frame.attrs["_index"]]


def _columns(frame: Any) -> list[str]:
    order = frame.attrs.get("column-order")
    hidden = (frame.attrs["_index"], "__categories")
    return [str(c) for c in (frame.keys() if order is None else order) if c not in hidden]


class _TenX:
    """Cell Ranger's h5: features x barcodes by columns, which is cells x genes by rows.

    Version 3 has a group ``features`` with ``id``, ``name``, ``feature_type``; before, each genome was a group
    with ``genes`` (ids) and ``gene_names``.
    """

    _OLD = {"id": "genes", "name": "gene_names"}  # noqa: RUF012

    def __init__(self, path: Path, group: Any) -> None:
        self._path, self._group = path, group
        self.n_cells = int(group["barcodes"].shape[0])
        types = self._feature("feature_type") if self._new and "feature_type" in group["features"] else None
        self._is_gene = None if types is None else np.array([t == _GENES for t in types])
        self.left_out = Counter(t for t in types or () if t != _GENES)

    @property
    def _new(self) -> bool:
        return "features" in self._group

    def _feature(self, key: str) -> list[str]:
        place = self._group["features"] if self._new else self._group
        name = key if self._new else self._OLD.get(key, key)
        if name not in place:
            have = _keys(place) if self._new else self._OLD
            have = [k for k in have if not self._new or place[k].shape == place["id"].shape]
            hint = nearest(key, have) or "; it can be " + listing(have)
            raise UserError(f"{self._path}: a 10x file has no '{key}' of genes (data.gene_key){hint}")
        return _texts(place[name][:])

    def gene_names(self, key: str | None) -> list[str]:
        names = self._feature(key or "name")
        return (
            names
            if self._is_gene is None
            else [n for n, kept in zip(names, self._is_gene, strict=True) if kept]
        )

    def unique_keys(self) -> list[str]:
        return [key for key in ("id", "name") if len(set(names := self.gene_names(key))) == len(names)]

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        return np.array(_texts(self._group["barcodes"][start:stop]), object)

    def obs_columns(self) -> list[str]:
        return []

    def obs_column(self, name: str) -> Column:
        raise KeyError(name)

    def matrix(self, scratch: Path) -> RowMatrix:
        del scratch
        features, cells = (int(n) for n in self._group["shape"][:])
        check_pointers(self._group, (cells, features))
        matrix = CsrMatrix(self._group, (cells, features))
        if self._is_gene is None or self._is_gene.all():
            return matrix
        return SomeColumns(matrix, self._is_gene)

    def places(self) -> list[str]:
        return ["X"]

    def some_values(self, place: str) -> np.ndarray:
        del place
        return some_values(self._group)
