"""Parquet files that claim more than a file of their size can hold, refused before a value is decoded.

What a file claims stands in its footer. Runs of equal values take almost no room in Parquet, so that a file of a few
bytes can stand for billions of values, each of which takes memory.
"""

from __future__ import annotations

from pathlib import Path

from pyarrow import parquet

from perturbdiff.runtime.errors import UserError

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
