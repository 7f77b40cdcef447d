"""Cells with their stored values and obs columns, alike for a store and for a file of counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from perturbdiff.config.settings import DataConfig
from perturbdiff.io.counts import CountsFile
from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block
from perturbdiff.io.zarr_check import open_group
from perturbdiff.store.store import Store


class CellSource(Protocol):
    """What both can do.

    Attributes
    ----------
    path
        Where it is.
    genes
        Names of the columns of blocks.
    n_cells
        Number of rows.
    unit
        ``counts`` or ``log1p``: what the values are.
    """

    path: Path
    genes: list[str]
    n_cells: int
    unit: str

    def blocks(self) -> Iterator[Block]:
        """Yield all rows in consecutive blocks."""
        ...

    def columns(self) -> list[str]:
        """Return the names of the obs columns."""
        ...

    def column(self, name: str) -> pd.Series:
        """Return an obs column."""
        ...

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the names of rows ``start`` to ``stop``, object array of str."""
        ...


class _File:
    def __init__(self, file: CountsFile, config: DataConfig) -> None:
        self._file, self.path = file, file.path
        self.genes, self.n_cells, self.unit = list(file.genes), file.n_cells, config.input_scale

    def blocks(self) -> Iterator[Block]:
        self._file.prepare()
        yield from self._file.blocks()

    def columns(self) -> list[str]:
        return self._file.columns

    def column(self, name: str) -> pd.Series:
        return self._file.column(name, "to copy")

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        return self._file.cell_names(start, stop)


class _Cells:
    def __init__(self, store: Store) -> None:
        self._store, self.path = store, store.path
        self.genes, self.n_cells, self.unit = list(store.genes), store.n_cells, store.input_scale

    def blocks(self) -> Iterator[Block]:
        store = self._store
        rows = max(1, int(VALUES_PER_BLOCK * store.n_cells / max(1, store.n_values)))
        for start in range(0, self.n_cells, rows):
            stop = min(start + rows, self.n_cells)
            part = store.counts(slice(start, stop))
            indptr, indices = np.asarray(part.indptr, np.int64), np.asarray(part.indices, np.int32)
            exact = np.float64 if store.dtype == np.uint32 else np.float32
            yield Block(start, stop, indptr, indices, np.asarray(part.data, exact))

    def columns(self) -> list[str]:
        first = sorted(self.path.glob("part-*.zarr"))[0]
        group: Any = open_group(first)["obs"]
        return [str(name) for name in group.attrs["column-order"]]

    def column(self, name: str) -> pd.Series:
        return pd.Series(self._store.obs([name])[name])

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        return self._store.cell_names(start, stop)


@contextlib.contextmanager
def open_cells(path: Path, config: DataConfig, scratch: Path) -> Iterator[CellSource]:
    """Open a store or a file of counts; ``scratch`` takes what must be put in row order.

    Raises
    ------
    UserError
        If it is neither, or is damaged.
    """
    if (path / "conditions.parquet").is_file():
        yield _Cells(Store(path))
        return
    file = CountsFile(path, config, scratch)
    try:
        yield _File(file, config)
    finally:
        file.close()
