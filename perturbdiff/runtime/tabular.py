"""Tables as files: CSV that no spreadsheet takes for formulas; CSV and parquet read with one line for what is wrong.

A text that begins with ``=``, ``+``, ``-``, ``@``, a tab or a line end is run by spreadsheets. In every CSV that is
written such a text begins with an apostrophe instead, and `read_csv` takes it away again, so that labels stay what
they are. A text of apostrophes before such a character gets one more; numbers stay numbers, also those in a text.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from perturbdiff.runtime.errors import UserError, one_line

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_WRITTEN = re.compile(r"'+[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
_SHOWN = 160  # characters of what a library says
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError, OverflowError, MemoryError,
    pa.ArrowException,
)  # fmt: skip


def neutral(value: Any) -> Any:
    """Return a value as it stands in a CSV: a text that is a formula gets an apostrophe in front."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def restored(value: Any) -> Any:
    """Return the value that `neutral` made this of."""
    return value[1:] if isinstance(value, str) and _WRITTEN.match(value) else value


def write_csv(table: pd.DataFrame, path: Path, **options: Any) -> None:
    """Write a table without its index; see this module. ``options`` are pandas'."""
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
        options["quoting"] = csv.QUOTE_NONNUMERIC  # a carriage return alone is not quoted otherwise
    safe.to_csv(path, index=False, **options)


def read_csv(path: Path, remedy: str, **options: Any) -> pd.DataFrame:
    """Read a table; its texts are what they were before `write_csv`.

    Parameters
    ----------
    path
        The file.
    remedy
        What to do if it is no table, at the end of the message.
    options
        pandas'.

    Raises
    ------
    UserError
        In one line, if it is missing or no table.
    """
    try:
        found = pd.read_csv(path, **options)
    except _UNREADABLE as error:
        raise unreadable(path, error, remedy) from None
    found.columns = pd.Index([restored(name) for name in found.columns], dtype=object)
    for place, dtype in enumerate(found.dtypes):
        if not pd.api.types.is_numeric_dtype(dtype):
            found.isetitem(place, found.iloc[:, place].map(restored, na_action="ignore"))
    return found


def read_parquet(path: Path, remedy: str, **options: Any) -> pd.DataFrame:
    """Read a table, whose texts must be texts and not bytes; see `read_csv`."""
    try:
        schema = parquet.read_schema(path)
        unread = [f.name for f in schema if any(known(f.type) for known in _BYTES)]
        if unread:
            raise ValueError(f"column '{unread[0]}' holds bytes, not texts")
        return pd.read_parquet(path, **options)
    except _UNREADABLE as error:
        raise unreadable(path, error, remedy) from None


def unreadable(path: Path, error: BaseException, remedy: str) -> UserError:
    """Return what is said of a table that cannot be read."""
    said = one_line(str(error))[:_SHOWN] or type(error).__name__
    return UserError(f"{path}: is not a table, or damaged ({said}); {remedy}")
