"""One opened input: its genes, its values by row blocks and its obs columns, read on demand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from perturbdiff.conditions.gene_names import renamed
from perturbdiff.io.columns import CheckedColumn, Column, whole_column
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.derived_matrices import Duplicates, one_column_per_gene
from perturbdiff.io.layouts import declared, find_layout
from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block
from perturbdiff.runtime.errors import UserError, listing, nearest

_NAMED_GENES = 4


class InputFile:
    """An opened file that was looked at: it has cells, and genes of different names that fit its values.

    Parameters
    ----------
    path
        The file or Zarr folder.
    root
        What `open_root` returns for it; it is closed with this object, and if it is refused.
    layer
        Where the values are: ``X``, ``raw`` or ``layers/NAME``.
    gene_key
        var column with the names of genes; None: as the file has them.
    scratch
        Folder for what a matrix needs that is put in row order.
    may_be_empty
        Whether a file without cells is no mistake.
    duplicates
        What becomes of genes with one name: an error, their sum, or the first of them.
    aliases
        Symbol of each alias, by which genes are renamed.

    Attributes
    ----------
    path
        The file or Zarr folder.
    genes
        Names of the genes, the columns of the values.
    n_cells
        Number of rows.
    matrix
        The values; ``matrix.num_values`` of them are stored.
    num_renamed
        Number of genes that have an alias as their name in the file.
    left_out
        Number of features that are not genes, by their type (10x files).

    Raises
    ------
    UserError
        If the file is of another kind, damaged or empty, or has a gene name twice.
    """

    def __init__(
        self,
        path: Path,
        root: Any,
        *,
        layer: str = "X",
        gene_key: str | None = None,
        scratch: Path = Path(),
        may_be_empty: bool = False,
        duplicates: Duplicates = "error",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self._root = path, root
        try:
            with explain_damage(path):
                self._layout = find_layout(path, root, layer)
                self.n_cells, self.left_out = self._layout.n_cells, self._layout.left_out
                names, matrix = self._layout.gene_names(gene_key), self._layout.matrix(scratch)
                self.num_renamed = sum(name in (aliases or {}) for name in names)
                names = (
                    renamed(path, names, aliases or {}, may_join=duplicates != "error") if aliases else names
                )
                self.genes, self.matrix = one_column_per_gene(names, matrix, duplicates)
            self._check(layer, may_be_empty=may_be_empty)
        except BaseException:
            self.close()
            raise

    def _check(self, layer: str, *, may_be_empty: bool) -> None:
        shape = (self.n_cells, len(self.genes))
        if not all(shape) and not may_be_empty:
            raise UserError(f"{self.path}: has {shape[0]} cells and {shape[1]} genes; nothing to read")
        if self.matrix.shape != shape:
            raise UserError(f"{self.path}: {layer} has shape {self.matrix.shape}, obs and var say {shape}")
        names = pd.Index(self.genes)
        if not names.is_unique:
            repeated = listing(names[names.duplicated()].unique(), _NAMED_GENES)
            raise UserError(
                f"{self.path}: gene names are not unique ({repeated}); {self._other_gene_names()}make them so with "
                "AnnData.var_names_make_unique() or merge these genes"
            )

    def _other_gene_names(self) -> str:
        """Return what to do instead of renaming genes, with ', or' at its end; empty if there is nothing."""
        return ""

    @property
    def columns(self) -> list[str]:
        """Names of the obs columns."""
        return self._layout.obs_columns()

    @property
    def places(self) -> list[str]:
        """Where the file has matrices: ``X``, ``raw``, ``layers/NAME``."""
        return self._layout.places()

    def open_column(self, name: str, role: str = "") -> Column:
        """Return obs column ``name``, to be read in pieces; ``role`` names the setting that asked for it.

        Raises
        ------
        UserError
            If there is no such column.
        """
        if name not in self.columns:
            hint = nearest(name, self.columns) or f"; columns: {listing(self.columns)}"
            raise UserError(f"{self.path}: no obs column '{name}'{role and f' ({role})'}{hint}")
        with explain_damage(self.path):
            return CheckedColumn(self.path, self._layout.obs_column(name))

    def gene_column(self, name: str) -> np.ndarray:
        """Return column ``name`` of an AnnData's var."""
        with explain_damage(self.path):
            return whole_column(self._root["var"][name])

    @cached_property
    def declared(self) -> dict[str, Any]:
        """What ``uns["perturbdiff"]`` says: texts, numbers and lists of these."""
        with explain_damage(self.path):
            return declared(self._root)

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the obs names of rows ``start`` to ``stop`` as an object array of str."""
        with explain_damage(self.path):
            return self._layout.cell_names(start, stop)

    def cell_name(self, row: int) -> str:
        """Return the obs name of a row."""
        return str(self.cell_names(row, row + 1)[0])

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
        if isinstance(self._root, h5py.File):
            self._root.close()
