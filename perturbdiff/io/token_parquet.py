"""Parquet files with a row for each cell and lists of gene tokens and counts: Tahoe-100M on the Hugging Face hub.

A data set is a folder of many such files (`data/train-00000-of-03388.parquet` …) beside small tables: `gene_metadata.
parquet` names the gene of each token, and `sample_metadata.parquet` has further labels of a sample, such as drug and
dose. The first entry of a cell may be a marker instead of a gene; its value is negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from perturbdiff.io.damage import explain_damage
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.parquet_bounds import checked_metadata

TOKENS, COUNTS = "genes", "expressions"
GENE_TABLE, SAMPLE_TABLE = "gene_metadata.parquet", "sample_metadata.parquet"
_ROWS_PER_READ = 512
"""Cells that are decoded at once: about a block of values."""
_BUFFER = 1 << 20  # bytes of a column that are read at once, so that a large row group is not held


def is_token_parquet(path: Path) -> bool:
    """Return whether a path is a Parquet file of cells, or a folder of such files."""
    first = next(iter(_shards(path)), None)
    if first is None:
        return False
    try:
        return {TOKENS, COUNTS} <= set(parquet.read_schema(first).names)
    except (pa.ArrowException, OSError, ValueError):
        return False


def _shards(path: Path) -> list[Path]:
    """Return the files of cells of a data set; its tables of genes, samples and so on are none."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    folder = path / "data" if (path / "data").is_dir() else path
    return sorted(file for file in folder.glob("*.parquet") if not file.name.endswith("_metadata.parquet"))


def tables_beside(path: Path) -> list[Path]:
    """Return the tables of genes and of samples that belong to a Parquet file or folder of cells."""
    return [table for name in (GENE_TABLE, SAMPLE_TABLE) if (table := beside(path, name)) is not None]


def beside(path: Path, name: str) -> Path | None:
    """Return a table that belongs to a Parquet file or folder of cells, if it is there."""
    near = path if path.is_dir() else path.parent
    places = [near, near / "metadata", near.parent / "metadata"]
    return next((place / name for place in places if (place / name).is_file()), None)


class TokenParquet:
    """A Parquet file of cells or a folder of them: its schema was looked at, no value was read.

    Attributes
    ----------
    path
        The file or folder.
    files
        The files, in the order of their names.
    edges
        Row of the first cell of each file, and the number of cells at the end, int64 [files + 1].
    num_values
        Entries of all lists, markers among them.

    Raises
    ------
    UserError
        If a file is damaged or has other columns than the first.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, _shards(path)
        counted, self.num_values = [0], 0
        for file in self.files:
            with explain_damage(file):
                facts = checked_metadata(file)
            schema = facts.schema.to_arrow_schema()
            if not counted[1:]:
                self.schema = schema
                self._check(file)
            elif schema.names != self.schema.names or schema.types != self.schema.types:
                raise UserError(
                    f"{file}: has other columns than {self.files[0].name}; keep one data set in a folder"
                )
            counted.append(facts.num_rows)
            self.num_values += _entries(facts)
        self.edges = np.cumsum(counted, dtype=np.int64)

    def _check(self, file: Path) -> None:
        """Refuse columns of another type."""
        for name, wanted, known in ((TOKENS, "whole numbers", _whole), (COUNTS, "numbers", is_number)):
            kind = self.schema.field(name).type
            lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
            if not lists or not known(kind.value_type):
                raise UserError(f"{file}: column '{name}' is {kind}, not lists of {wanted}")

    def __contains__(self, name: object) -> bool:
        """Return False: there are no groups as in HDF5 or Zarr."""
        return False

    def batches(self, start: int, stop: int, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the first row and the columns of some rows at a time, of ``start`` to ``stop``."""
        for file, low, high in zip(
            self.files, self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True
        ):
            if start < high and stop > low:
                yield from _rows(file, low, max(start, low), min(stop, high), columns)


def _rows(
    file: Path, offset: int, start: int, stop: int, columns: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield rows of one file, whose first row has the number ``offset``; a row group is decoded piece by piece."""
    with explain_damage(file), parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as opened:
        ends = offset + np.cumsum(
            [0, *(opened.metadata.row_group(k).num_rows for k in range(opened.num_row_groups))]
        )
        groups = np.flatnonzero((ends[:-1] < stop) & (ends[1:] > start)).tolist()
        if not groups:
            return
        row = int(ends[groups[0]])
        for batch in opened.iter_batches(_ROWS_PER_READ, row_groups=groups, columns=list(columns)):
            first, last = max(start, row), min(stop, row + len(batch))
            if first < last:
                yield first, batch.slice(first - row, last - first)
            row += len(batch)
            if row >= stop:
                return


def _entries(facts: parquet.FileMetaData) -> int:
    """Return the entries of the lists of counts, from the footer alone."""
    total = 0
    for number in range(facts.num_row_groups):
        group = facts.row_group(number)
        columns = (group.column(k) for k in range(group.num_columns))
        total += sum(c.num_values for c in columns if c.path_in_schema.partition(".")[0] == COUNTS)
    return total


def _whole(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind)


def is_number(kind: pa.DataType) -> bool:
    """Return whether values are numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
