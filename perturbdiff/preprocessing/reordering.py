"""The second and third pass, which sort cells by condition.

The second pass writes the kept cells of each piece to a spill file. In the third pass, each partition of the store
collects its cells from the spill files, bucket by bucket.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from perturbdiff.conditions.condition import SORTED_BY
from perturbdiff.preprocessing.passes import Passes, PieceReader, load, save
from perturbdiff.runtime import files
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.store import row_kernels
from perturbdiff.store.store import value_factors
from perturbdiff.store.store_writer import PartWriter, rows_per_shard

_SEGMENT = np.dtype(
    [("piece", "i4"), ("bucket", "i4"), ("offset", "i8"), ("size", "i8"), ("cells", "i8"), ("values", "i8")]
)

pa.set_memory_pool(
    pa.system_memory_pool()
)  # Arrow's own pool does not return freed memory, 30 MiB per process


@dataclass(frozen=True)
class Plan:
    """The bucket of each cell, and the partition of each bucket.

    Attributes
    ----------
    first_bucket, num_buckets
        First bucket and number of buckets of each condition.
    part
        Partition of each condition.
    bucket_part
        Partition of each bucket.
    """

    first_bucket: np.ndarray
    num_buckets: np.ndarray
    part: np.ndarray
    bucket_part: np.ndarray


@dataclass(frozen=True)
class ScatterSettings:
    """Settings of the second pass.

    Attributes
    ----------
    plan
        Buckets of the store's conditions.
    condition
        Number in the store of each condition of the inputs, or -1 for one without cells, int32.
    column
        Column in the store of each gene of the inputs, or -1 for one that is not kept, int32.
    dtype
        Type of the stored values. It holds all values exactly.
    seed
        Seed of the cells' keys.
    most
        Maximum number of stored values in memory before they are written.
    """

    plan: Plan
    condition: np.ndarray
    column: np.ndarray
    dtype: np.dtype
    seed: int
    most: int


@dataclass
class Bucket:
    """Cells of one bucket in store order, as CSR rows with their labels and counts."""

    condition: np.ndarray
    row: np.ndarray
    depth: np.ndarray
    detected: np.ndarray
    cell: pa.Array
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


def plan_buckets(conditions: pd.DataFrame, bucket_cells: int, part_cells: int) -> Plan:
    """Divide sorted conditions into partitions and buckets.

    Partitions end between combinations of cell type and batch, so that a condition and its controls are in one
    partition. If one combination alone exceeds ``part_cells``, they end between conditions. A condition larger than
    ``bucket_cells`` is spread over several buckets of one partition.
    """
    sizes = conditions["n_cells"].to_numpy(np.int64)
    group = conditions.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    group_size = np.bincount(group, weights=sizes).astype(np.int64)
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


def scatter(passes: Passes, settings: ScatterSettings) -> np.ndarray:
    """Run the second pass. Return its segments by bucket and piece, a structured array (see `read_bucket`)."""
    passes.run("spill", scatter_piece, settings, label="sorting cells")
    by_piece = []
    for piece, result in zip(passes.pieces, passes.results("spill"), strict=True):
        segments = result["segments"]
        segments["piece"] = piece.number
        by_piece.append(segments)
    every = np.concatenate(by_piece)
    return every[np.lexsort((every["offset"], every["piece"], every["bucket"]))]


def scatter_piece(reader: PieceReader, settings: ScatterSettings) -> dict[str, np.ndarray]:
    """Write a piece's kept cells, with the chosen genes, to its spill file. Return the positions of the buckets."""
    path = spill_file(reader.scratch, reader.piece.number)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as sink:
        buffer = _Buffer(reader, settings, sink)
        for block in reader.blocks():
            buffer.add(block)
        buffer.flush()
        sink.flush()
        os.fsync(sink.fileno())
    partial.replace(path)
    return {"segments": np.array(buffer.segments, _SEGMENT)}


class _Buffer:
    """Rows of a piece that have not been written yet."""

    def __init__(self, reader: PieceReader, settings: ScatterSettings, sink: IO[bytes]) -> None:
        self._reader, self._settings, self._sink = reader, settings, sink
        place = reader.columns
        self._columns = np.where(place >= 0, settings.column[np.maximum(place, 0)], -1).astype(np.int32)
        scan, codes = reader.saved("scan"), reader.codes
        self._code = np.where(codes >= 0, settings.condition[np.maximum(codes, 0)], -1).astype(np.int32)
        self._depth, self._detected = scan["depth"].astype(np.float32), scan["detected"]
        num_genes = int(settings.column.max()) + 1
        self._indices = np.empty(0, index_dtype(num_genes))
        self._data = np.empty(0, settings.dtype)
        self._schema = _schema(self._indices.dtype, self._data.dtype)
        self._lengths = np.zeros(reader.num_cells, np.int64)
        self._first = self._next = self._end = 0  # rows first..next of the piece wait, with `end` values
        self.segments: list[tuple[int, int, int, int, int, int]] = []

    def add(self, block: Any) -> None:
        """Add the positive values of the chosen genes in the block's rows."""
        most = len(block.data) + 1  # the room that `select_columns` needs
        if self._end + most > len(self._data):
            self.flush()
            if most > len(self._data):
                size = max(most, min(self._settings.most, self._likely(most, block.stop - block.start)))
                self._indices, self._data = (
                    np.empty(size, self._indices.dtype),
                    np.empty(size, self._data.dtype),
                )
        rows = slice(self._next, self._next + block.stop - block.start)
        keep = self._code[rows] >= 0
        self._end += row_kernels.select_columns(
            block.indptr, block.indices, block.data, self._columns, keep,
            self._indices[self._end :], self._data[self._end :], self._lengths[rows],
        )  # fmt: skip
        self._next = rows.stop

    def _likely(self, values: int, rows: int) -> int:
        """Estimate the number of values in the piece from the number of values in its first rows."""
        return values * -(-self._reader.num_cells // rows)

    def flush(self) -> None:
        """Write the rows in memory, as one segment for each of their buckets."""
        if self._first == self._next:
            return
        rows = slice(self._first, self._next)
        first, piece = self._first, self._reader.piece
        code, lengths = self._code[rows], self._lengths[rows]
        key = np.empty(len(code), np.uint64)
        row_kernels.shuffle_keys(self._settings.seed, piece.first + first, key)
        bucket = _buckets(code, key, self._settings.plan)
        names = self._reader.file.cell_names(piece.start + rows.start, piece.start + rows.stop)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(bucket, kind="stable")
        present, at = np.unique(bucket[order], return_index=True)
        for number, local in zip(present.tolist(), np.split(order, at[1:]), strict=True):
            if number < 0:
                continue
            values = self._take(starts[local], lengths[local])
            labels = {
                "condition": code[local],
                "key": key[local],
                "row": piece.first + first + local,
                "depth": self._depth[rows][local],
                "detected": self._detected[rows][local],
                "cell": pa.array(names[local], pa.large_string()),
            }
            packed = pa.record_batch({**labels, **values}, self._schema).serialize()
            num = len(values["data"].values)
            self.segments.append((piece.number, number, self._sink.tell(), packed.size, len(local), num))
            self._sink.write(packed)
        self._first, self._end = self._next, 0

    def _take(self, starts: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
        """Return the column numbers and values of some of the rows as lists."""
        size = int(lengths.sum())
        indices, data = np.empty(size, self._indices.dtype), np.empty(size, self._data.dtype)
        ends = np.cumsum(lengths)
        row_kernels.place_rows(starts, lengths, ends - lengths, self._indices, self._data, indices, data)
        offsets = pa.array(np.concatenate([[0], ends]), pa.int64())
        return {
            "indices": pa.LargeListArray.from_arrays(offsets, pa.array(indices)),
            "data": pa.LargeListArray.from_arrays(offsets, pa.array(data)),
        }


def _buckets(code: np.ndarray, key: np.ndarray, plan: Plan) -> np.ndarray:
    """Return each cell's bucket, or -1 for dropped cells. The buckets of a large condition divide the range of keys."""
    known = np.maximum(code, 0)
    share = ((key >> np.uint64(32)) * plan.num_buckets[known].astype(np.uint64)) >> np.uint64(32)
    return np.where(code >= 0, plan.first_bucket[known] + share.astype(np.int64), -1)


def index_dtype(num_genes: int) -> np.dtype:
    """Return the integer type of stored column numbers."""
    return np.dtype(np.int16 if num_genes <= 1 << 15 else np.int32)


def spill_file(folder: Path, piece: int) -> Path:
    """Return the path of a piece's spill file."""
    return folder / f"spill-{piece:05d}.arrow"


def read_bucket(folder: Path, segments: np.ndarray, num_genes: int, dtype: np.dtype) -> Bucket:
    """Return the cells of one bucket's segments in store order: by condition, then by their random key."""
    kind = _schema(index_dtype(num_genes), dtype)
    batches = [_read(folder, segment, kind) for segment in segments]
    names = ("condition", "key", "row", "depth", "detected")
    flat = {n: np.concatenate([b.column(n).to_numpy() for b in batches]) for n in names}
    order = np.lexsort((flat["row"], flat["key"], flat["condition"]))
    lengths = np.concatenate([b.column("data").value_lengths().to_numpy() for b in batches])
    indptr = np.concatenate([[0], np.cumsum(lengths[order])])
    places = np.empty(len(order), np.int64)  # position of each row's values in the output
    places[order] = indptr[:-1]
    indices, data = np.empty(indptr[-1], index_dtype(num_genes)), np.empty(indptr[-1], dtype)
    first = 0
    for batch in batches:
        rows = slice(first, first + batch.num_rows)
        starts = np.cumsum(lengths[rows]) - lengths[rows]
        row_kernels.place_rows(
            starts, lengths[rows], places[rows],
            batch.column("indices").values.to_numpy(), batch.column("data").values.to_numpy(), indices, data,
        )  # fmt: skip
        first = rows.stop
    return Bucket(
        **{n: flat[n][order] for n in ("condition", "row", "depth", "detected")},
        cell=pa.concat_arrays([b.column("cell") for b in batches]).take(pa.array(order)),
        indptr=indptr,
        indices=indices,
        data=data,
    )


def _read(folder: Path, segment: np.void, kind: pa.Schema) -> pa.RecordBatch:
    with pa.memory_map(str(spill_file(folder, int(segment["piece"])))) as source:
        source.seek(int(segment["offset"]))
        return pa.ipc.read_record_batch(source.read_buffer(int(segment["size"])), kind)


def _schema(index_type: np.dtype, data_type: np.dtype) -> pa.Schema:
    """Return the columns of a segment."""
    known = {
        "condition": pa.int32(),
        "key": pa.uint64(),
        "row": pa.int64(),
        "depth": pa.float32(),
        "detected": pa.int32(),
        "cell": pa.large_string(),
    }
    lists = {"indices": index_type, "data": data_type}
    return pa.schema(known | {n: pa.large_list(pa.from_numpy_dtype(kind)) for n, kind in lists.items()})


@dataclass(frozen=True)
class ObsColumns:
    """Makes the obs of a cell from its condition and its row among all inputs.

    Attributes
    ----------
    labels
        Cell type, batch and perturbation of every condition, with the categories of the complete store.
    dose
        Dose of every condition, if the data have one.
    sources, offsets
        Names of the inputs, and the first row of each.
    extra
        Further columns. For each, the file of its values or category numbers by row, and its categories.
    """

    labels: dict[str, pd.Categorical]
    dose: np.ndarray | None
    sources: Sequence[str]
    offsets: np.ndarray
    extra: dict[str, tuple[Path, pd.Index | None]]

    def frame(self, bucket: Bucket) -> pd.DataFrame:
        """Return obs of the bucket's cells, indexed by their names."""
        columns: dict[str, Any] = {n: labels[bucket.condition] for n, labels in self.labels.items()}
        if self.dose is not None:
            columns["dose"] = self.dose[bucket.condition]
        columns["n_counts"] = bucket.depth
        columns["n_genes"] = bucket.detected
        source = np.searchsorted(self.offsets, bucket.row, "right") - 1
        columns["source_row"] = bucket.row - self.offsets[source]
        names = sorted(set(self.sources))
        number = pd.Index(names).get_indexer(pd.Index(self.sources))
        columns["source_file"] = pd.Categorical.from_codes(number[source], names)
        for name, (path, categories) in self.extra.items():
            values = np.load(path, mmap_mode="r")[bucket.row]
            columns[name] = values if categories is None else pd.Categorical.from_codes(values, categories)
        return pd.DataFrame(columns, index=pd.Index(pd.array(bucket.cell, dtype="string[pyarrow]")))


@dataclass(frozen=True)
class PartTask:
    """One partition of the store, in the form that is sent to a worker.

    Attributes
    ----------
    number
        Number of the partition.
    folder, scratch
        Folders of the partition and of the spill files.
    conditions
        Conditions of the partition.
    segments
        Segments of the partition, ordered by bucket.
    obs
        See `ObsColumns`.
    var
        Gene statistics of the store.
    dtype
        Type of the stored values.
    facts
        Facts about the store, as in the manifest.
    """

    number: int
    folder: Path
    scratch: Path
    conditions: pd.DataFrame
    segments: np.ndarray
    obs: ObsColumns
    var: pd.DataFrame
    dtype: np.dtype
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the partition's folder."""
        return f"part-{self.number:04d}.zarr"

    @property
    def num_cells(self) -> int:
        """Number of cells in the partition."""
        return int(self.conditions["n_cells"].sum())


@dataclass(frozen=True)
class Part:
    """A finished partition: its name, number of cells, largest normalised value of each gene, and file hashes."""

    name: str
    num_cells: int
    largest: np.ndarray
    checksums: dict[str, str]


def gather(crew: TaskRunner, tasks: Sequence[PartTask]) -> list[Part]:
    """Write the partitions that are not finished yet. Return all of them."""
    left = [task for task in tasks if not _result(task).exists()]
    crew.run(write_part, left, weights=[task.num_cells for task in left], label="writing cells")
    return [_finished(task) for task in tasks]


def write_part(task: PartTask) -> None:
    """Write one partition under a temporary name in the scratch folder, then move it to its place."""
    partial = task.scratch / f".{task.name}.{os.getpid()}"
    files.remove(partial)
    largest = np.zeros(len(task.var), np.float32)
    writer = PartWriter(
        partial,
        num_cells=task.num_cells,
        num_values=int(task.segments["values"].sum()),
        num_genes=len(task.var),
        mean_values=task.facts["n_values"] / task.facts["n_cells"],
        rows_per_shard=rows_per_shard(task.facts["n_cells"]),
        dtype=task.dtype,
        index_dtype=index_dtype(len(task.var)),
    )
    try:
        _fill(writer, task, largest)
    except BaseException:
        writer.release()
        files.remove(partial)
        raise
    files.remove(task.folder / task.name)
    partial.rename(task.folder / task.name)
    hashes = np.array(json.dumps(writer.checksums, sort_keys=True))
    save(_result(task), {"largest": largest, "checksums": hashes})


def _fill(writer: PartWriter, task: PartTask, largest: np.ndarray) -> None:
    facts, conditions = task.facts, task.conditions
    target_sum = float("nan") if facts["target_sum"] is None else facts["target_sum"]
    numbers = task.segments["bucket"]
    for number in np.unique(numbers):
        bucket = read_bucket(task.scratch, task.segments[numbers == number], len(task.var), task.dtype)
        obs = task.obs.frame(bucket)
        factors = value_factors(bucket.depth, target_sum, facts["input_scale"])
        row_kernels.column_maximum(bucket.indptr, bucket.indices, bucket.data, factors, largest)
        writer.append(obs, bucket.indptr, bucket.indices, bucket.data)
    first = conditions["start"].min()
    local = conditions.assign(start=conditions["start"] - first, stop=conditions["stop"] - first)
    writer.close(task.var, {"perturbdiff": {**_unstructured(facts), "conditions": local}})


def _unstructured(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts for the uns of a partition, where no value can be None."""
    names = ("format", "target_sum", "scale", "input_scale", "control", "seed")
    recipe = json.dumps(facts["hvg"], sort_keys=True)
    return {**{n: facts[n] for n in names if facts[n] is not None}, "hvg": recipe}


def _result(task: PartTask) -> Path:
    return task.scratch / f"part-{task.number:04d}.npz"


def _finished(task: PartTask) -> Part:
    saved = load(_result(task))
    return Part(task.name, task.num_cells, saved["largest"], json.loads(str(saved["checksums"])))


def label_columns(conditions: pd.DataFrame) -> dict[str, pd.Categorical]:
    """Return the labels of the conditions, with the categories that all partitions share."""
    return {n: pd.Categorical(conditions[n]) for n in SORTED_BY}
