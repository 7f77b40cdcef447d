"""Opening the inputs: AnnData files of raw counts (h5ad, or Zarr v2 and v3), checked before anything is written."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import zarr

from perturbdiff.config import DataConfig
from perturbdiff.data.matrices import VALUES_PER_BLOCK, Block, CscMatrix, CsrMatrix, DenseMatrix, RowMatrix
from perturbdiff.errors import UserError, listing, nearest

logger = logging.getLogger(__name__)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn what h5py and zarr raise for an incomplete or damaged file into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: cannot be read, it is damaged or incomplete ({reason}); copy or make the file again"
        ) from error


class CountsFile:
    """One input: its matrix by row blocks, its gene names and its obs columns, read on demand.

    Attributes
    ----------
    path
        The file or Zarr folder.
    genes
        Names of the matrix's columns.
    n_cells
        Number of rows.
    matrix
        The values; ``matrix.num_values`` of them are stored.
    config, scratch
        As given: with ``path``, all that another process needs to open the file again.
    """

    def __init__(self, path: Path, config: DataConfig, scratch: Path) -> None:
        self.path, self.config, self.scratch = path, config, scratch
        layer = config.layer
        self._stack = contextlib.ExitStack()
        with explain_damage(path):
            self._root: Any = self._open()
            self.genes = self._names("raw/var" if layer == "raw" else "var")
            self._cells = self._index("obs")
            self.n_cells = int(self._cells.shape[0])
            self.matrix = self._matrix(layer, scratch)
        if self.n_cells == 0 or not self.genes:
            raise UserError(f"{path}: has {self.n_cells} cells and {len(self.genes)} genes; nothing to read")
        shape = (self.n_cells, len(self.genes))
        if self.matrix.shape != shape:
            raise UserError(f"{path}: {layer} has shape {self.matrix.shape}, obs and var say {shape}")
        self._check_gene_names()

    def _open(self) -> Any:
        if not self.path.exists():
            raise UserError(f"input not found: {self.path}")
        if self.path.is_dir():
            try:
                root: Any = zarr.open_group(self.path, mode="r")
            except (FileNotFoundError, ValueError):
                raise UserError(f"{self.path}: is not an AnnData Zarr store or h5ad file") from None
        else:
            if self.path.stat().st_size == 0:
                raise UserError(f"{self.path}: is empty (0 bytes); copy or make the file again")
            with self.path.open("rb") as handle:
                if handle.read(8) != b"\x89HDF\r\n\x1a\n":
                    raise UserError(f"{self.path}: is not an h5ad file (no HDF5 signature)")
            root = self._stack.enter_context(h5py.File(self.path, "r", rdcc_nbytes=0))
        if "obs" not in root or "var" not in root:
            raise UserError(f"{self.path}: is not an AnnData file (no obs and var)")
        if not hasattr(root["obs"], "keys"):
            raise UserError(
                f"{self.path}: written by anndata older than 0.7; read and write it again with a newer one"
            )
        return root

    def _index(self, frame: str) -> Any:
        group = self._root[frame]
        return group[group.attrs["_index"]]

    def _names(self, frame: str) -> list[str]:
        if frame not in self._root:
            raise UserError(f"{self.path}: has no raw; set data.layer to X or to layers/NAME")
        group = self._root[frame]
        return [str(n) for n in np.asarray(anndata.io.read_elem(group[group.attrs["_index"]]), object)]

    def _matrix(self, layer: str, scratch: Path) -> RowMatrix:
        place = "raw/X" if layer == "raw" else layer
        if place not in self._root:
            have = [n for n in ("X", "raw") if n in self._root]
            have += [f"layers/{n}" for n in self._root.get("layers", {})]
            raise UserError(
                f"{self.path}: has no '{layer}'{nearest(layer, have)} data.layer can be: {listing(have)}"
            )
        element = self._root[place]
        if not hasattr(element, "keys"):
            return DenseMatrix(element)
        kind = element.attrs.get("encoding-type", element.attrs.get("h5sparse_format", "csr"))
        shape = element.attrs.get("shape", element.attrs.get("h5sparse_shape"))
        if shape is None:
            raise UserError(f"{self.path}: {layer} is not a matrix")
        size = (int(shape[0]), int(shape[1]))
        return CscMatrix(element, size, scratch) if str(kind).startswith("csc") else CsrMatrix(element, size)

    def _check_gene_names(self) -> None:
        names = pd.Index(self.genes)
        if not names.is_unique:
            twice = names[names.duplicated()].unique()
            raise UserError(
                f"{self.path}: gene names are not unique ({listing(twice, 4)}); "
                "make them so with AnnData.var_names_make_unique() or merge these genes"
            )

    @property
    def columns(self) -> list[str]:
        """Names of the obs columns."""
        obs = self._root["obs"]
        order = obs.attrs.get("column-order")
        return [str(c) for c in (obs.keys() if order is None else order) if c != obs.attrs["_index"]]

    def column(self, name: str, role: str) -> pd.Series:
        """Return obs column ``name``; ``role`` names the setting that asked for it.

        Raises
        ------
        UserError
            If there is no such column or it has missing values.
        """
        if name not in self.columns:
            hint = nearest(name, self.columns) or "; columns: " + listing(self.columns)
            raise UserError(f"{self.path}: no obs column '{name}' ({role}){hint}")
        with explain_damage(self.path):
            values = pd.Series(anndata.io.read_elem(self._root["obs"][name]))
        return values

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the obs names of rows ``start`` to ``stop`` as an object array of str."""
        with explain_damage(self.path):
            index = self._cells
            if hasattr(index, "keys"):  # a nullable or categorical index: rare, read whole
                return np.asarray(anndata.io.read_elem(index), object)[start:stop]
            names = index[start:stop]
        return np.array([n.decode() if isinstance(n, bytes) else str(n) for n in names], object)

    def prepare(self) -> None:
        """Do what must be done once before `blocks` in any process: turn a CSC matrix into row order."""
        with explain_damage(self.path):
            self.matrix.prepare()

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive blocks of rows ``start`` to ``stop`` (default: the last).

        Raises
        ------
        UserError
            If a piece of the file is damaged.
        RuntimeError
            If the matrix needs `prepare` first.
        """
        rows = self.matrix.blocks(start, stop, limit)
        with contextlib.closing(rows) as blocks:  # type: ignore[type-var]
            while True:
                with explain_damage(self.path):
                    block = next(blocks, None)
                if block is None:
                    return
                yield block

    def close(self) -> None:
        """Close the file."""
        self._stack.close()


class Inputs:
    """All input files of a store, with their genes aligned by name.

    Attributes
    ----------
    files
        The opened files, in the order given.
    genes
        Genes that every file has, in the order of the first file.
    offsets
        Global row of each file's first cell, and the number of cells at the end.
    """

    def __init__(self, paths: Sequence[Path], config: DataConfig, scratch: Path) -> None:
        if not paths:
            raise UserError("no input file given")
        twice = [str(p) for p, n in Counter(Path(p).resolve() for p in paths).items() if n > 1]
        if twice:
            raise UserError(f"{twice[0]}: given twice; give each input once")
        self.config = config
        self.files: list[CountsFile] = []
        try:
            for number, path in enumerate(paths):
                self.files.append(CountsFile(Path(path), config, scratch / f"input-{number:04d}"))
        except BaseException:
            self.close()
            raise
        self.offsets = np.cumsum([0, *(f.n_cells for f in self.files)])
        self.genes = _shared_genes(self.files)

    @property
    def n_cells(self) -> int:
        """Number of cells in all files."""
        return int(self.offsets[-1])

    def columns_of(self, file: CountsFile, genes: Sequence[str]) -> np.ndarray:
        """Return for each column of ``file`` its place in ``genes``, -1 if it is not there (int32)."""
        return pd.Index(genes).get_indexer(pd.Index(file.genes)).astype(np.int32)

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Inputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shared_genes(files: Sequence[CountsFile]) -> list[str]:
    first = files[0].genes
    common = set(first).intersection(*(f.genes for f in files[1:]))
    if not common:
        names = listing([f.path.name for f in files], 3)
        raise UserError(f"{names}: have no gene in common; give files with the same kind of gene names")
    every = set(first).union(*(f.genes for f in files[1:]))
    if len(every) > len(common):
        logger.warning(
            "the files differ in their genes: the %d that all have are used, %d are left out (%s)",
            len(common),
            len(every) - len(common),
            listing(sorted(every - common), 4),
        )
    return [g for g in first if g in common]
