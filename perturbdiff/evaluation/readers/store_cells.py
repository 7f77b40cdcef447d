"""The real cells of a store, by condition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import ALL, Condition, Group, conditions_of
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cells_by_condition import (
    COVARIATES,
    Cells,
    RowRanges,
    single_context,
)
from perturbdiff.genes.gene_lists import read_gene_set
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.errors import UserError, listing

if TYPE_CHECKING:
    from perturbdiff.store.store import Store

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

    def obs(self, column: str) -> pd.Series:
        """Return a column of obs."""
        return self._store.obs([column])[column]

    def sets(self, column: str | None) -> np.ndarray | None:
        """Return the number of each cell's set by a column of obs, by default what the store knows; None if nothing."""
        if column is not None:
            return np.asarray(pd.factorize(self.obs(column))[0], np.int64)
        if self._store.set_key is None:
            return None
        return self._store.set_of(slice(None))

    def depths(self) -> np.ndarray:
        """Return the depth of each cell over all genes of its input."""
        return np.asarray(self._store.n_counts, np.float64)

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
    labels = None if column is None else _contexts(store, column)
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


def _contexts(store: Store, column: str) -> list[list[str]]:
    """Return the contexts that each condition's cells lie in."""
    table = store.conditions
    if column in table:
        return [[str(label)] for label in table[column]]
    codes, names = pd.factorize(store.obs([column])[column])
    return [
        [str(names[k]) if k >= 0 else "" for k in np.unique(codes[start:stop])]
        for start, stop in zip(table["start"], table["stop"], strict=True)
    ]
