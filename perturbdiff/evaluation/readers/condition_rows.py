"""From the columns of obs to the rows of each condition: numbers all the way, no text for each cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perturbdiff.evaluation.readers.anndata_reader import AnnDataReader
from perturbdiff.evaluation.readers.cells_by_condition import ALL, Condition, Group
from perturbdiff.evaluation.readers.store_cells import single
from perturbdiff.io.columns import MISSING, Column, Numbering, Texts, row_ranges, small_dtype
from perturbdiff.runtime.errors import UserError

_SOURCES = ("predicted", "control")


@dataclass(frozen=True)
class Labelled:
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
        return {c: rows for c, rows in self.rows.items() if c[2] != control}

    def controls(self, control: str) -> dict[Group, np.ndarray]:
        """Return the rows of the controls of each (cell type, batch)."""
        return {c[:2]: rows for c, rows in self.rows.items() if c[2] == control}


def read_labels(
    reader: AnnDataReader,
    columns: Mapping[str, str | None],
    *,
    context: str | None = None,
    control: str | None = None,
) -> Labelled:
    """Return the rows of each condition of a file.

    Parameters
    ----------
    reader
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
    texts = {name: Texts() for name in columns}
    opened = {name: reader.column(key) for name, key in columns.items() if key is not None}
    source = None if control is None else _source(reader)
    sources, contexts, condition = Texts(), Numbering(), Numbering()
    codes = np.empty(reader.num_cells, np.int32)
    missing: dict[str, tuple[int, int]] = {}
    for start, stop in row_ranges(reader.num_cells):
        found = {}
        for name in columns:
            found[name] = _codes(opened.get(name), texts[name], start, stop)
            _note(missing, name, found[name], start)
        part = condition(contexts(found["cell_type"], found["batch"]), found["perturbation"])
        if source is not None and control is not None:
            predicted = source.codes(start, stop, sources) == sources.number("predicted")
            part[~predicted & (found["perturbation"] != texts["perturbation"].number(control))] = MISSING
        codes[start:stop] = part
    for name, (count, first) in missing.items():
        raise UserError(
            f"{reader.path}: {count} cells have no label in obs column '{columns[name]}' (first: "
            f"'{reader.cell_name(first)}'); label or drop them"
        )
    names = _names(condition, contexts, texts)
    return Labelled(_grouped(codes, names), _contexts(reader, codes, names, context, columns))


def _source(reader: AnnDataReader) -> Column | None:
    """Return the column that tells predicted cells from controls; another column may have its name."""
    if "source" not in reader.columns:
        return None
    column, texts = reader.column("source"), Texts(_SOURCES)
    for start, stop in row_ranges(reader.num_cells):
        column.codes(start, stop, texts)
    return column if len(texts.names) == len(_SOURCES) else None


def _names(condition: Numbering, contexts: Numbering, texts: Mapping[str, Texts]) -> list[Condition]:
    """Return the labels of each condition, by its number."""
    context_of, perturbation_of = condition.pairs()
    types, batches = contexts.pairs()
    cell_type, batch, perturbation = (texts[n].names for n in ("cell_type", "batch", "perturbation"))
    return [
        (cell_type[types[c]], batch[batches[c]], perturbation[p])
        for c, p in zip(context_of, perturbation_of, strict=True)
    ]


def _codes(column: Column | None, texts: Texts, start: int, stop: int) -> np.ndarray:
    """Return the number of each cell's label."""
    if column is None:
        return np.full(stop - start, texts.number(ALL), np.int32)
    return column.codes(start, stop, texts)


def _note(missing: dict[str, tuple[int, int]], name: str, codes: np.ndarray, start: int) -> None:
    """Remember how many cells have no label, and the first."""
    if (none := codes == MISSING).any():
        count, first = missing.get(name, (0, start + int(np.argmax(none))))
        missing[name] = count + int(none.sum()), first


def _grouped(codes: np.ndarray, names: list[Condition]) -> dict[Condition, np.ndarray]:
    """Return the ascending rows of each condition, by name."""
    counts = np.zeros(len(names) + 1, np.int64)
    for start, stop in row_ranges(len(codes)):
        counts += np.bincount(codes[start:stop] - MISSING, minlength=len(counts))
    order = np.argsort(codes.astype(small_dtype(len(names))), kind="stable")  # by radix, in linear time
    ends = np.cumsum(counts)
    rows = np.split(order, ends)[1:]  # first come cells of no condition
    here = [k for k in range(len(names)) if len(rows[k])]
    return {names[k]: rows[k] for k in sorted(here, key=names.__getitem__)}


def _contexts(
    reader: AnnDataReader,
    codes: np.ndarray,
    names: list[Condition],
    context: str | None,
    columns: Mapping[str, str | None],
) -> dict[Condition, str]:
    """Return the context of each condition."""
    if context is None:
        return {}
    for place, name in enumerate(("cell_type", "batch", "perturbation")):
        if context in (name, columns[name]):
            return {condition: condition[place] for condition in names}
    texts, pairs = Texts(), Numbering()
    column = reader.column(context)
    for start, stop in row_ranges(len(codes)):
        labels = column.codes(start, stop, texts)
        if (none := labels == MISSING).any():
            cell = reader.cell_name(start + int(np.argmax(none)))
            raise UserError(
                f"{reader.path}: cell '{cell}' has no label in obs column '{context}' (--context-col)"
            )
        pairs(codes[start:stop], labels)
    found: dict[int, list[str]] = {k: [] for k in range(len(names))}
    for condition, label in zip(*pairs.pairs(), strict=True):
        found[int(condition)].append(texts.names[label])
    return {names[k]: single(own, names[k], context, reader.path) for k, own in found.items() if own}


def column_names(
    reader: AnnDataReader, wanted: Mapping[str, str | None], defaults: Mapping[str, str | None], *, own: bool
) -> dict[str, str | None]:
    """Return which column of obs has each label.

    A column with another name than the default was asked for and must be there; one with the default's name may
    be missing, except that of the perturbation.

    Parameters
    ----------
    wanted, defaults
        The column of ``perturbation``, ``cell_type`` and ``batch``; None: cells have none.
    own
        Take the columns that our own predictions have where the wanted ones are not there.
    """
    found: dict[str, str | None] = {}
    for name, key in wanted.items():
        if key is None or key in reader.columns:
            found[name] = key
        elif own and name in reader.columns:
            found[name] = name
        elif name == "perturbation" or key != defaults[name]:
            reader.column(key)  # raises
        else:
            found[name] = None
    return found
