"""Baselines that copy real cells: matched controls, or training cells of the same perturbation."""

from __future__ import annotations

import numpy as np

from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task


def control_copy(task: Task) -> Predictor:
    """Predict no change: matched control cells that stand for all of them (`Task.matched`)."""
    return lambda condition, size: Recipe(rows=task.matched(condition, size))


def resample(task: Task) -> Predictor:
    """Predict real training cells of the same perturbation, drawn at random from all training contexts.

    With repeats only if there are too few; matched controls for a perturbation unseen in training.
    """
    labels = task.labels("perturbation")
    pools: dict[str, list[int]] = {}
    for condition in task.perturbed:
        pools.setdefault(str(labels[condition]), []).append(int(condition))
    task.report_unseen("resample", set(pools), "perturbation", "matched controls are used")

    def predict(condition: int, size: int) -> Recipe:
        pool, rng = pools.get(labels[condition]), task.rng(condition)
        if pool is None:
            return Recipe(rows=task.matched(condition, size))
        return Recipe(rows=task.rows.draw(np.array(pool), size, rng))

    return predict
