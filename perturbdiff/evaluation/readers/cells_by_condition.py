"""Cells by condition: what the two sides of an evaluation are, wherever their values are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

Condition = tuple[str, str, str]  # cell type, batch, perturbation
Group = tuple[str, str]  # cell type, batch
Sparse = Any  # scipy.sparse.csr_matrix, whose stubs know little

ALL = "all"
"""The label of a covariate that the data do not have."""


class Reader(Protocol):
    """Rows of values by number.

    Attributes
    ----------
    path
        The file or folder.
    genes
        Names of the columns.
    """

    path: Path
    genes: list[str]

    def expression(self, rows: np.ndarray) -> Sparse:
        """Return the values [len(rows), G] as CSR in the order of ``rows``, with ascending columns."""
        ...

    def depths(self) -> np.ndarray:
        """Return the sum of each cell's values, float64 [number of cells]."""
        ...

    def cell_name(self, row: int) -> str:
        """Return the name of a cell."""
        ...


@dataclass(frozen=True)
class Cells:
    """Cells of one file or store by condition.

    Attributes
    ----------
    reader
        Where the values are.
    rows
        Row numbers (int64, ascending) of each condition that is not control.
    controls
        Row numbers of the controls of each (cell type, batch).
    contexts
        The context of each condition; empty if there are none.
    control
        Label of the control.
    covariates
        Which of ``cell_type`` and ``batch`` the data have.
    scale
        ``log1p`` or ``counts``.
    target_sum
        Depth to which cells were normalised, if the file says it.
    complete
        Whether every condition is to be predicted, which a store does not say.
    names
        ``method`` and ``dataset``, if the file says them.
    trained_on
        Predicted conditions that the model was trained on: their number and the first ones; None: not said.
    made_by
        What the file says of how its cells were made, see `inputs.MADE_BY`.
    """

    reader: Reader
    rows: Mapping[Condition, np.ndarray]
    controls: Mapping[Group, np.ndarray]
    contexts: Mapping[Condition, str] = field(default_factory=dict)
    control: str | None = None
    covariates: frozenset[str] = frozenset()
    scale: str = "log1p"
    target_sum: float | None = None
    complete: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    trained_on: tuple[int, tuple[str, ...]] | None = None
    made_by: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def pooled_over(self, dropped: frozenset[str]) -> Cells:
        """Return the same cells with the labels of the ``dropped`` covariates forgotten.

        Conditions that then are the same are one; their contexts are those of the first.
        """
        if not dropped:
            return self
        keep = ("cell_type" not in dropped, "batch" not in dropped)

        def forget(key: Any) -> Any:
            return tuple(label if kept else ALL for label, kept in zip(key, (*keep, True), strict=False))

        def joined(rows: Mapping[Any, np.ndarray]) -> dict[Any, np.ndarray]:
            found: dict[Any, list[np.ndarray]] = {}
            for key, own in rows.items():
                found.setdefault(forget(key), []).append(own)
            return {k: v[0] if len(v) == 1 else np.sort(np.concatenate(v)) for k, v in found.items()}

        contexts = {forget(c): label for c, label in self.contexts.items()}
        several = len({(forget(c), label) for c, label in self.contexts.items()}) > len(contexts)
        return replace(
            self,
            rows=joined(self.rows),
            controls=joined(self.controls),
            contexts={} if several else contexts,
            covariates=self.covariates - dropped,
        )


def empty_rows(columns: int) -> Sparse:
    """Return no row of so many columns."""
    return sp.csr_matrix((0, columns), dtype=np.float32)
