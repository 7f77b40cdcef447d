"""The real cells of a store, by condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cells_by_condition import ALL, Cells, Condition, Group, Sparse
from perturbdiff.runtime.errors import UserError, listing


class StoreReader:
    """Rows of a store, log1p."""

    def __init__(self, store: Any) -> None:
        self.path, self.genes, self._store = Path(store.path), list(store.genes), store

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return log1p values of the store's ``rows``."""
        return self._store.expression(rows)

    def depths(self) -> np.ndarray:
        """Return the depth of each cell over all genes of its input."""
        return np.asarray(self._store.n_counts, np.float64)

    def cell_name(self, row: int) -> str:
        """Return the name of a cell."""
        return str(self._store.cell_names(row, row + 1)[0])


def open_store(path: Path, config: EvaluateConfig) -> Cells:
    """Open a store as the truth.

    Raises
    ------
    UserError
        If it is no finished store, or the context column is missing or varies within a condition.
    """
    from perturbdiff.store.store import Store

    store = Store(path)
    table = store.conditions
    covariates = frozenset(name for name in ("cell_type", "batch") if set(table[name]) != {ALL})
    column = config.context_column or ("cell_type" if "cell_type" in covariates else None)
    labels = _labels(store, column) if column is not None else None
    rows: dict[Condition, np.ndarray] = {}
    controls: dict[Group, np.ndarray] = {}
    contexts: dict[Condition, str] = {}
    for i, row in enumerate(table.to_dict("records")):
        condition = (str(row["cell_type"]), str(row["batch"]), str(row["perturbation"]))
        cells = np.arange(int(row["start"]), int(row["stop"]), dtype=np.int64)
        if row["is_control"]:
            controls[condition[:2]] = cells
            continue
        rows[condition] = cells
        if column is not None and labels is not None:
            contexts[condition] = single(labels[i], condition, column, path)
    return Cells(
        StoreReader(store),
        rows,
        controls,
        contexts,
        store.control,
        covariates,
        target_sum=float(store.target_sum),
        names={"dataset": path.name},
    )


def _labels(store: Any, column: str) -> list[list[str]]:
    """Return the contexts that each condition's cells lie in."""
    table = store.conditions
    if column in table:
        return [[str(label)] for label in table[column]]
    codes, names = pd.factorize(store.obs([column])[column])
    found = []
    for start, stop in zip(table["start"], table["stop"], strict=True):
        found.append([str(names[k]) if k >= 0 else "" for k in np.unique(codes[start:stop])])
    return found


def single(labels: list[str], condition: Condition, column: str, path: Path) -> str:
    """Return the one context of a condition.

    Raises
    ------
    UserError
        If there are several.
    """
    if len(labels) != 1:
        raise UserError(
            f"{path}: cells of condition {'|'.join(condition)} lie in several contexts of '{column}' "
            f"({listing(sorted(labels))}); choose a column that is constant within a condition"
        )
    return labels[0]
