"""Which cells were a set: the wells, guides or donors of real cells, and the sets that a model sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perturbdiff.conditions.condition import Condition
from perturbdiff.io.columns import MISSING, Texts, row_ranges
from perturbdiff.io.row_file import RowFile

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
    numbers = np.empty(file.n_cells, np.int64)
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
