"""What every baseline gets (`Task`), what it returns for a condition (`Recipe`), and how its cells are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff import predictions
from perturbdiff.conditions.condition import Condition, conditions_of
from perturbdiff.conditions.control_matching import BalancedControls, ControlPools, Rows
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.method import Method
from perturbdiff.runtime.errors import listing
from perturbdiff.runtime.progress import track
from perturbdiff.runtime.seeds import generator
from perturbdiff.splits.splits import parts
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

_DRAW = 21  # the first number of each seed, so that these draws differ from all others


@dataclass(frozen=True)
class Recipe:
    """How the cells of one condition are made: real cells, perhaps shifted, or one profile for all.

    Attributes
    ----------
    rows
        int64 [n]: store rows to copy. None: use ``profile``.
    shift
        float64 [G], log1p: added to every copied cell; the sum is clipped at 0.
    profile
        float64 [G], log1p: every cell's values.
    """

    rows: np.ndarray | None = None
    shift: np.ndarray | None = None
    profile: np.ndarray | None = None


Predictor = Callable[[int, int], Recipe]
"""Takes a condition (id in the store) and its number of cells."""


@dataclass(frozen=True)
class Task:
    """Training conditions of a store and the conditions to predict.

    Nothing here gives access to the expression of a held-out cell: rows come from `Task.controls` and from
    conditions in ``train``.

    Attributes
    ----------
    store
        The store.
    train
        bool [n_conditions]: conditions of the training part, the controls among them.
    wanted
        int64 [n]: conditions to predict.
    seed
        Seed of the draws.
    vectors
        Frozen vectors of perturbations, for baselines that need them.
    """

    store: Store
    train: np.ndarray
    wanted: np.ndarray
    seed: int
    vectors: EmbeddingTable | None = None

    @cached_property
    def conditions(self) -> pd.DataFrame:
        """`Store.conditions`."""
        return self.store.conditions

    def labels(self, column: str) -> np.ndarray:
        """Return one label of every condition, object [n_conditions]. Controls have the control as perturbation."""
        return self.conditions[column].astype(str).to_numpy(object)

    @cached_property
    def is_control(self) -> np.ndarray:
        """Which conditions are controls, bool [n_conditions]."""
        return self.conditions["is_control"].to_numpy(bool)

    @cached_property
    def perturbed(self) -> np.ndarray:
        """int64 [n]: training conditions that are not controls."""
        return np.flatnonzero(self.train & ~self.is_control)

    @cached_property
    def rows(self) -> Rows:
        """Rows of each condition."""
        return Rows(self.conditions)

    @cached_property
    def controls(self) -> ControlPools:
        """Matched controls of the wanted and of the training conditions."""
        return ControlPools(self.conditions, self.rows, np.union1d(self.wanted, self.perturbed))

    @cached_property
    def _balanced(self) -> BalancedControls:
        return BalancedControls(self.store, self.rows, seed=self.seed)

    def matched(self, condition: int, size: int) -> np.ndarray:
        """Return matched control rows of a condition, int64 [size].

        The choice is that of ``sample.controls=balanced``. With the same seed, our model starts from the same cells.
        """
        return self._balanced.take(self.controls.pool(condition), self._names[condition], size)

    @cached_property
    def _names(self) -> list[Condition]:
        """Each condition by its number."""
        return conditions_of(self.conditions)

    def rng(self, condition: int) -> np.random.Generator:
        """Return the generator of a condition's draws. It does not depend on what else is predicted."""
        return generator(_DRAW, self.seed, condition)

    def groups(self, labels: np.ndarray, use: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Number the labels of the used conditions.

        Returns
        -------
        groups
            int64 [n_conditions]: number of each condition's label, -1 where ``use`` is false.
        names
            The labels by number.
        """
        names = sorted(set(labels[use]))
        number = {name: i for i, name in enumerate(names)}
        return np.array(
            [number[v] if u else -1 for v, u in zip(labels, use, strict=True)], dtype=np.int64
        ), names

    def report_unseen(self, what: str, seen: set[str], column: str, fallback: str) -> None:
        """Log which labels of the wanted conditions are unseen in training, and what is predicted for them instead."""
        unseen = sorted(set(self.labels(column)[self.wanted]) - seen)
        if unseen:
            name = column.replace("_", " ")
            logger.warning(
                "%s: %d of the predicted %ss are unseen in training (%s): %s",
                what, len(unseen), name, listing(unseen, 4), fallback,
            )  # fmt: skip


Blocks = Iterable[tuple[pd.DataFrame, sparse.csr_matrix]]
"""Predicted cells in the order of the wanted conditions: obs, and log1p values [n, G]."""


def open_task(
    store: Store, split: pd.DataFrame, part: str, seed: int, vectors: EmbeddingTable | None = None
) -> tuple[Task, pd.DataFrame]:
    """Return the task of a baseline, and the conditions of a part with their numbers of cells.

    Raises
    ------
    UserError
        If the split does not fit the store or the part has no conditions.
    """
    wanted = predictions.requests(store, split, part)
    train = parts(store.conditions, split, store.path) == "train"
    return Task(store, train, wanted["condition"].to_numpy(np.int64), seed, vectors), wanted


def write(
    path: Path,
    store: Store,
    wanted: pd.DataFrame,
    blocks: Blocks,
    name: str,
    made_by: Method,
    *,
    learned: bool,
) -> dict[str, int]:
    """Write a predictions file and return the numbers of cells in it.

    Parameters
    ----------
    path
        Temporary path of a stage.
    store, wanted
        The store and the conditions predicted.
    blocks
        Their cells.
    name
        What the method is called in tables.
    made_by
        What made them.
    learned
        Whether the method was trained on the conditions that it predicts.
    """
    total = int(wanted["n_cells"].sum())
    seen = predictions.seen_facts(pd.DataFrame(wanted if learned else wanted[:0]))
    with predictions.PredictionWriter(
        path,
        store.genes,
        method=name,
        control=store.control,
        target_sum=store.target_sum,
        dataset=store.path.resolve().name,
        facts={**made_by.to_json(), **seen},
    ) as writer:
        with track(f"baseline {name}", total) as progress:
            for obs, values in blocks:
                writer.append(values, obs)
                progress.advance(len(obs))
        controls = predictions.append_controls(writer, store, wanted)
    return {"predicted_cells": total, "control_cells": controls}
