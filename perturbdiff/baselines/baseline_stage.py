"""The `baseline` stage: learn from the training conditions of a store and predict the conditions of a part."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff import predictions
from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task, open_task, write
from perturbdiff.baselines.simple import BASELINES
from perturbdiff.conditions.condition import LABELS
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.method import Method
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

_CELLS_PER_BLOCK = 4096


def predict(
    name: str,
    store: Path,
    split: Path,
    out: Path,
    *,
    part: str = "test",
    embedding: Path | None = None,
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Predict every condition of a part with a built-in baseline, as many cells as the condition really has.

    Parameters
    ----------
    name
        One of `BASELINES`. docs/baselines.md describes them.
    store
        The store. Only the expression of training cells and control cells is read.
    split
        The split of its conditions.
    out
        Predictions to write (.h5ad or .zarr), with the real controls appended.
    part
        'train', 'valid' or 'test'.
    embedding
        Table of perturbation vectors (docs/embeddings.md), for a baseline that needs one.
    seed
        Seed of the draws of cells.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If the name is unknown, the split does not fit the store, the part has no conditions or no controls, or the
        baseline needs a table and has none, or the other way round.
    """
    if name not in BASELINES:
        raise UserError(f"no baseline '{name}'{nearest(name, BASELINES)} baselines: {listing(BASELINES, 20)}")
    if (embedding is None) == BASELINES[name].needs_vectors:
        has = (
            "needs vectors: give --embedding perturbation=FILE" if embedding is None else "has no --embedding"
        )
        raise UserError(f"baseline {name}: {has} (docs/embeddings.md)")
    out = Path(out)
    folder = predictions.format_of(out) == ".zarr"
    recipe = {"name": name, "part": part}
    inputs = {"store": Path(store), "split": Path(split)}
    if embedding is not None:
        inputs["perturbation"] = Path(embedding)
    with provenance.stage(
        "baseline", out, config=recipe, inputs=inputs, seed=seed, folder=folder, force=force
    ) as stage:
        if stage.skip:
            return out
        vectors = None if embedding is None else EmbeddingTable.read(Path(embedding))
        task, wanted = open_task(Store(store), read_split(Path(split)), part, seed, vectors)
        _write(stage, name, task, wanted, learned=part == "train" and BASELINES[name].trained)
    return out


def _write(stage: provenance.Stage, name: str, task: Task, wanted: pd.DataFrame, *, learned: bool) -> None:
    """Learn, predict and write. Note the numbers of cells written, and the seconds of learning and predicting."""
    baseline = BASELINES[name]
    spent = {"seconds": {}, "cpu_seconds": {}}
    with _measured(spent, "train"):
        predictor = baseline.learn(task)
    made_by = Method(
        baseline=name,
        baseline_kind="built-in",
        seed=task.seed,
        controls="balanced" if baseline.from_controls else None,
    )
    with _measured(spent, "predict"):
        blocks = _cells(task, wanted, predictor)
        stage.results |= write(stage.path, task.store, wanted, blocks, name, made_by, learned=learned)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    stage.notes["method_run"] = {**spent, "peak_memory_mib": round(peak, 1)}


@contextmanager
def _measured(spent: dict[str, dict[str, float]], phase: str) -> Iterator[None]:
    """Note the wall and CPU seconds of a block, as the adapters of external methods do."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    spent["seconds"][phase] = round(time.perf_counter() - wall, 3)
    spent["cpu_seconds"][phase] = round(time.process_time() - cpu, 3)


def _cells(
    task: Task, wanted: pd.DataFrame, predictor: Predictor
) -> Iterator[tuple[pd.DataFrame, sparse.csr_matrix]]:
    """Yield the predicted cells in blocks: obs and log1p values [n, G]."""
    names = list(LABELS)
    for i in range(len(wanted)):
        condition, size = int(wanted["condition"].iloc[i]), int(wanted["n_cells"].iloc[i])
        labels = {name: str(wanted[name].iloc[i]) for name in names}
        recipe = predictor(condition, size)
        for start in range(0, size, _CELLS_PER_BLOCK):
            stop = min(start + _CELLS_PER_BLOCK, size)
            obs = pd.DataFrame(labels, index=range(stop - start))
            yield obs, make_cells(task.store, recipe, start, stop)


def make_cells(store: Store, recipe: Recipe, start: int, stop: int) -> sparse.csr_matrix:
    """Return cells ``start`` to ``stop`` of a condition as float32 log1p [stop - start, G]."""
    if recipe.rows is None:
        if recipe.profile is None:
            raise ValueError("a recipe needs rows or a profile")
        return sparse.csr_matrix(np.tile(recipe.profile.astype(np.float32), (stop - start, 1)))
    if recipe.shift is None:
        return store.expression(recipe.rows[start:stop])
    values = store.dense(recipe.rows[start:stop])
    values += recipe.shift.astype(np.float32)
    return sparse.csr_matrix(np.maximum(values, 0, out=values))
