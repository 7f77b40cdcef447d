"""Read and write tables: CSV files without spreadsheet formulas, and one-line errors for CSV and parquet.

Spreadsheets execute texts that begin with ``=``, ``+``, ``-``, ``@``, a tab or a line end. In every CSV that we write,
an apostrophe is put in front of such a text, and `read_csv` removes it again, so that labels do not change. If
apostrophes already stand before such a character, one more is added. Numbers stay numbers, even if stored as text.
"""

from __future__ import annotations

import csv
import lzma
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from perturbdiff.runtime.errors import UserError, listing, one_line
from perturbdiff.runtime.files import existing
from perturbdiff.runtime.parquet_bounds import checked_metadata
from perturbdiff.runtime.untrusted import open_bytes

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_WRITTEN = re.compile(r"'+[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
_SHOWN = 160  # characters of a library's message
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError, OverflowError, MemoryError,
    EOFError, zlib.error, lzma.LZMAError, pa.ArrowException,
)  # fmt: skip


def neutral(value: Any) -> Any:
    """Return a value for a CSV file. A text that is a formula gets an apostrophe in front."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def restored(value: Any) -> Any:
    """Return the original value of the result of `neutral`."""
    return value[1:] if isinstance(value, str) and _WRITTEN.match(value) else value


def write_csv(table: pd.DataFrame, path: Path, **options: Any) -> None:
    """Write a table without its index, and without formulas. ``options`` are those of pandas."""
    safe = table.copy(deep=False)
    safe.columns = pd.Index([neutral(name) for name in table.columns], dtype=object)
    written: list[Any] = list(table.columns)
    for place, dtype in enumerate(table.dtypes):
        column = table.iloc[:, place]
        if isinstance(dtype, pd.CategoricalDtype):
            written += column.cat.categories.tolist()
            safe.isetitem(place, column.cat.rename_categories([neutral(v) for v in column.cat.categories]))
        elif not pd.api.types.is_numeric_dtype(dtype):
            written += column.tolist()
            safe.isetitem(place, column.astype(object).map(neutral, na_action="ignore"))
    if any(isinstance(value, str) and "\r" in value for value in written):
        options["quoting"] = csv.QUOTE_NONNUMERIC  # otherwise a lone carriage return is not quoted
    safe.to_csv(path, index=False, **options)


def read_csv(path: Path, remedy: str, **options: Any) -> pd.DataFrame:
    """Read a table, with its texts as they were before `write_csv`.

    Parameters
    ----------
    path
        The file.
    remedy
        What to do if it is not a table; it ends the error message.
    options
        Options of pandas.

    Raises
    ------
    UserError
        If the file is missing or not a table. The message is one line.
    """
    try:
        with open_bytes(path) as stream:
            table: pd.DataFrame = pd.read_csv(stream, **options)
    except _UNREADABLE as error:
        raise unreadable(path, error, remedy) from None
    table.columns = pd.Index([restored(name) for name in table.columns], dtype=object)
    for place, dtype in enumerate(table.dtypes):
        if not pd.api.types.is_numeric_dtype(dtype):
            table.isetitem(place, table.iloc[:, place].map(restored, na_action="ignore"))
    return table


def read_parquet(path: Path, remedy: str, **options: Any) -> pd.DataFrame:
    """Read a table, whose texts must be texts and not bytes; see `read_csv`."""
    try:
        schema = checked_metadata(path).schema.to_arrow_schema()
        unread = [f.name for f in schema if any(known(f.type) for known in _BYTES)]
        if unread:
            raise ValueError(f"column '{unread[0]}' holds bytes, not texts")
        return pd.read_parquet(path, **options)
    except _UNREADABLE as error:
        raise unreadable(path, error, remedy) from None


def unreadable(path: Path, error: BaseException, remedy: str) -> UserError:
    """Return the error for a table that cannot be read."""
    reason = one_line(str(error))[:_SHOWN] or type(error).__name__
    return UserError(f"{path}: is not a table, or damaged ({reason}); {remedy}")


def read_texts(path: Path, what: str, columns: Sequence[str], needed: Sequence[str]) -> pd.DataFrame:
    """Read a CSV, every value as text, empty ones as ''.

    Parameters
    ----------
    path, what
        The file, and what it is, for messages.
    columns, needed
        What it may hold, and what it must.

    Raises
    ------
    UserError
        If it is missing, is no table or lacks a column.
    """
    remedy = f"give a CSV of {', '.join(columns)}"
    table = read_csv(existing(path, what), remedy, dtype=str, keep_default_na=False)
    if lacking := [c for c in needed if c not in table]:
        raise UserError(f"{path}: no column {listing(lacking)}; it needs {', '.join(needed)}")
    return table
