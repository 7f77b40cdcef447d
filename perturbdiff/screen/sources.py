"""A screen in a file or in memory, as far as one has to look at it: what it holds, and the cells of its conditions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import ALL, LABELS, sort_conditions
from perturbdiff.io.cell_filter import CellFilter, KeptCells, unknown_values
from perturbdiff.io.columns import MISSING, Column, Numbering, Texts, codes_of, row_ranges
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.label_tables import JoinedTable, tables_for
from perturbdiff.io.layouts import find_layout
from perturbdiff.io.matrices import some_values
from perturbdiff.io.opening import open_root
from perturbdiff.runtime.errors import UserError

if TYPE_CHECKING:
    from anndata import AnnData

_MOST_LABELS = 50_000
_ENOUGH_CELLS = 200  # with fewer, a column of different labels may still be a column of labels


@dataclass(frozen=True)
class Labels:
    """The labels of one obs column.

    Attributes
    ----------
    name
        The column.
    names
        Its different labels, in the order of their first cells. Labels without cells are left out.
    counts
        Number of cells of each label, int64.
    missing
        Number of cells without a label.
    """

    name: str
    names: list[str]
    counts: np.ndarray
    missing: int

    def shown(self) -> str:
        """Return the most frequent labels with their cells, for messages."""
        order = np.argsort(-self.counts, kind="stable")[:4]
        some = ", ".join(f"{self.names[k]} ({self.counts[k]} cells)" for k in order)
        return some + (f", … ({len(self.names) - len(order)} more)" if len(self.names) > len(order) else "")


class Source(Protocol):
    """What is read of a screen before anything is decided.

    Attributes
    ----------
    shown
        Its name in messages.
    n_cells
        Number of cells.
    """

    shown: str
    n_cells: int

    def columns(self) -> list[str]:
        """Return the names of the obs columns."""
        ...

    def codes(self, name: str, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return the number of each cell's label in ``texts``, int32, `MISSING` if it has none."""
        ...

    def is_fractional(self, name: str) -> bool:
        """Return whether a column holds numbers that are not whole, so that it has no labels."""
        ...

    def places(self) -> list[str]:
        """Return where values are stored: ``X``, ``raw`` and ``layers/NAME``."""
        ...

    def some_values(self, place: str) -> np.ndarray:
        """Return some of the values stored at a place, float64."""
        ...

    def gene_names(self, place: str, key: str | None) -> list[str]:
        """Return the names of the genes at a place, by a var column or by the index of var."""
        ...

    def unique_keys(self, place: str) -> list[str]:
        """Return the var columns that give all genes different names."""
        ...


class FileSource:
    """A screen in a file or folder that `perturbdiff.io` reads.

    Parameters
    ----------
    path
        The file.
    root
        What `open_root` returned for it.
    obs
        Table of cell labels, or None.
    """

    def __init__(self, path: Path, root: Any, obs: Path | None) -> None:
        self.shown, self._path, self._root = str(path), path, root
        with explain_damage(path):
            self._layout = find_layout(path, root, "X")
            self.n_cells = self._layout.n_cells
        (table,) = tables_for(1, [obs] if obs else [])
        self._table = (
            None if table is None else JoinedTable(table, path, self.n_cells, self._layout.cell_names)
        )
        self._columns: dict[str, Column] = {}

    def columns(self) -> list[str]:
        """Return the names of the obs columns, those of the table among them."""
        further = [] if self._table is None else self._table.columns
        return list(dict.fromkeys([*self._layout.obs_columns(), *further]))

    def codes(self, name: str, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return the number of each cell's label in ``texts``."""
        with explain_damage(self._path):
            return self._column(name).codes(start, stop, texts)

    def is_fractional(self, name: str) -> bool:
        """Return whether the first cells have fractions in this column."""
        with explain_damage(self._path):
            column = self._column(name)
            if np.dtype(column.dtype).kind != "f":
                return False
            return _has_fractions(column.values(0, min(self.n_cells, 10_000)))

    def _column(self, name: str) -> Column:
        if name not in self._columns:
            in_table = self._table is not None and name in self._table.columns
            self._columns[name] = self._table.column(name) if in_table else self._layout.obs_column(name)  # type: ignore[union-attr]
        return self._columns[name]

    def places(self) -> list[str]:
        """Return where values are stored."""
        with explain_damage(self._path):
            return self._layout.places()

    def some_values(self, place: str) -> np.ndarray:
        """Return some of the values stored at a place."""
        with explain_damage(self._path):
            return self._layout.some_values(place)

    def gene_names(self, place: str, key: str | None) -> list[str]:
        """Return the names of the genes."""
        with explain_damage(self._path):
            return find_layout(self._path, self._root, place).gene_names(key)

    def unique_keys(self, place: str) -> list[str]:
        """Return the var columns with unique names."""
        with explain_damage(self._path):
            return find_layout(self._path, self._root, place).unique_keys()


class MemorySource:
    """A screen in memory."""

    def __init__(self, adata: AnnData) -> None:
        self.shown, self.n_cells, self._adata = "the AnnData", int(adata.n_obs), adata

    def columns(self) -> list[str]:
        """Return the names of the obs columns."""
        return [str(name) for name in self._adata.obs.columns]

    def codes(self, name: str, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return the number of each cell's label in ``texts``."""
        return codes_of(self._adata.obs[name].iloc[start:stop], texts)

    def is_fractional(self, name: str) -> bool:
        """Return whether the column holds fractions."""
        values = self._adata.obs[name]
        return pd.api.types.is_float_dtype(values.dtype) and _has_fractions(values.to_numpy(np.float64))

    def places(self) -> list[str]:
        """Return where values are stored."""
        have = [] if self._adata.X is None else ["X"]
        have += [] if self._adata.raw is None else ["raw"]
        return [*have, *(f"layers/{name}" for name in self._adata.layers)]

    def some_values(self, place: str) -> np.ndarray:
        """Return some of the values stored at a place."""
        if place == "raw":
            return some_values(self._adata.raw.X)
        return some_values(
            self._adata.X if place == "X" else self._adata.layers[place.removeprefix("layers/")]
        )

    def _var(self, place: str) -> pd.DataFrame:
        return pd.DataFrame(self._adata.raw.var if place == "raw" else self._adata.var)

    def gene_names(self, place: str, key: str | None) -> list[str]:
        """Return the names of the genes."""
        var = self._var(place)
        return [str(name) for name in (var.index if key is None else var[key])]

    def unique_keys(self, place: str) -> list[str]:
        """Return the var columns with unique names."""
        var = self._var(place)
        texts = [name for name in var.columns if not pd.api.types.is_numeric_dtype(var[name].dtype)]
        return [str(name) for name in texts if len(set(var[name].dropna())) == len(var)]


def _has_fractions(values: np.ndarray) -> bool:
    numbers = values[np.isfinite(values)]
    return bool((numbers != np.floor(numbers)).any())


@contextlib.contextmanager
def opened(source: Path | AnnData, obs: Path | None = None) -> Iterator[Source]:
    """Open a screen for as long as the block runs.

    Raises
    ------
    UserError
        If the file cannot be read at all, or the table of labels does not fit.
    """
    if not isinstance(source, Path):
        yield MemorySource(source)
        return
    root = open_root(source)
    try:
        yield FileSource(source, root, obs)
    finally:
        if isinstance(root, h5py.File):
            root.close()


def read_labels(source: Source, name: str) -> Labels | None:
    """Return the labels of an obs column, or None if nearly every cell has another one."""
    if source.is_fractional(name):
        return None
    texts, counts, missing = Texts(), np.zeros(0, np.int64), 0
    for start, stop in row_ranges(source.n_cells):
        codes = source.codes(name, start, stop, texts)
        known = codes[codes != MISSING]
        missing += len(codes) - len(known)
        here = np.bincount(known, minlength=len(texts.names))
        here[: len(counts)] += counts
        counts = here
        if len(texts.names) > _MOST_LABELS or (stop > _ENOUGH_CELLS and len(texts.names) > stop // 2):
            return None
    used = np.flatnonzero(counts)
    return Labels(name, [texts.names[k] for k in used], counts[used], missing)


def count_conditions(
    source: Source, keys: Mapping[str, str | None], control: str, keep: str | None = None
) -> tuple[pd.DataFrame, int, int]:
    """Count the cells of each condition, reading some rows of obs at a time.

    Parameters
    ----------
    source
        The screen.
    keys
        obs column of each of the three labels; None: all cells have the same.
    control
        Label of the control cells.
    keep
        Expression over obs columns (``data.keep``); only cells for which it holds are counted.

    Returns
    -------
    conditions
        Columns ``cell_type, batch, perturbation, n_cells, is_control`` in store order.
    without_label
        Number of cells that lack a label.
    left_out
        Number of cells that are not kept.

    Raises
    ------
    UserError
        If ``keep`` does not fit the columns.
    """
    texts, contexts, conditions = {label: Texts() for label in LABELS}, Numbering(), Numbering()
    counts, without_label, left_out = np.zeros(0, np.int64), 0, 0
    chosen = (
        None if keep is None else KeptCells(CellFilter(keep), source.shown, source.columns(), source.codes)
    )
    for start, stop in row_ranges(source.n_cells):
        codes = {
            label: np.full(stop - start, texts[label].number(ALL), np.int32)
            if key is None
            else source.codes(key, start, stop, texts[label])
            for label, key in keys.items()
        }
        kept = np.ones(stop - start, bool) if chosen is None else chosen.read(start, stop)
        agent = np.where(kept, codes["perturbation"], np.int32(MISSING))
        number = conditions(contexts(codes["cell_type"], codes["batch"]), agent)
        left_out += int((~kept).sum())
        without_label += int(((number < 0) & kept).sum())
        here = np.bincount(number[number >= 0], minlength=len(counts))
        here[: len(counts)] += counts
        counts = here
    if chosen is not None and (unknown := unknown_values([chosen])):
        raise UserError(f"{source.shown}: {'; '.join(unknown)}")
    context, perturbation = conditions.pairs()
    cell_type, batch = contexts.pairs()
    columns = {
        "cell_type": [texts["cell_type"].names[k] for k in cell_type[context]],
        "batch": [texts["batch"].names[k] for k in batch[context]],
        "perturbation": [texts["perturbation"].names[k] for k in perturbation],
    }
    table = sort_conditions(pd.DataFrame(columns).assign(n_cells=counts), control)
    return table.assign(is_control=table["perturbation"] == control), without_label, left_out
