"""Opening the inputs: files of raw counts (h5ad, Zarr v2 and v3, 10x h5), checked before anything is written."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import h5py
import numpy as np
import pandas as pd

from perturbdiff.config.settings import DataConfig
from perturbdiff.io.columns import CheckedColumn, Column, JoinedTable, LabelTable, joined, tables_for
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.layouts import find_layout
from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block
from perturbdiff.io.opening import open_root
from perturbdiff.runtime.errors import UserError, listing, nearest

logger = logging.getLogger(__name__)


def join_genes(files: Sequence[tuple[str, list[str]]], how: Literal["intersection", "union"]) -> list[str]:
    """Return the genes to read from several files.

    Parameters
    ----------
    files
        Name and genes of each file, without repeats.
    how
        ``intersection``: genes that every file has, in the order of the first. ``union``: genes that any has,
        those of the first file first, then what each next one adds, in its order.

    Raises
    ------
    UserError
        If a file has no gene in common with those before it.
    """
    first = files[0][1]
    known = dict.fromkeys(first)
    common = set(first)
    for name, genes in files[1:]:
        own = set(genes)
        common &= own
        if own.isdisjoint(known) or (how == "intersection" and not common):
            raise UserError(
                f"{listing([n for n, _ in files], 3)}: have no gene in common ({files[0][0]}: {listing(first, 2)}; "
                f"{name}: {listing(genes, 2)}); give files with the same kind of gene names, or name the genes of all "
                "by a var column that all have (data.gene_key)"
            )
        known |= dict.fromkeys(genes)
    if how == "union":
        _warn_lacking(files, list(known))
        return list(known)
    if len(known) > len(common):
        logger.warning(
            "the files differ in their genes: the %d that all have are used, %d are left out (%s)",
            len(common),
            len(known) - len(common),
            listing(sorted(set(known) - common), 4),
        )
    return [gene for gene in first if gene in common]


def _warn_lacking(files: Sequence[tuple[str, list[str]]], every: Sequence[str]) -> None:
    for name, genes in files:
        own = set(genes)
        lacking = [gene for gene in every if gene not in own]
        if lacking:
            logger.warning(
                "%s: lacks %d of the %d genes of all files (%s); they count as 0 in its cells",
                name,
                len(lacking),
                len(every),
                listing(lacking, 4),
            )


class CountsFile:
    """One input: its matrix by row blocks, its gene names and its obs columns, read on demand.

    Attributes
    ----------
    path
        The file or Zarr folder.
    genes
        Names of the genes, the columns of the blocks.
    n_cells
        Number of rows.
    matrix
        The values; ``matrix.num_values`` of them are stored.
    left_out
        Number of features that are not genes, by their type (10x files).
    config, scratch
        As given: with ``path``, all that another process needs to open the file again; it says ``checked``, for the
        file was looked at.
    """

    def __init__(
        self,
        path: Path,
        config: DataConfig,
        scratch: Path,
        table: LabelTable | None = None,
        *,
        checked: bool = False,
    ) -> None:
        self.path, self.config, self.scratch, self._checked = path, config, scratch, checked
        self._stack = contextlib.ExitStack()
        try:
            with explain_damage(path):
                self._layout = find_layout(path, self._open(), config.layer)
                self.n_cells, self.left_out = self._layout.n_cells, self._layout.left_out
                self.genes = self._layout.gene_names(config.gene_key)
                self.matrix = self._layout.matrix(scratch)
            self._check()
            self._table = None if table is None else JoinedTable(table, path, self.n_cells, self.cell_names)
        except BaseException:
            self.close()
            raise

    def _open(self) -> Any:
        root = open_root(self.path, checked=self._checked)
        if isinstance(root, h5py.File):
            self._stack.callback(root.close)
        return root

    def _check(self) -> None:
        if self.n_cells == 0 or not self.genes:
            raise UserError(
                f"{self.path}: has {self.n_cells} cells and {len(self.genes)} genes; nothing to read"
            )
        shape = (self.n_cells, len(self.genes))
        if self.matrix.shape != shape:
            layer = self.config.layer
            raise UserError(f"{self.path}: {layer} has shape {self.matrix.shape}, obs and var say {shape}")
        names = pd.Index(self.genes)
        if not names.is_unique:
            twice = names[names.duplicated()].unique()
            with explain_damage(self.path):
                keys = self._layout.unique_keys()
            other = f"set data.gene_key={keys[0]}, whose names are, or " if keys else ""
            other = (
                other.replace("names are", f"names are (or {listing(keys[1:])})") if len(keys) > 1 else other
            )
            raise UserError(
                f"{self.path}: gene names are not unique ({listing(twice, 4)}); {other}"
                "make them so with AnnData.var_names_make_unique() or merge these genes"
            )

    @property
    def columns(self) -> list[str]:
        """Names of the obs columns, those of a table of labels among them."""
        own = self._layout.obs_columns()
        return own if self._table is None else list(dict.fromkeys([*own, *self._table.columns]))

    def open_column(self, name: str, role: str) -> Column:
        """Return obs column ``name``, to be read in pieces; ``role`` names the setting that asked for it.

        Raises
        ------
        UserError
            If there is no such column.
        """
        if self._table is not None and name in self._table.columns:
            return self._table.column(name)
        if name not in self.columns:
            hint = nearest(name, self.columns) or "; columns: " + listing(self.columns)
            if not self.columns:
                hint = "; the file has no labels of cells, give a table of them (--obs)"
            raise UserError(f"{self.path}: no obs column '{name}' ({role}){hint}")
        with explain_damage(self.path):
            return CheckedColumn(self.path, self._layout.obs_column(name))

    def column(self, name: str, role: str) -> pd.Series:
        """Return a whole obs column: numbers, or a categorical of texts with '' for missing ones."""
        return joined([self.open_column(name, role)], [self.n_cells])

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the obs names of rows ``start`` to ``stop`` as an object array of str."""
        with explain_damage(self.path):
            return self._layout.cell_names(start, stop)

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

    Parameters
    ----------
    paths
        The files.
    config
        What their columns mean.
    scratch
        Folder for what `CountsFile.prepare` makes; file ``k`` has ``input-<k, 4 digits>`` there.
    obs
        Tables of cell labels: none, one for all files, or one each in their order.

    Attributes
    ----------
    files
        The opened files, in the order given.
    genes
        Their genes together, by ``config.join_genes``; see `perturbdiff.io.counts`.
    offsets
        Global row of each file's first cell, and the number of cells at the end.
    """

    def __init__(
        self, paths: Sequence[Path], config: DataConfig, scratch: Path, obs: Sequence[Path] = ()
    ) -> None:
        if not paths:
            raise UserError("no input file given")
        twice = [str(p) for p, n in Counter(Path(p).resolve() for p in paths).items() if n > 1]
        if twice:
            raise UserError(f"{twice[0]}: given twice; give each input once")
        self.config = config
        self.files: list[CountsFile] = []
        tables = tables_for(len(paths), obs)
        try:
            for number, (path, table) in enumerate(zip(paths, tables, strict=True)):
                self.files.append(CountsFile(Path(path), config, scratch / f"input-{number:04d}", table))
            self.genes = join_genes([(f.path.name, f.genes) for f in self.files], config.join_genes)
        except BaseException:
            self.close()
            raise
        self.offsets = np.cumsum([0, *(f.n_cells for f in self.files)])
        for file in self.files:
            if file.left_out:
                kinds = listing(f"{n} {kind}" for kind, n in file.left_out.items())
                logger.warning("%s: features that are not genes are left out (%s)", file.path, kinds)

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
