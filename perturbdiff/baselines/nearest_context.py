"""The changes of the training conditions, and the baseline that predicts the mean change of the nearest contexts."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from perturbdiff.baselines.baseline_task import Predictor, Recipe, Task
from perturbdiff.conditions.condition_table import Agent, agents
from perturbdiff.store.condition_changes import condition_changes

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
