"""What every baseline writes: predicted cells, then the real controls, and who made them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff import predictions
from perturbdiff.baselines.baseline_task import Task
from perturbdiff.runtime.progress import track
from perturbdiff.splits.splits import parts
from perturbdiff.store.store import Store

Blocks = Iterable[tuple[pd.DataFrame, sparse.csr_matrix]]
"""Predicted cells in the order of the wanted conditions: obs, and log1p values [n, G]."""


def open_task(store: Store, split: pd.DataFrame, part: str, seed: int) -> tuple[Task, pd.DataFrame]:
    """Return what a baseline is given, and `predictions.requests` of a part.

    Raises
    ------
    UserError
        If the split does not fit the store or the part has no conditions.
    """
    wanted = predictions.requests(store, split, part)
    train = parts(store.conditions, split) == "train"
    return Task(store, train, wanted["condition"].to_numpy(np.int64), seed), wanted


def write(
    path: Path, store: Store, wanted: pd.DataFrame, blocks: Blocks, *, facts: Mapping[str, Any], learned: bool
) -> dict[str, int]:
    """Write a predictions file; return the numbers of cells in it.

    Parameters
    ----------
    path
        Temporary path of a stage.
    store, wanted
        The store and the conditions predicted.
    blocks
        Their cells.
    facts
        ``method``, ``baseline``, ``baseline_kind`` and what else is to be known of who made them.
    learned
        Whether the method was trained on the conditions that it predicts.
    """
    total = int(wanted["n_cells"].sum())
    seen = predictions.seen_facts(pd.DataFrame(wanted if learned else wanted[:0]))
    with predictions.PredictionWriter(
        path,
        store.genes,
        method=str(facts["method"]),
        control=store.control,
        target_sum=store.target_sum,
        dataset=store.path.resolve().name,
        facts={**facts, **seen},
    ) as writer:
        with track(f"baseline {facts['method']}", total) as progress:
            for obs, values in blocks:
                writer.append(values, obs)
                progress.advance(len(obs))
        controls = predictions.append_controls(writer, store, wanted)
    return {"predicted_cells": total, "control_cells": controls}
