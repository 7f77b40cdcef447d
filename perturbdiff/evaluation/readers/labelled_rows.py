"""The rows of an AnnData file by condition, from its columns of obs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perturbdiff.conditions.condition import LABELS, Condition, Group
from perturbdiff.evaluation.readers.cells_by_condition import single_context
from perturbdiff.io.cell_labels import LabelCodes
from perturbdiff.io.columns import MISSING, Column, Numbering, Texts, row_ranges, small_dtype
from perturbdiff.io.input_file import InputFile
from perturbdiff.method import SOURCES
from perturbdiff.runtime.errors import UserError


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
    codes = np.empty(file.n_cells, np.int32)
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
    counts = np.zeros(len(names) + 1, np.int64)
    for start, stop in row_ranges(len(codes)):
        counts += np.bincount(codes[start:stop] - MISSING, minlength=len(counts))
    order = np.argsort(codes.astype(small_dtype(len(names))), kind="stable")  # by radix, in linear time
    ends = np.cumsum(counts)
    rows = np.split(order, ends)[1:]  # first come cells of no condition
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
