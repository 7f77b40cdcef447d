"""The baseline for perturbations that were never seen: kernel ridge regression of changes on their vectors."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task
from perturbdiff.baselines.nearest_context import TrainingChanges, training_changes
from perturbdiff.conditions.condition_table import agents
from perturbdiff.config.settings import ModelConfig
from perturbdiff.embeddings.embedding_tables import find
from perturbdiff.embeddings.kernel_ridge import LEAST, KernelRidge, fit
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChangesByVector:
    """Predicts the change of a vector in a cell type: the fit to all cell types, moved towards the cell type's own.

    Attributes
    ----------
    overall
        Fitted to the mean change of each perturbation over its contexts.
    own
        For each cell type with enough perturbations, its own fit and the share of it that predicts best, 0 to 1.
    """

    overall: KernelRidge
    own: dict[str, tuple[KernelRidge, float]]

    def __call__(self, cell_type: str, vector: np.ndarray) -> np.ndarray:
        """Return the change of a vector [e] in a cell type, float64 [G], log1p."""
        found = self.overall(vector[None])[0]
        if cell_type not in self.own:
            return found
        regression, share = self.own[cell_type]
        return found + share * (regression(vector[None])[0] - found)


def fit_changes(changes: TrainingChanges, vectors: dict[str, np.ndarray]) -> ChangesByVector:
    """Fit the changes of the training conditions to the vectors [e] of their perturbations.

    Perturbations with equal vectors (doses of a drug) count as one, with their mean change. The share of a cell
    type's own fit is the one with the smallest squared error when each perturbation is predicted without itself.
    """
    labels = sorted(vectors)
    known = np.array([vectors[label] for label in labels])
    overall = fit(known, np.array([changes.by_perturbation[label].value for label in labels]))
    types = sorted({kind for kind, label in changes.by_type if label in vectors})
    own: dict[str, tuple[KernelRidge, float]] = {}
    for kind in types if len(types) > 1 else []:
        rows = [i for i, label in enumerate(labels) if (kind, label) in changes.by_type]
        values = np.array([changes.by_type[kind, labels[i]].value for i in rows])
        regression = fit(known[rows], values)
        if len(regression.vectors) < LEAST:
            continue
        step = regression.left_out - overall.left_out[rows]
        gain = float(np.sum(step * (values - overall.left_out[rows]))) / max(float(np.sum(step**2)), 1e-30)
        own[kind] = (regression, min(max(gain, 0.0), 1.0))
        logger.info("kernel-ridge: share of the cell type's own fit in %s: %.2f", kind, own[kind][1])
    return ChangesByVector(overall, own)


def kernel_ridge(task: Task) -> Predictor:
    """Predict matched control cells plus a change, clipped at 0; for seen perturbations that of `nearest_context`.

    The change of an unseen combination is the sum of its agents' changes, if each was seen alone or has a vector. The
    change of any other unseen perturbation is predicted from its vector, and without one it is the mean over all
    conditions.

    Raises
    ------
    UserError
        If the table has too few of the training perturbations.
    """
    table, settings = task.vectors, ModelConfig()
    if table is None:
        raise ValueError("the task has no vectors")
    perturbation, cell_type = task.labels("perturbation"), task.labels("cell_type")
    control = next(iter(perturbation[task.is_control]), None)
    changes = training_changes(task)
    found = {label: find(label, table, settings, control=control)[0] for label in changes.by_perturbation}
    vectors = {label: vector for label, vector in found.items() if vector is not None}
    if len(vectors) < LEAST:
        raise UserError(
            f"baseline kernel-ridge: the table has {len(vectors)} of the {len(found)} training perturbations, and "
            f"{LEAST} are the least; without a vector: {listing(sorted(set(found) - set(vectors)))}"
        )
    regression = fit_changes(changes, vectors)

    def of_one(kind: str, label: str) -> np.ndarray | None:
        change = changes.of(kind, label)
        if change is None:
            vector, how = find(label, table, settings, control=control)
            change = None if vector is None or how == "combined" else regression(kind, vector)
        return change

    def change_of(kind: str, label: str) -> np.ndarray | None:
        change = of_one(kind, label)
        combined = agents(label, names=table, control=control)
        if change is not None or len(combined) == 1:
            return change
        parts = [of_one(kind, name if dose is None else f"{name}@{dose:g}") for name, dose in combined]
        known = [part for part in parts if part is not None]
        return np.sum(known, axis=0) if len(known) == len(parts) else None

    wanted = set(map(str, perturbation[task.wanted]))
    known = {label for label in wanted if change_of("", label) is not None}
    task.report_unseen("kernel-ridge", known, "perturbation", "no vector, the mean change of all is used")

    def predict(condition: int, size: int) -> Recipe:
        change = change_of(str(cell_type[condition]), str(perturbation[condition]))
        shift = changes.overall.value if change is None else change
        return Recipe(rows=task.matched(condition, size), shift=shift)

    return predict
