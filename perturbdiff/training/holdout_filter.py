"""Keeping held-out cells out of pretraining: by condition, and by the cells' own names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.util import hash_array

from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

Condition = tuple[str, str, str]

_NAMES_PER_READ = 1 << 18


def _names(store: Any) -> np.ndarray:
    """Return 64-bit hashes of a store's cell names, uint64 [n_cells]: 8 bytes a cell instead of the names."""
    hashes = np.empty(store.n_cells, np.uint64)
    for start in range(0, store.n_cells, _NAMES_PER_READ):
        stop = min(start + _NAMES_PER_READ, store.n_cells)
        hashes[start:stop] = np.asarray(hash_array(store.cell_names(start, stop)), np.uint64)
    return hashes


def _triples(table: pd.DataFrame) -> list[Condition]:
    columns = (table[c].astype(str) for c in ("cell_type", "batch", "perturbation"))
    return list(zip(*columns, strict=True))


def _rows(table: pd.DataFrame, chosen: np.ndarray) -> np.ndarray:
    """Return a mask over the store's rows of the chosen conditions."""
    return np.repeat(chosen, (table["stop"] - table["start"]).to_numpy())


@dataclass
class HeldOut:
    """Validation and test conditions of downstream splits, and the names of their cells.

    Attributes
    ----------
    conditions
        (cell type, batch, perturbation).
    cells
        Sorted hashes of cell names.
    splits
        The split of each downstream store, by its resolved path.
    report
        Lines on what was left out of each store.
    """

    conditions: set[Condition] = field(default_factory=set)
    cells: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    splits: dict[Path, pd.DataFrame] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)

    @classmethod
    def collect(cls, downstream: Sequence[tuple[Path, Path]]) -> HeldOut:
        """Read what the downstream splits hold out."""
        held, names = cls(), []
        for path, split_path in downstream:
            store, split = Store(path), read_split(split_path)
            part = parts(store.conditions, split)
            out = np.isin(part, ["valid", "test"])
            held.conditions.update(_triples(pd.DataFrame(store.conditions[out])))
            names.append(_names(store)[_rows(store.conditions, out)])
            held.splits[path.resolve()] = split
        held.cells = np.unique(np.concatenate(names)) if names else held.cells
        return held

    def leave_out(self, store: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Return which conditions of a store pretraining may use, and a mask of rows it may not (or None).

        Raises
        ------
        UserError
            If nothing is left.
        """
        table = store.conditions
        held = np.array([triple in self.conditions for triple in _triples(table)])
        split = self.splits.get(Path(store.path).resolve())
        use = ~held if split is None else (parts(table, split) == "train") & ~held
        if not use.any():
            raise UserError(f"{store.path}: every condition is held out by a downstream split; leave it out")
        if not len(self.cells):
            return use, None
        twins = np.isin(_names(store), self.cells)
        left = int((twins & _rows(table, use)).sum())
        self.report.append(
            f"{Path(store.path).name}: {int((~use).sum())} of {len(table)} conditions are held out downstream; "
            f"{left} further cells bear a held-out cell's name"
        )
        logger.info("left out of %s", self.report[-1])
        return use, twins if twins.any() else None
