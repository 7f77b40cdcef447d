"""Nearest context: matched control cells plus the mean change the perturbation made in the nearest contexts."""

from __future__ import annotations

import logging

import numpy as np

from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task
from perturbdiff.store.pseudobulk import condition_means, group_means

logger = logging.getLogger(__name__)


def control_means(task: Task, conditions: np.ndarray) -> dict[int, np.ndarray]:
    """Return the mean profile of the matched controls (float64 [G], log1p) of each of ``conditions``."""
    groups = np.where(task.is_control, np.cumsum(task.is_control) - 1, -1)
    means, cells = group_means(task.store, groups, int(task.is_control.sum()), label="control means")
    known: dict[tuple[int, ...], np.ndarray] = {}
    found = {}
    for condition in map(int, conditions):
        pool = task.controls.pool(condition)
        key = tuple(map(int, pool))
        if key not in known:
            weight = cells[groups[pool]]
            known[key] = weight @ means[groups[pool]] / weight.sum()
        found[condition] = known[key]
    return found


class _Mean:
    """A running mean of profiles."""

    def __init__(self, num_genes: int) -> None:
        self.total, self.number = np.zeros(num_genes), 0

    def add(self, profile: np.ndarray) -> None:
        self.total += profile
        self.number += 1

    @property
    def value(self) -> np.ndarray:
        return self.total / max(self.number, 1)


def nearest_context(task: Task) -> Predictor:
    """Predict matched control cells plus a mean change, clipped at 0.

    A context is a (cell type, batch). The change of a training condition is its mean minus the mean of its matched
    controls. Averaged are the training contexts of the same cell type in which the perturbation was seen; if
    there are none, all contexts in which it was seen; for a perturbation unseen in training, all conditions.
    """
    perturbation, cell_type = task.labels("perturbation"), task.labels("cell_type")
    base = control_means(task, task.perturbed)
    wanted = {(str(cell_type[c]), str(perturbation[c])) for c in task.wanted}
    by_type: dict[tuple[str, str], _Mean] = {}
    by_perturbation: dict[str, _Mean] = {}
    overall = _Mean(task.store.n_genes)
    asked = {p for _, p in wanted}
    for condition, mean in condition_means(task.store, task.perturbed, label="training changes"):
        label = str(perturbation[condition])
        kind = (str(cell_type[condition]), label)
        change = mean - base[condition]
        overall.add(change)
        if label in asked:
            by_perturbation.setdefault(label, _Mean(len(change))).add(change)
        if kind in wanted:
            by_type.setdefault(kind, _Mean(len(change))).add(change)
    task.report_unseen(
        "nearest-context", set(perturbation[task.perturbed]), "perturbation", "the mean change of all is used"
    )
    same = sum((cell_type[c], perturbation[c]) in by_type for c in task.wanted)
    logger.info(
        "nearest-context: %d of %d conditions have contexts of their cell type", same, len(task.wanted)
    )

    def predict(condition: int, size: int) -> Recipe:
        label = perturbation[condition]
        mean = by_type.get((cell_type[condition], label)) or by_perturbation.get(label) or overall
        rows = task.matched(condition, size)
        return Recipe(rows=rows, shift=mean.value)

    return predict
