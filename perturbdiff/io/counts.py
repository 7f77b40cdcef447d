"""Opening the inputs: files of raw counts (see `perturbdiff.io.layouts`), checked before anything is written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from perturbdiff.conditions.gene_names import read_aliases, unshared
from perturbdiff.config.settings import DataConfig
from perturbdiff.io.cell_filter import CellFilter, KeptCells
from perturbdiff.io.columns import Column, Texts, joined
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.derived_matrices import CscMatrix, LogValues, SummedColumns, innermost
from perturbdiff.io.input_file import InputFile
from perturbdiff.io.label_tables import JoinedTable, LabelTable, tables_for
from perturbdiff.io.opening import open_root
from perturbdiff.io.recognise import COUNTS, confusion, is_hdf5
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_PLACES, _ROWS = 8, 32
_SAME = 0.01
"""Largest difference of totals, as a share of their median, that rounding explains."""


class Doubts(NamedTuple):
    """What speaks against it: ``wrong`` if the values are something else, ``odd`` if totals differ; else empty."""

    wrong: str = ""
    odd: str = ""


def doubts(file: InputFile) -> Doubts:
    """Look at some rows of a file whose values are declared normalised.

    A matrix that is stored by columns is not looked at, because its rows cannot be read one by one.
    """
    matrix = file.matrix.source if isinstance(file.matrix, LogValues) else file.matrix
    if isinstance(innermost(matrix), CscMatrix):
        return Doubts()
    plain, exponential, whole = [], [], True
    starts = np.unique(np.linspace(0, max(0, file.n_cells - _ROWS), _PLACES).astype(np.int64)).tolist()
    for start in starts:
        for block in matrix.blocks(start, min(start + _ROWS, file.n_cells)):
            rows = block.as_csr(matrix.shape[1]).astype(np.float64)
            whole &= bool((rows.data == np.floor(rows.data)).all())
            plain.append(np.asarray(rows.sum(axis=1)).ravel())
            with np.errstate(over="ignore"):
                rows.data = np.expm1(rows.data)
            exponential.append(np.asarray(rows.sum(axis=1)).ravel())
    totals = np.concatenate(plain)
    totals = totals[totals > 0]
    if not len(totals):
        return Doubts()
    if whole:
        return Doubts(wrong="its values are whole numbers, as counts are; set data.input_scale=counts")
    if _one_total(totals):
        return Doubts()
    if _one_total(np.concatenate(exponential)):
        return Doubts(wrong="its values are logarithms of normalised values; set data.input_scale=log1p")
    return Doubts(
        odd=f"the totals of its cells differ ({totals.min():.4g} to {totals.max():.4g}), as if genes were left out "
        "after they were normalised"
    )


def _one_total(totals: np.ndarray) -> bool:
    positive = totals[totals > 0]
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(len(positive) and np.ptp(positive) <= _SAME * np.median(positive))


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
        names = set(genes)
        common &= names
        if names.isdisjoint(known) or (how == "intersection" and not common):
            raise UserError(
                f"{listing([n for n, _ in files], 3)}: {unshared(genes, first, name, files[0][0])}"
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
        names = set(genes)
        lacking = [gene for gene in every if gene not in names]
        if lacking:
            logger.warning(
                "%s: lacks %d of the %d genes of all files (%s); they count as 0 in its cells",
                name,
                len(lacking),
                len(every),
                listing(lacking, 4),
            )


class CountsFile(InputFile):
    """One input of raw counts.

    Attributes
    ----------
    config, scratch
        As given. With ``path`` they let another process open the file again, which passes ``checked`` because the
        file was checked here.
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
        self.config, self.scratch = config, scratch
        if not checked and not is_hdf5(path) and (other := confusion(path, "a file of counts", *COUNTS)):
            raise UserError(f"{path}: {other}; give h5ad, zarr, 10x h5 or Parquet files with raw counts")
        aliases = None if config.gene_aliases is None else read_aliases(Path(config.gene_aliases))
        root = open_root(path, checked=checked)
        super().__init__(
            path,
            root,
            layer=config.layer,
            gene_key=config.gene_key,
            scratch=scratch,
            duplicates=config.duplicate_genes,
            aliases=aliases,
        )
        if isinstance(self.matrix, SummedColumns) and config.input_scale == "log1p":
            self.close()
            raise UserError(
                f"{path}: data.duplicate_genes=sum adds up counts, but data.input_scale is log1p; give counts, or set "
                "data.duplicate_genes=first"
            )
        if config.input_scale == "normalised":
            self.matrix = LogValues(self.matrix)
        if not checked and self.declared.get("kind") == "predictions":
            self.close()
            raise UserError(
                f"{path}: this is a predictions file, not a file of counts (did you swap them?); give raw counts"
            )
        self._table = None
        if table is not None:
            try:
                self._table = JoinedTable(table, path, self.n_cells, self.cell_names)
            except BaseException:
                self.close()
                raise

    def _other_gene_names(self) -> str:
        with explain_damage(self.path):
            first, *others = self._layout.unique_keys() or [""]
        keep = "set data.duplicate_genes=sum (adds their counts) or first, or "
        if not first:
            return keep
        more = f" (or {listing(others)})" if others else ""
        return f"set data.gene_key={first}, whose names are{more}, or {keep}"

    @property
    def columns(self) -> list[str]:
        """Names of the obs columns, those of a table of labels among them."""
        further = [] if self._table is None else self._table.columns
        return list(dict.fromkeys([*super().columns, *further]))

    def open_column(self, name: str, role: str = "") -> Column:
        """Return obs column ``name``, to be read in pieces; ``role`` names the setting that asked for it.

        Raises
        ------
        UserError
            If there is no such column.
        """
        if self._table is not None and name in self._table.columns:
            return self._table.column(name)
        if not self.columns:
            raise UserError(
                f"{self.path}: no obs column '{name}' ({role}); the file has no labels of cells, give a table of them "
                "(--obs)"
            )
        return super().open_column(name, role)

    @property
    def unit(self) -> str:
        """What the values of `blocks` are: ``counts`` or ``log1p``."""
        return self.config.unit

    @cached_property
    def kept_cells(self) -> KeptCells | None:
        """The filter on cells, ``data.keep``; None: every cell is kept."""
        if self.config.keep is None:
            return None
        chosen, opened = CellFilter(self.config.keep), dict[str, Column]()

        def codes(name: str, start: int, stop: int, texts: Texts) -> np.ndarray:
            if name not in opened:
                opened[name] = self.open_column(name, "data.keep")
            return opened[name].codes(start, stop, texts)

        return KeptCells(chosen, str(self.path), self.columns, codes)

    def kept(self, start: int, stop: int) -> np.ndarray:
        """Return whether ``data.keep`` keeps each cell of rows ``start`` to ``stop``, bool."""
        return np.ones(stop - start, bool) if self.kept_cells is None else self.kept_cells.read(start, stop)

    def column(self, name: str, role: str = "") -> pd.Series:
        """Return a whole obs column: numbers, or a categorical of texts with '' for missing ones."""
        return joined([self.open_column(name, role)], [self.n_cells])


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
        if config.gene_aliases is not None:  # workers may run elsewhere
            config = config.model_copy(update={"gene_aliases": str(Path(config.gene_aliases).absolute())})
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
            self._check_scale(file)
            if config.gene_aliases is not None:
                some = file.num_renamed, len(file.genes)
                logger.info("%s: %d of %d genes are renamed (data.gene_aliases)", file.path, *some)
            if file.left_out:
                kinds = listing(f"{n} {kind}" for kind, n in file.left_out.items())
                logger.warning("%s: features that are not genes are left out (%s)", file.path, kinds)

    def _check_scale(self, file: CountsFile) -> None:
        """Refuse values that are declared normalised and are not, by some rows."""
        if self.config.input_scale != "normalised":
            return
        with explain_damage(file.path):
            found = doubts(file)
        at = f"{file.path}: data.input_scale is normalised, but"
        if found.wrong:
            self.close()
            raise UserError(f"{at} {found.wrong}")
        if found.odd:
            logger.warning("%s %s", at, found.odd)

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
