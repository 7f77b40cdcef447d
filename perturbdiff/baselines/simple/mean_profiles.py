"""Mean baselines: one constant profile for every cell (paper, App. Baselines)."""

from __future__ import annotations

from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task
from perturbdiff.store.pseudobulk import group_means


def mean_of(task: Task, column: str | None) -> Predictor:
    """Predict the mean of all training cells, controls included, that share a label with the condition.

    Parameters
    ----------
    task
        What to learn from and to predict.
    column
        'perturbation', 'cell_type' or 'batch'; None: all training cells. A label unseen in training gets the mean
        of all training cells.
    """
    labels = task.labels(column or "perturbation")
    groups, names = task.groups(labels, task.train)
    means, cells = group_means(task.store, groups, len(names), label="training means")
    overall = cells @ means / cells.sum()
    if column is None:
        return lambda condition, size: Recipe(profile=overall)
    profile = dict(zip(names, means, strict=True))
    task.report_unseen(f"mean by {column}", set(names), column, "the mean of all training cells is used")
    return lambda condition, size: Recipe(profile=profile.get(labels[condition], overall))
