"""The second pass: rows go to one spill file per bucket, from which each bucket is later put in order.

A bucket holds whole conditions, or a share of a large one. Every cell has a random 64-bit key from the seed and
its row number; cells are ordered by condition and key, and buckets are ranges of that order. So the order does
not depend on the size of blocks or buckets, and nothing has to be kept per cell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from perturbdiff.data import kernels
from perturbdiff.data.counts import CountsFile, Inputs
from perturbdiff.data.matrices import Block
from perturbdiff.data.scan import Scan
from perturbdiff.progress import track

_MOST_BUCKETS = 400  # each is an open file while rows are scattered


@dataclass(frozen=True)
class Plan:
    """Which bucket each cell goes to, and which part of the store each bucket.

    Attributes
    ----------
    first_bucket, num_buckets
        Of each condition.
    part
        Of each condition.
    bucket_part
        Part of each bucket.
    """

    first_bucket: np.ndarray
    num_buckets: np.ndarray
    part: np.ndarray
    bucket_part: np.ndarray


@dataclass
class Bucket:
    """Cells of one bucket in store order: CSR rows and what is known of each cell."""

    condition: np.ndarray
    row: np.ndarray
    cell: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


def plan_buckets(conditions: pd.DataFrame, bucket_cells: int, part_cells: int) -> Plan:
    """Cut sorted conditions into parts and buckets.

    Parts end between combinations of cell type and batch, so that a condition and its controls share a part,
    unless one combination alone exceeds ``part_cells``; then between conditions. A condition larger than
    ``bucket_cells`` is spread over several buckets of the same part.
    """
    sizes = conditions["n_cells"].to_numpy(np.int64)
    group = conditions.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    group_size = np.bincount(group, weights=sizes).astype(np.int64)
    bucket_cells = max(bucket_cells, int(sizes.sum()) // _MOST_BUCKETS)
    part = np.zeros(len(sizes), np.int64)
    number, filled = 0, 0
    for c in range(len(sizes)):
        starts_group = c == 0 or group[c] != group[c - 1]
        needed = min(group_size[group[c]], part_cells) if starts_group else sizes[c]
        if filled and filled + needed > part_cells:
            number, filled = number + 1, 0
        part[c] = number
        filled += sizes[c]
    first, num, bucket_part = np.zeros(len(sizes), np.int64), np.ones(len(sizes), np.int64), []
    filled = bucket_cells
    for c in range(len(sizes)):
        num[c] = max(1, -(-sizes[c] // bucket_cells))
        fits = num[c] == 1 and filled + sizes[c] <= bucket_cells and part[c] == part[c - 1]
        if not fits:
            bucket_part += [int(part[c])] * int(num[c])
            filled = 0
        first[c] = len(bucket_part) - num[c]
        filled = filled + sizes[c] if num[c] == 1 else bucket_cells
    return Plan(first, num, part, np.array(bucket_part, np.int64))


def scatter(
    inputs: Inputs, scan: Scan, plan: Plan, genes: list[str], dtype: np.dtype, seed: int, folder: Path
) -> np.ndarray:
    """Write the kept cells' values of the chosen genes to spill files; return the values in each bucket.

    Parameters
    ----------
    scan
        With ``codes`` numbering the planned conditions.
    genes
        Chosen genes, the columns of the store.
    dtype
        Of the stored values, into which all values fit exactly.
    folder
        Where ``bucket-NNNN.arrow`` files are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num = len(plan.bucket_part)
    stored = np.zeros(num, np.int64)
    with contextlib.ExitStack() as stack, track("sorting cells", inputs.n_cells) as progress:
        writers = [_Writer(spill_file(folder, b), stack) for b in range(num)]
        for file, offset in zip(inputs.files, inputs.offsets, strict=False):
            columns = inputs.columns_of(file, genes)
            for block in file.blocks():
                row = np.arange(offset + block.start, offset + block.stop)
                code = scan.codes[row[0] : row[-1] + 1]
                key = np.empty(len(row), np.uint64)
                kernels.shuffle_keys(seed, int(row[0]), key)
                bucket = _buckets(code, key, plan)
                for b, batch in _batches(file, block, columns, dtype, code, key, row, bucket, len(genes)):
                    writers[b].write(batch)
                    stored[b] += len(batch.column("data").values)
                progress.advance(len(row))
    return stored


def _buckets(code: np.ndarray, key: np.ndarray, plan: Plan) -> np.ndarray:
    """Return each cell's bucket, -1 for dropped cells: a large condition's buckets share out the keys."""
    known = np.maximum(code, 0)
    share = ((key >> np.uint64(32)) * plan.num_buckets[known].astype(np.uint64)) >> np.uint64(32)
    return np.where(code >= 0, plan.first_bucket[known] + share.astype(np.int64), -1)


def _batches(
    file: CountsFile,
    block: Block,
    columns: np.ndarray,
    dtype: np.dtype,
    code: np.ndarray,
    key: np.ndarray,
    row: np.ndarray,
    bucket: np.ndarray,
    num_genes: int,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the block's rows of each bucket as a record batch."""
    indices, data = np.empty(len(block.data), index_dtype(num_genes)), np.empty(len(block.data), dtype)
    lengths = np.empty(len(code), np.int64)
    kernels.select_columns(
        block.indptr, block.indices, block.data, columns, bucket >= 0, indices, data, lengths
    )
    starts = np.cumsum(lengths) - lengths
    names = file.cell_names(block.start, block.stop)
    order = np.argsort(bucket, kind="stable")
    present, first = np.unique(bucket[order], return_index=True)
    for b, rows in zip(present, np.split(order, first[1:]), strict=True):
        if b < 0:
            continue
        size = int(lengths[rows].sum())
        own_indices, own_data = np.empty(size, indices.dtype), np.empty(size, dtype)
        kernels.take_rows(starts[rows], lengths[rows], indices, data, own_indices, own_data)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths[rows])]), pa.int64())
        yield (
            int(b),
            pa.record_batch(
                {
                    "condition": code[rows],
                    "key": key[rows],
                    "row": row[rows],
                    "cell": pa.array(names[rows], pa.large_string()),
                    "indices": pa.LargeListArray.from_arrays(offsets, pa.array(own_indices)),
                    "data": pa.LargeListArray.from_arrays(offsets, pa.array(own_data)),
                }
            ),
        )


def index_dtype(num_genes: int) -> np.dtype:
    """Return the integer type of stored column numbers."""
    return np.dtype(np.int16 if num_genes <= 1 << 15 else np.int32)


def spill_file(folder: Path, bucket: int) -> Path:
    """Return the path of a bucket's spill file."""
    return folder / f"bucket-{bucket:04d}.arrow"


class _Writer:
    """A spill file that is opened at its first batch."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.path, self._stack, self._stream = path, stack, None

    def write(self, batch: pa.RecordBatch) -> None:
        if self._stream is None:
            sink = self._stack.enter_context(self.path.open("wb"))
            self._stream = self._stack.enter_context(pa.ipc.new_stream(sink, batch.schema))
        self._stream.write_batch(batch)


def gather(path: Path) -> Bucket:
    """Return a spill file's cells in store order: by condition, then by their random key."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        batches = list(stream)
    flat = {n: np.concatenate([b.column(n).to_numpy() for b in batches]) for n in ("condition", "key", "row")}
    cell = np.concatenate([b.column("cell").to_numpy(zero_copy_only=False) for b in batches])
    lengths = np.concatenate([b.column("data").value_lengths().to_numpy() for b in batches])
    indices, data = (
        np.concatenate([b.column(n).values.to_numpy() for b in batches]) for n in ("indices", "data")
    )
    order = np.lexsort((flat["row"], flat["key"], flat["condition"]))
    starts = (np.cumsum(lengths) - lengths)[order]
    own_indices, own_data = np.empty_like(indices), np.empty_like(data)
    kernels.take_rows(starts, lengths[order], indices, data, own_indices, own_data)
    return Bucket(
        flat["condition"][order],
        flat["row"][order],
        cell[order],
        np.concatenate([[0], np.cumsum(lengths[order])]),
        own_indices,
        own_data,
    )
