"""Tables of cell labels that are given beside the inputs (``--obs``)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from perturbdiff.io.columns import ROWS_PER_READ, CategoricalColumn, Column, PlainColumn, row_ranges
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.untrusted import open_bytes

NAME_COLUMNS = ("cell", "barcode", "barcodes", "cell_id", "index")
"""Columns that may hold the names of cells; without one of them it is the first column."""
_MISSING = ["", "NA", "NaN", "nan"]
_SEPARATORS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
_NAMED_IN_ERRORS = 3


class LabelTable:
    """Labels of cells by name, from CSV, TSV (also gzip) or Parquet.

    Attributes
    ----------
    path
        The file.
    columns
        Names of the label columns.

    Raises
    ------
    UserError
        If the file cannot be read, or a cell has no name or several rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"table of cell labels not found: {path}")
        self._frame = _read(self.path)
        self.columns = [str(c) for c in self._frame.columns]
        self._frame.columns = pd.Index(self.columns)
        if not self.columns:
            raise UserError(f"{path}: has no column beside the names of cells")
        names = self._frame.index
        nameless = int((names.isna() | (names == "")).sum())
        if nameless:
            raise UserError(f"{path}: {nameless} rows have no name of a cell; fill it in or drop them")
        if not names.is_unique:
            twice = names[names.duplicated()].unique()
            some = listing(twice, _NAMED_IN_ERRORS)
            raise UserError(f"{path}: has several rows for {len(twice)} cells ({some}); keep one of each")

    def rows_of(self, cells: np.ndarray) -> np.ndarray:
        """Return the row of each cell name, int32, -1 if there is none."""
        return self._frame.index.get_indexer(pd.Index(cells, dtype=object)).astype(np.int32)

    def example(self) -> str:
        """Return the first cell's name."""
        return str(self._frame.index[0]) if len(self._frame) else ""

    def column(self, name: str, rows: np.ndarray) -> Column:
        """Return a column for the cells that are in these ``rows``."""
        values = self._frame[name]
        if isinstance(values.dtype, pd.CategoricalDtype):
            return CategoricalColumn(values.cat.codes.to_numpy()[rows], values.cat.categories.tolist())
        return PlainColumn(values.to_numpy()[rows])


class JoinedTable:
    """A table joined to the cells of one input.

    Attributes
    ----------
    columns
        Names of the label columns.

    Raises
    ------
    UserError
        If a cell has no row.
    """

    def __init__(
        self, table: LabelTable, path: Path, n_cells: int, cell_names: Callable[[int, int], np.ndarray]
    ) -> None:
        self._table, self.columns = table, table.columns
        self._rows = np.empty(n_cells, np.int32)
        without, first = 0, []
        for start, stop in row_ranges(n_cells):
            names = cell_names(start, stop)
            rows = self._rows[start:stop] = table.rows_of(names)
            without += int((rows < 0).sum())
            first += names[rows < 0][: _NAMED_IN_ERRORS - len(first)].tolist()
        if without:
            more = f", … ({without - len(first)} more)" if without > len(first) else ""
            raise UserError(
                f"{table.path}: has no row for {without} of the {n_cells} cells of {path} ({', '.join(first)}{more}); "
                f"its names look like '{table.example()}'; add these cells or take the table of this input"
            )

    def column(self, name: str) -> Column:
        """Return a column, one value for each cell of the input."""
        return self._table.column(name, self._rows)


def tables_for(num_inputs: int, paths: Sequence[Path]) -> list[LabelTable | None]:
    """Return the table of each input: none, one for all, or one each in their order.

    Raises
    ------
    UserError
        If there are several tables, but not one for each input.
    """
    if not paths:
        return [None] * num_inputs
    if len(paths) not in (1, num_inputs):
        raise UserError(
            f"{len(paths)} tables of cell labels for {num_inputs} inputs; give --obs once for all, or once for each"
        )
    tables: list[LabelTable | None] = [LabelTable(path) for path in paths]
    return tables * num_inputs if len(tables) == 1 else tables


def _read(path: Path) -> pd.DataFrame:
    """Return a table indexed by cell name, with categorical texts."""
    suffixes = [s.lower() for s in path.suffixes]
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])
    try:
        if kind == ".parquet":
            return _compacted(_by_name(tabular.read_parquet(path, "give a table of cell labels")))
        if kind in _SEPARATORS:
            return _compacted(_read_text(path, _SEPARATORS[kind]))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as a table of cell labels ({reason})") from error
    raise UserError(f"{path}: a table of cell labels is .csv, .tsv, .txt (each also .gz) or .parquet")


def _read_text(path: Path, separator: str) -> pd.DataFrame:
    # pandas 3 makes categories of dtype="category" numbers if it can, and '007' would become 7
    options = {"dtype": "str", "keep_default_na": False, "na_values": _MISSING, "chunksize": ROWS_PER_READ}
    with open_bytes(path) as stream, pd.read_csv(stream, sep=separator, **options) as pieces:
        tables = [_by_name(piece).astype("category") for piece in pieces]
    columns = {c: union_categoricals([t[c] for t in tables], sort_categories=True) for c in tables[0]}
    return pd.DataFrame(columns, index=tables[0].index.append([t.index for t in tables[1:]]))


def _name_column(frame: pd.DataFrame) -> str:
    lower = {str(c).lower(): c for c in reversed(frame.columns)}
    return str(next((lower[name] for name in NAME_COLUMNS if name in lower), frame.columns[0]))


def _by_name(frame: pd.DataFrame) -> pd.DataFrame:
    if isinstance(frame.index, pd.RangeIndex):
        if frame.shape[1] == 0:
            raise ValueError("it has no columns")
        frame = frame.set_index(_name_column(frame))
    frame.index = frame.index.astype(object).where(frame.index.notna(), "").map(str)
    return frame


def _compacted(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({name: _compact(values) for name, values in frame.items()}, index=frame.index)


def _compact(values: pd.Series) -> pd.Series:
    """Return texts as a categorical, and texts that are all numbers as numbers ('007' is none)."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        texts = values.cat.categories
        numbers = np.asarray(pd.to_numeric(texts, errors="coerce"), np.float64)
        padded = any(len(t) > 1 and t[0] == "0" and t[1].isdigit() for t in map(str, texts))
        if len(texts) == 0 or np.isnan(numbers).any() or padded:
            return values
        codes = values.cat.codes.to_numpy()
        if (codes >= 0).all() and (numbers == np.floor(numbers)).all() and np.abs(numbers).max() < 2**53:
            return pd.Series(numbers.astype(np.int64)[codes], index=values.index)
        return pd.Series(np.append(numbers, np.nan)[codes], index=values.index)
    plain = pd.api.types.is_numeric_dtype(values.dtype) or pd.api.types.is_bool_dtype(values.dtype)
    return values if plain and isinstance(values.dtype, np.dtype) else values.astype("category")
