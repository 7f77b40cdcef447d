"""The third pass: each part of the store gathers its cells from the spill files, bucket by bucket, in store order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition_table import LABELS
from perturbdiff.preprocessing import spill
from perturbdiff.preprocessing.passes import load, save
from perturbdiff.runtime import files
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.store import row_sorting
from perturbdiff.store.store import value_factors
from perturbdiff.store.store_writer import PartWriter, rows_per_shard


@dataclass(frozen=True)
class ObsColumns:
    """How the obs of a cell follows from its condition and its row among all inputs.

    Attributes
    ----------
    labels
        Cell type, batch and perturbation of every condition, with the categories of the whole store.
    dose
        Dose of every condition, if the data have one.
    sources, offsets
        Names of the inputs, and the first row of each.
    extra
        Further columns: file of each one's values or category numbers by row, and its categories.
    """

    labels: dict[str, pd.Categorical]
    dose: np.ndarray | None
    sources: Sequence[str]
    offsets: np.ndarray
    extra: dict[str, tuple[Path, pd.Index | None]]

    def frame(self, bucket: spill.Bucket) -> pd.DataFrame:
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
    """One part of the store, as it travels to a worker.

    Attributes
    ----------
    number
        Of the part.
    folder, scratch
        Where the part and where the spill files are.
    conditions
        The part's own conditions.
    segments
        The part's segments, ordered by bucket.
    obs
        See `ObsColumns`.
    var
        Of the store.
    dtype
        Of the stored values.
    facts
        What the manifest says of the store.
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
        """Folder of the part."""
        return f"part-{self.number:04d}.zarr"

    @property
    def num_cells(self) -> int:
        """Cells of the part."""
        return int(self.conditions["n_cells"].sum())


@dataclass(frozen=True)
class Part:
    """A finished part: its name, its cells, each gene's largest normalised value, the hashes of its files."""

    name: str
    num_cells: int
    largest: np.ndarray
    checksums: dict[str, str]


def gather(crew: TaskRunner, tasks: Sequence[PartTask]) -> list[Part]:
    """Write the parts that are not there yet; return all of them."""
    left = [task for task in tasks if not _result(task).exists()]
    crew.run(write_part, left, weights=[task.num_cells for task in left], label="writing cells")
    return [_finished(task) for task in tasks]


def write_part(task: PartTask) -> None:
    """Write one part under a temporary name in the scratch folder, then put it in its place."""
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
        index_dtype=spill.index_dtype(len(task.var)),
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
    facts, own = task.facts, task.conditions
    target_sum = float("nan") if facts["target_sum"] is None else facts["target_sum"]
    numbers = task.segments["bucket"]
    for number in np.unique(numbers):
        bucket = spill.read_bucket(task.scratch, task.segments[numbers == number], len(task.var), task.dtype)
        obs = task.obs.frame(bucket)
        factors = value_factors(bucket.depth, target_sum, facts["input_scale"])
        row_sorting.column_maximum(bucket.indptr, bucket.indices, bucket.data, factors, largest)
        writer.append(obs, bucket.indptr, bucket.indices, bucket.data)
    local = own.assign(start=own["start"] - own["start"].min(), stop=own["stop"] - own["start"].min())
    writer.close(task.var, {"perturbdiff": {**_unstructured(facts), "conditions": local}})


def _unstructured(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts a part carries in its uns, where nothing can be None."""
    names = ("format", "target_sum", "scale", "input_scale", "control", "seed")
    recipe = json.dumps(facts["hvg"], sort_keys=True)
    return {**{n: facts[n] for n in names if facts[n] is not None}, "hvg": recipe}


def _result(task: PartTask) -> Path:
    return task.scratch / f"part-{task.number:04d}.npz"


def _finished(task: PartTask) -> Part:
    found = load(_result(task))
    return Part(task.name, task.num_cells, found["largest"], json.loads(str(found["checksums"])))


def label_columns(conditions: pd.DataFrame) -> dict[str, pd.Categorical]:
    """Return the labels of the conditions, with the categories that every part of the store shares."""
    return {n: pd.Categorical(conditions[n]) for n in LABELS}
