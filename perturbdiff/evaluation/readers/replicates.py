"""Counts of real cells summed over replicates: the pseudobulks that a test of replicates starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import Condition, Group
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.readers.store_cells import StoreReader
from perturbdiff.io.columns import MISSING, Texts, row_ranges
from perturbdiff.io.matrices import Sparse
from perturbdiff.io.row_file import RowFile
from perturbdiff.runtime.errors import UserError

LEAST_CELLS = 10  # a sum over fewer cells is mostly noise
_CELLS_AT_ONCE = 4096

Sums = dict[str, np.ndarray]
"""Sum of counts (float64 [G]) and, last, number of cells of each replicate, float64 [G + 1]."""


@dataclass(frozen=True)
class Replicates:
    """The replicate of each real cell.

    Attributes
    ----------
    pairs
        What is compared; the real side is read.
    codes
        Number of the replicate of each row of the truth, −1 for a cell without one.
    names
        Replicates by number.
    """

    pairs: Pairing
    codes: np.ndarray
    names: list[str]

    @classmethod
    def read(cls, pairs: Pairing, column: str) -> Replicates:
        """Read obs column ``column`` of the truth.

        Raises
        ------
        UserError
            If there is no such column.
        """
        reader = pairs.real.reader
        if isinstance(reader, StoreReader):
            codes, names = pd.factorize(reader.obs(column))
            return cls(pairs, np.asarray(codes), [str(name) for name in names])
        if not isinstance(reader, RowFile):
            raise UserError(f"{Path(reader.path)}: its cells have no column '{column}'")
        texts, found = Texts(), reader.open_column(column, "--replicate-col")
        codes = np.full(reader.n_cells, MISSING)
        for start, stop in row_ranges(reader.n_cells):
            codes[start:stop] = found.codes(start, stop, texts)
        return cls(pairs, codes, texts.names)

    @property
    def has_counts(self) -> bool:
        """Whether the truth holds counts, and not log1p values alone."""
        reader = self.pairs.real.reader
        return reader.has_counts if isinstance(reader, StoreReader) else self.pairs.real.depth is not None

    def of_condition(self, condition: Condition) -> Sums:
        """Return the sums of a condition's cells."""
        return self._sums(self.pairs.real.rows[condition])

    def of_controls(self) -> Mapping[Group, Sums]:
        """Return the sums of each group's controls."""
        return {group: self._sums(rows) for group, rows in self.pairs.controls.items()}

    def _sums(self, rows: np.ndarray) -> Sums:
        sums: Sums = {}
        for part in np.split(rows, range(_CELLS_AT_ONCE, len(rows), _CELLS_AT_ONCE)):
            counts, codes = self._counts(part), self.codes[part]
            for code in np.unique(codes[codes >= 0]):
                chosen = codes == code
                total = np.asarray(counts[chosen].sum(axis=0, dtype=np.float64)).ravel()
                add(sums, {self.names[code]: np.append(total, chosen.sum())})
        return sums

    def _counts(self, rows: np.ndarray) -> Sparse:
        reader = self.pairs.real.reader
        return reader.counts(rows) if isinstance(reader, StoreReader) else reader.expression(rows)


def add(sums: Sums, more: Mapping[str, np.ndarray]) -> Sums:
    """Add ``more`` to ``sums`` and return it."""
    for name, values in more.items():
        sums[name] = sums[name] + values if name in sums else values
    return sums
