"""The folder that an adapter gets: the training cells, the cells to predict and the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.baselines.baseline_task import Task
from perturbdiff.conditions.condition import LABELS
from perturbdiff.runtime.progress import track
from perturbdiff.splits.store_export import H5Writer, ObsReader
from perturbdiff.store.views import read_rows

_THREADS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS", "POLARS_MAX_THREADS", "RAYON_NUM_THREADS",
    "NPROC",  # JAX's on CPUs
)  # fmt: skip
_OF_OUR_PYTHON = ("PYTHON", "VIRTUAL_ENV")
_OF_A_JOB = (  # with these a library takes itself for one of several processes, or requeues the job
    "SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
CONTRACT = 1
"""Version of the contract. An adapter that knows only an older one must refuse the task."""
_ROWS_PER_BLOCK = 16_384
_FEW_VALUES = np.iinfo(np.int32).max

ADAPTERS = Path(__file__).parent / "adapters"
"""Folder of the scripts that run the tools, and of the module that they share."""


def environment(given: Mapping[str, str], scratch: Path, *, threads: int, device: str) -> dict[str, str]:
    """Return the environment variables of a method's process.

    Parameters
    ----------
    given
        Our own variables. Those that lead to our packages, or describe a job of several processes, are left out.
    scratch
        A folder that is removed afterwards, for caches: the home folder may be read-only or have a quota.
    threads
        CPU threads it may use.
    device
        'cpu' hides all GPUs.
    """
    kept = {
        name: value for name, value in given.items() if not name.startswith((*_OF_OUR_PYTHON, *_OF_A_JOB))
    }
    kept |= dict.fromkeys(_THREADS, str(threads))
    kept |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ADAPTERS),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # else the order of sets of labels changes, and with it their numbers
        "MPLBACKEND": "Agg",
        "WANDB_MODE": "disabled",
        "TQDM_MININTERVAL": "10",
        "MPLCONFIGDIR": str(scratch),
        "NUMBA_CACHE_DIR": str(scratch),
    }
    if device == "cpu":
        kept |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        if threads == 1:
            kept["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    else:
        kept.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    return kept


TASK, TRAIN, QUERIES, PREDICTIONS, FACTS = (
    "task.json",
    "train.h5ad",
    "queries.csv",
    "predictions.h5ad",
    "facts.json",
)


@dataclass(frozen=True)
class Written:
    """What the check of the predictions needs to know of the task.

    Attributes
    ----------
    n_cells
        Number of training cells, controls among them.
    maxima
        float32 [G]: the largest log1p training value of every gene.
    queries
        The table of ``queries.csv``.
    """

    n_cells: int
    maxima: np.ndarray
    queries: pd.DataFrame


def write_task(
    folder: Path,
    task: Task,
    sizes: np.ndarray,
    *,
    method: str,
    settings: Mapping[str, Any],
    threads: int,
    device: str,
    device_required: bool = True,
) -> Written:
    """Write the folder that docs/adapters.md describes, with one block of cells in memory at a time.

    Parameters
    ----------
    folder
        An empty folder.
    task
        Training conditions and the conditions to predict. No cell of a held-out condition is written.
    sizes
        int [n]: cells to predict of each of ``task.wanted``.
    method
        Name of the method.
    settings
        Its hyper-parameters.
    threads
        CPU threads it may use.
    device, device_required
        'cpu' or 'cuda', and whether the user chose it explicitly.

    Returns
    -------
    Written
        What was written.
    """
    store = task.store
    rows = _rows(task.conditions, np.flatnonzero(task.train | task.is_control))
    maxima = _write_cells(folder / TRAIN, task, rows)
    queries = _queries(task, sizes, rows)
    queries.to_csv(folder / QUERIES, index=False)  # text that programs in any language can read
    facts = {
        "contract": CONTRACT,
        "method": method,
        "control": store.control,
        "target_sum": store.target_sum,
        "has_counts": store.input_scale == "counts",
        "seed": task.seed,
        "threads": threads,
        "device": device,
        "device_required": device_required,
        "settings": dict(settings),
    }
    (folder / TASK).write_text(json.dumps(facts, indent=2) + "\n")
    return Written(len(rows), maxima, queries)


def _rows(conditions: pd.DataFrame, wanted: np.ndarray) -> np.ndarray:
    """Return the store rows of some conditions, int64, ascending."""
    start = conditions["start"].to_numpy(np.int64)[wanted]
    stop = conditions["stop"].to_numpy(np.int64)[wanted]
    spans = [np.arange(a, b) for a, b in zip(start, stop, strict=True)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *spans]))


def _queries(task: Task, sizes: np.ndarray, rows: np.ndarray) -> pd.DataFrame:
    """Return a row for every cell to predict: its labels, and the row of its matched control in the training cells."""
    blocks = []
    for condition, size in zip(map(int, task.wanted), map(int, sizes), strict=True):
        drawn = task.matched(condition, size)
        labels = {name: str(task.conditions[name].iloc[condition]) for name in LABELS}
        blocks.append(pd.DataFrame({**labels, "control_row": np.searchsorted(rows, drawn)}))
    return pd.concat(blocks, ignore_index=True)


def _write_cells(path: Path, task: Task, rows: np.ndarray) -> np.ndarray:
    """Write the training cells block by block and return the largest value of every gene, float32 [G]."""
    store, used = task.store, _used(task)
    maxima = np.zeros(store.n_genes, np.float32)
    reader = ObsReader(store)
    values = reader.count_values(rows)
    integer = np.dtype(np.int32 if values <= _FEW_VALUES else np.int64)
    shape = (len(rows), store.n_genes)
    writer = H5Writer(path, shape, values, np.dtype(np.float32), integer, "lzf")
    try:
        with track("training cells for the method", len(rows)) as progress:
            for first in range(0, len(rows), _ROWS_PER_BLOCK):
                wanted = rows[first : first + _ROWS_PER_BLOCK]
                block = read_rows(store, wanted, "log1p")
                indices = np.asarray(block.indices).astype(integer, copy=False)
                data = np.asarray(block.data)
                np.maximum.at(maxima, indices, data)
                writer.append(
                    _obs(reader.take(wanted), used, store.control), np.asarray(block.indptr), indices, data
                )
                progress.advance(len(wanted))
        writer.close(pd.DataFrame(index=pd.Index(store.genes, dtype=object)), {})
    finally:
        writer.release()
    return maxima


def _used(task: Task) -> dict[str, list[str]]:
    """Return the labels that occur among the training cells, sorted, by column."""
    here = task.conditions[task.train | task.is_control]
    return {name: sorted(set(here[name].astype(str))) for name in LABELS}


def _obs(found: pd.DataFrame, used: Mapping[str, list[str]], control: str) -> pd.DataFrame:
    """Return the columns that the contract promises."""
    labels = pd.DataFrame(
        {name: pd.Categorical(found[name].astype(str), categories=used[name]) for name in LABELS},
        index=found.index,
    )
    is_control = (labels["perturbation"] == control).to_numpy()
    return labels.assign(is_control=is_control, n_counts=found["n_counts"].to_numpy(np.float32))
