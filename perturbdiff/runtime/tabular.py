"""Read and write tables: CSV files without spreadsheet formulas, and one-line errors for CSV and parquet.

Spreadsheets execute texts that begin with ``=``, ``+``, ``-``, ``@``, a tab or a line end. In every CSV that we write,
an apostrophe is put in front of such a text, and `read_csv` removes it again, so that labels do not change. If
apostrophes already stand before such a character, one more is added. Numbers stay numbers, even if stored as text.

What a Parquet file claims stands in its footer. Runs of equal values take almost no room there, so that a file of a few
bytes can stand for billions of values, each of which takes memory. One that claims more than a file of its size can
hold is refused before a value is decoded.
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
from pyarrow import parquet

from perturbdiff.runtime.errors import UserError, listing, one_line
from perturbdiff.runtime.files import existing
from perturbdiff.runtime.untrusted import open_bytes

LARGEST_FOOTER = 256 << 20
"""Bytes. It describes columns and groups of rows, some 100 bytes for each column of each group."""
DECODED_AT_LEAST, DECODED_TIMES = 1 << 30, 1000
"""A file may hold this many decoded bytes, or this many times its own size. Sorted labels reach a few hundred times."""
MOST_COLUMNS = 200_000
_DEEPEST = 16  # levels of lists and structures; ours have two
_BYTES_PER_VALUE = 8
_TAIL = 8  # length of the footer, and four letters


def checked_metadata(path: Path) -> parquet.FileMetaData:
    """Return the footer of a Parquet file whose claims fit its size.

    Raises
    ------
    UserError
        If it claims more columns, levels or values than a file of its size holds.
    OSError, ValueError, pyarrow.ArrowException
        If it is no Parquet file, or damaged.
    """
    size = path.stat().st_size
    _check_footer(path, size)
    facts = parquet.read_metadata(path)
    if facts.num_columns > MOST_COLUMNS:
        raise _refused(path, f"{facts.num_columns:,} columns")
    schema = facts.schema
    for number in range(facts.num_columns):
        if (column := schema.column(number)).max_definition_level > _DEEPEST:
            raise _refused(path, f"a column '{column.path[:60]}…' of more than {_DEEPEST} levels")
    _check_claims(path, size, facts)
    return facts


def _check_footer(path: Path, size: int) -> None:
    with path.open("rb") as handle:
        handle.seek(max(size - _TAIL, 0))
        length = int.from_bytes(handle.read(4), "little")
    if length > LARGEST_FOOTER and length <= size:
        raise _refused(path, f"a description of its columns of {length >> 20} MiB")


def _check_claims(path: Path, size: int, facts: parquet.FileMetaData) -> None:
    """Refuse bytes that the file does not have, and values that it cannot hold."""
    rows, values, unpacked = 0, facts.num_rows * max(facts.num_columns, 1), 0
    for number in range(facts.num_row_groups):
        group = facts.row_group(number)
        rows += group.num_rows
        for place in range(group.num_columns):
            column = group.column(place)
            unpacked += max(column.total_uncompressed_size, 0)
            values += max(column.num_values - group.num_rows, 0)  # of lists
            if column.total_compressed_size > size or min(column.num_values, group.num_rows) < 0:
                raise UserError(
                    f"{path}: is damaged or cut off (column '{column.path_in_schema}' claims "
                    f"{column.total_compressed_size:,} of its {size:,} bytes); copy or make it again"
                )
    if rows != facts.num_rows:
        raise UserError(
            f"{path}: is damaged ({facts.num_rows:,} rows, {rows:,} in its groups); make it again"
        )
    most = max(DECODED_AT_LEAST, DECODED_TIMES * size)
    if values * _BYTES_PER_VALUE > most:
        raise _refused(path, f"{values:,} values in {size:,} bytes")
    if unpacked > most:
        raise _refused(path, f"{unpacked:,} bytes of values in {size:,} bytes")


def _refused(path: Path, claim: str) -> UserError:
    return UserError(f"{path}: claims {claim}, which no such table has; make it again from its source")


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
