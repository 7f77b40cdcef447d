"""The changes of the training conditions, and the two baselines that are made of them.

One predicts the mean change of the nearest contexts. The other, for perturbations that were never seen, predicts
changes from the perturbations' vectors by kernel ridge regression.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task
from perturbdiff.conditions.condition import Agent, agents
from perturbdiff.config.settings import ModelConfig
from perturbdiff.embeddings.embedding_tables import find
from perturbdiff.embeddings.kernel_ridge import LEAST, KernelRidge, fit
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.store.pseudobulk import condition_changes

logger = logging.getLogger(__name__)


class Mean:
    """A running mean of profiles."""

    def __init__(self, num_genes: int) -> None:
        self.total, self.number = np.zeros(num_genes), 0

    def add(self, profile: np.ndarray) -> None:
        """Count one more profile [G]."""
        self.total += profile
        self.number += 1

    @property
    def value(self) -> np.ndarray:
        """The mean, float64 [G]."""
        return self.total / max(self.number, 1)


def agents_alone(task: Task, seen: Set[str]) -> dict[str, tuple[str, ...]]:
    """Return for each wanted combination that is not among ``seen`` the labels of its agents given alone.

    A combination with an agent that was not seen alone is left out.
    """
    perturbation = task.labels("perturbation")
    control = next(iter(perturbation[task.is_control]), None)
    alone: dict[Agent, str] = {}
    for label in sorted(seen):
        found = agents(label, control=control)
        if len(found) == 1:
            alone.setdefault(found[0], label)
    parts = {}
    for label in {str(perturbation[c]) for c in task.wanted} - seen:
        found = agents(label, control=control)
        labels = [alone.get(agent, alone.get((agent[0], None))) for agent in found]
        known = tuple(one for one in labels if one is not None)
        if len(found) > 1 and len(known) == len(found):
            parts[label] = known
    return parts


@dataclass(frozen=True)
class TrainingChanges:
    """Mean changes of the training conditions against their matched controls, each context (type, batch) once.

    Attributes
    ----------
    by_type
        Of each (cell type, perturbation), over its batches.
    by_perturbation
        Of each perturbation, over its contexts.
    overall
        Of all conditions.
    """

    by_type: dict[tuple[str, str], Mean]
    by_perturbation: dict[str, Mean]
    overall: Mean

    def of(self, cell_type: str, label: str) -> np.ndarray | None:
        """Return the mean change in the same cell type, else in all contexts, else None: float64 [G]."""
        found = self.by_type.get((cell_type, label)) or self.by_perturbation.get(label)
        return None if found is None else found.value


def training_changes(task: Task, wanted: Set[tuple[str, str]] | None = None) -> TrainingChanges:
    """Return the changes of the training conditions.

    ``wanted`` are the (cell type, perturbation) to keep, and the perturbations to keep over all contexts. Default: all.
    """
    perturbation, cell_type = task.labels("perturbation"), task.labels("cell_type")
    labels = None if wanted is None else {label for _, label in wanted}
    found = TrainingChanges({}, {}, Mean(task.store.n_genes))
    for condition, change in condition_changes(task.store, task.perturbed, task.controls):
        label = str(perturbation[condition])
        kind = (str(cell_type[condition]), label)
        found.overall.add(change)
        if labels is None or label in labels:
            found.by_perturbation.setdefault(label, Mean(len(change))).add(change)
        if wanted is None or kind in wanted:
            found.by_type.setdefault(kind, Mean(len(change))).add(change)
    return found


def nearest_context(task: Task) -> Predictor:
    """Predict matched control cells plus a mean change, clipped at 0.

    A context is a (cell type, batch). The change of a training condition is its mean minus the mean of its matched
    controls. The mean is over the training contexts of the same cell type in which the perturbation was seen. If
    there are none, all contexts in which it was seen are averaged. The change of an unseen combination is the sum of
    its agents' changes if all were seen alone, and for any other unseen perturbation the mean over all conditions.
    """
    perturbation, cell_type = task.labels("perturbation"), task.labels("cell_type")
    seen = {str(perturbation[c]) for c in task.perturbed}
    parts = agents_alone(task, seen)
    wanted = {
        (str(cell_type[c]), part)
        for c in task.wanted
        for part in parts.get(str(perturbation[c]), (str(perturbation[c]),))
    }
    changes = training_changes(task, wanted)
    task.report_unseen("nearest-context", seen | set(parts), "perturbation", "the mean change of all is used")
    same = sum((cell_type[c], perturbation[c]) in changes.by_type for c in task.wanted)
    logger.info(
        "nearest-context: %d of %d conditions have contexts of their cell type", same, len(task.wanted)
    )

    def predict(condition: int, size: int) -> Recipe:
        labels = parts.get(perturbation[condition], (perturbation[condition],))
        found = [changes.of(cell_type[condition], label) for label in labels]
        mean = changes.overall.value
        rows = task.matched(condition, size)
        return Recipe(rows=rows, shift=np.sum([mean if one is None else one for one in found], axis=0))

    return predict


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
