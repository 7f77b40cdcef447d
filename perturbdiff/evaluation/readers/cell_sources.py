"""Where the cells of an evaluation come from: rows of an AnnData file or of a store, by condition and by set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import ALL, LABELS, Condition, Group, conditions_of
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cells_by_condition import (
    COVARIATES,
    Cells,
    RowRanges,
    single_context,
)
from perturbdiff.genes.gene_lists import read_gene_set
from perturbdiff.io.cell_labels import LabelCodes
from perturbdiff.io.columns import MISSING, Column, Numbering, Texts, codes_of, row_ranges, small_dtype
from perturbdiff.io.input_file import InputFile
from perturbdiff.io.matrices import Sparse
from perturbdiff.io.row_file import RowFile
from perturbdiff.method import SOURCES
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.large_arrays import long_array

if TYPE_CHECKING:
    from perturbdiff.store.store import Store

SAMPLED = "set"
"""Column of obs of our own predictions: the number of the sampled set, below 0 for a cell of none."""

Sets = Mapping[Condition, list[np.ndarray]]
"""Rows (int64, ascending) of each set of each condition."""


@dataclass(frozen=True)
class KnownSets:
    """The true and the sampled sets of the conditions."""

    real: Sets
    predicted: Sets


def numbers_of(file: RowFile, column: str, where: str = "") -> np.ndarray:
    """Return the number of the set of each cell, `MISSING` for a cell of none, int64 [cells].

    Parameters
    ----------
    column
        Of obs. Whole numbers are taken as they are, those below 0 as no set; other labels are numbered.
    where
        The option that named it, for the message.

    Raises
    ------
    UserError
        If there is no such column.
    """
    found, texts = file.open_column(column, where), Texts()
    numbers = long_array(file.n_cells, np.dtype(np.int64))
    for start, stop in row_ranges(file.n_cells):
        if found.dtype.kind in "iu":
            numbers[start:stop] = np.maximum(found.values(start, stop).astype(np.int64), MISSING)
        else:
            numbers[start:stop] = found.codes(start, stop, texts)
    return numbers


def grouped(rows: Mapping[Condition, np.ndarray], numbers: np.ndarray) -> dict[Condition, list[np.ndarray]]:
    """Return the rows of each set of each condition, by the number of the set."""
    return {condition: _split(some, numbers[some]) for condition, some in rows.items()}


def _split(rows: np.ndarray, numbers: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(numbers, kind="stable")
    order = order[np.searchsorted(numbers[order], 0) :]
    edges = np.flatnonzero(np.diff(numbers[order])) + 1
    return np.split(rows[order], edges) if len(order) else []


def dealt(rows: np.ndarray, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return sets of ``size`` cells dealt at random; cells that are left over are in none."""
    number = len(rows) // size if size else 0
    order = rng.permutation(len(rows))[: number * size]
    return [np.sort(rows[some]) for some in order.reshape(number, size)] if number else []


@dataclass(frozen=True)
class LabelledRows:
    """The rows of a file by condition.

    Attributes
    ----------
    rows
        Ascending row numbers (int64) of each condition, controls among them.
    contexts
        The context of each condition; empty without a context column.
    """

    rows: Mapping[Condition, np.ndarray]
    contexts: Mapping[Condition, str]

    def perturbed(self, control: str) -> dict[Condition, np.ndarray]:
        """Return the rows of the conditions that are not the control."""
        return {c: rows for c, rows in self.rows.items() if c.perturbation != control}

    def controls(self, control: str) -> dict[Group, np.ndarray]:
        """Return the rows of the controls of each (cell type, batch)."""
        return {c.group: rows for c, rows in self.rows.items() if c.perturbation == control}


def read_labelled_rows(
    file: InputFile,
    columns: Mapping[str, str | None],
    *,
    context: str | None = None,
    control: str | None = None,
) -> LabelledRows:
    """Return the rows of each condition of a file.

    Parameters
    ----------
    file
        The file.
    columns
        The obs column of ``perturbation``, ``cell_type`` and ``batch``; None: all cells have the label 'all'.
    context
        obs column of the contexts, or ``cell_type``, ``batch``, ``perturbation`` for one of these.
    control
        For predictions: with a column ``source`` of 'predicted' and 'control', cells of the latter count only if
        they carry this label.

    Raises
    ------
    UserError
        If a cell has no label, or a condition lies in several contexts.
    """
    texts = {label: Texts() for label in LABELS}
    labels = LabelCodes(file, columns, texts)
    source = None if control is None else _source(file)
    sources, groups, conditions = Texts(), Numbering(), Numbering()
    codes = long_array(file.n_cells, np.dtype(np.int32))
    for start, stop in row_ranges(file.n_cells):
        perturbation, cell_type, batch = (labels.read(label, start, stop) for label in LABELS)
        condition = conditions(groups(cell_type, batch), perturbation)
        if source is not None and control is not None:
            predicted = source.codes(start, stop, sources) == sources.number("predicted")
            condition[~predicted & (perturbation != texts["perturbation"].number(control))] = MISSING
        codes[start:stop] = condition
    labels.check()
    names = _names(conditions, groups, texts)
    return LabelledRows(_rows_by_condition(codes, names), _contexts(file, codes, names, context, columns))


def _source(file: InputFile) -> Column | None:
    """Return the column that tells predicted cells from controls; another column may have its name."""
    if "source" not in file.columns:
        return None
    column, texts = file.open_column("source"), Texts(SOURCES)
    for start, stop in row_ranges(file.n_cells):
        column.codes(start, stop, texts)
    return column if len(texts.names) == len(SOURCES) else None


def _names(conditions: Numbering, groups: Numbering, texts: Mapping[str, Texts]) -> list[Condition]:
    """Return the labels of each condition, by its number."""
    group_of, perturbation_of = conditions.pairs()
    types, batches = groups.pairs()
    perturbation, cell_type, batch = (texts[label].names for label in LABELS)
    return [
        Condition(perturbation[p], cell_type[types[g]], batch[batches[g]])
        for g, p in zip(group_of, perturbation_of, strict=True)
    ]


def _rows_by_condition(codes: np.ndarray, names: list[Condition]) -> dict[Condition, np.ndarray]:
    """Return the ascending rows of each condition, by name."""
    counts, small = np.zeros(len(names) + 1, np.int64), small_dtype(len(names))
    for start, stop in row_ranges(len(codes)):
        counts += np.bincount(codes[start:stop] - MISSING, minlength=len(counts))
    ends = np.cumsum(counts)
    every, place = (
        long_array(len(codes), np.dtype(np.int64)),
        ends - counts,
    )  # first come cells of no condition
    for start, stop in row_ranges(len(codes)):
        order = np.argsort(codes[start:stop].astype(small), kind="stable")  # by radix, in linear time
        sorted_codes = codes[start:stop][order] - MISSING
        first = np.flatnonzero(np.diff(sorted_codes, prepend=-1))
        found, number = sorted_codes[first], np.diff(first, append=stop - start)
        every[np.repeat(place[found] - first, number) + np.arange(stop - start)] = start + order
        place[found] += number
    rows = np.split(every, ends)[1:]
    present = [k for k in range(len(names)) if len(rows[k])]
    return {names[k]: rows[k] for k in sorted(present, key=lambda k: (names[k].group, names[k].perturbation))}


def _contexts(
    file: InputFile,
    codes: np.ndarray,
    names: list[Condition],
    context: str | None,
    columns: Mapping[str, str | None],
) -> dict[Condition, str]:
    """Return the context of each condition."""
    if context is None:
        return {}
    for label in LABELS:
        if context in (label, columns[label]):
            return {condition: getattr(condition, label) for condition in names}
    texts, pairs = Texts(), Numbering()
    column = file.open_column(context)
    for start, stop in row_ranges(len(codes)):
        labels = column.codes(start, stop, texts)
        if (unlabelled := labels == MISSING).any():
            cell = file.cell_name(start + int(np.argmax(unlabelled)))
            raise UserError(
                f"{file.path}: cell '{cell}' has no label in obs column '{context}' (--context-col)"
            )
        pairs(codes[start:stop], labels)
    contexts_of: dict[int, list[str]] = {}
    for condition, label in zip(*pairs.pairs(), strict=True):
        contexts_of.setdefault(int(condition), []).append(texts.names[label])
    return {
        names[k]: single_context(several, names[k], context, file.path)
        for k, several in sorted(contexts_of.items())
    }


_CACHE = 32 << 20
"""Bytes of decoded chunks: conditions are read from their first row to the last, so that only edges come again."""


class StoreReader:
    """Rows of a store, log1p; of all its genes, or of ``genes`` in that order."""

    def __init__(self, store: Any, genes: Sequence[str] | None = None) -> None:
        self.path, self._store = Path(store.path), store
        self.genes = list(store.genes if genes is None else genes)
        self._map = GeneMap(store.genes, self.genes, name=str(store.path))

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return log1p values of the store's ``rows``; their depth is that over all genes."""
        return self._map.apply(self._store.expression(rows))

    @property
    def has_counts(self) -> bool:
        """Whether the store was made from counts."""
        return self._store.input_scale == "counts"

    def counts(self, rows: np.ndarray) -> Sparse:
        """Return the counts of the store's ``rows`` over its genes."""
        return self._map.apply(self._store.counts(rows))

    def labels(self, column: str) -> tuple[np.ndarray, list[str]]:
        """Return the number of each cell's label in a column of obs, int32, `MISSING` without one; and the labels."""
        texts, codes = Texts(), long_array(self._store.n_cells, np.dtype(np.int32))
        for start, piece in self._store.obs_pieces([column]):
            codes[start : start + len(piece)] = codes_of(piece[column], texts)
        return codes, texts.names

    def sets(self, column: str | None) -> np.ndarray | None:
        """Return the number of each cell's set by a column of obs, by default what the store knows; None if nothing."""
        if column is not None:
            return self.labels(column)[0]
        if self._store.set_key is None:
            return None
        return self._store.set_of(slice(None))

    def depths(self) -> np.ndarray:
        """Return the depth of each cell over all genes of its input."""
        depths = long_array(self._store.n_cells, np.dtype(np.float64))
        depths[:] = self._store.n_counts
        return depths

    def cell_name(self, row: int) -> str:
        """Return the name of a cell."""
        return str(self._store.cell_names(row, row + 1)[0])


def _genes(path: Path, store: Store) -> list[str]:
    """Return the genes to score."""
    wanted = read_gene_set(path, path.name, None, Path()).genes
    if missing := sorted(set(wanted) - set(store.genes)):
        raise UserError(
            f"{path}: {len(missing)} of its {len(wanted)} genes are not in {store.path}: {listing(missing)}; "
            "score genes that the truth has"
        )
    return wanted


def open_store(path: Path, config: EvaluateConfig) -> Cells:
    """Open a store as the truth.

    Raises
    ------
    UserError
        If it is no finished store, or lacks a gene of ``config.genes``, or the context column is missing or varies
        within a condition.
    """
    from perturbdiff.store.store import Store  # it imports zarr, which files do without

    store = Store(path)
    store.cache_bytes = _CACHE
    reader = StoreReader(store, None if config.genes is None else _genes(Path(config.genes), store))
    table = store.conditions
    covariates = frozenset(name for name in COVARIATES if set(table[name]) != {ALL})
    column = config.context_column or ("cell_type" if "cell_type" in covariates else None)
    labels = None if column is None else _stored_contexts(reader, table, column)
    rows: dict[Condition, list[tuple[int, int]]] = {}
    controls: dict[Group, list[tuple[int, int]]] = {}
    contexts: dict[Condition, str] = {}
    for i, (condition, row) in enumerate(zip(conditions_of(table), table.to_dict("records"), strict=True)):
        cells = [(int(row["start"]), int(row["stop"]))]
        if row["is_control"]:
            controls[condition.group] = cells
            continue
        rows[condition] = cells
        if column is not None and labels is not None:
            contexts[condition] = single_context(labels[i], condition, column, path)
    return Cells(
        reader,
        RowRanges(rows),
        RowRanges(controls),
        contexts,
        store.control,
        covariates,
        target_sum=float(store.target_sum),
        names={"dataset": path.name},
        sets=reader.sets(config.set_column),
    )


def _stored_contexts(reader: StoreReader, table: pd.DataFrame, column: str) -> list[list[str]]:
    """Return the contexts that the cells of each condition of the ``table`` lie in."""
    if column in table:
        return [[str(label)] for label in table[column]]
    codes, names = reader.labels(column)
    return [
        [names[k] if k >= 0 else "" for k in np.unique(codes[start:stop])]
        for start, stop in zip(table["start"], table["stop"], strict=True)
    ]
