"""The pass over the cells: perturbation by perturbation, real and predicted, into test results and distances.

Memory holds the controls (sorted once per scope) and the cells of one perturbation, real and predicted, all
sparse; what stays is one row of G numbers per scope and perturbation.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from perturbdiff.errors import UserError
from perturbdiff.evaluation.cells import Condition, Group
from perturbdiff.evaluation.differential import Controls, Differential, Sparse
from perturbdiff.evaluation.metrics import Comparison
from perturbdiff.evaluation.pairing import Pairing
from perturbdiff.evaluation.populations import DISTRIBUTION, condition_metrics
from perturbdiff.progress import track

POOLED = "pooled"

Scope = tuple[str, str]  # kind ("pooled" or "context") and label


@dataclass(frozen=True)
class Scored:
    """What the pass found.

    Attributes
    ----------
    comparisons
        Test results of each scope; pooled first, then the contexts by name.
    sizes
        Real and predicted cells of each scope and perturbation.
    conditions
        One row per condition: cell_type, batch, perturbation, context, n_cells, n_predicted, effect (norm of the
        real change, log1p) and the metrics of the distribution.
    num_controls
        Real control cells in all.
    """

    comparisons: dict[Scope, Comparison]
    sizes: dict[Scope, dict[str, tuple[int, int]]]
    conditions: pd.DataFrame
    num_controls: int


@dataclass
class _Tests:
    """Test results of one scope as they come in, perturbation by perturbation."""

    controls: Controls
    perturbations: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    real: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    predicted: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, perturbation: str, real: list[Sparse], predicted: list[Sparse]) -> None:
        self.perturbations.append(perturbation)
        self.sizes.append((sum(c.shape[0] for c in real), sum(c.shape[0] for c in predicted)))
        self.real.append(self.controls.test(*real))
        self.predicted.append(self.controls.test(*predicted))

    def comparison(self, genes: tuple[str, ...], alpha: float) -> Comparison:
        sides = []
        for tested in (self.real, self.predicted):
            p, mean = (np.stack(rows) for rows in zip(*tested, strict=True))
            sides.append(Differential.of(p, mean, self.controls.mean, alpha=alpha))
            tested.clear()
        return Comparison(tuple(self.perturbations), genes, *sides)


def score_cells(pairing: Pairing, *, alpha: float, max_cells: int, seed: int) -> Scored:
    """Test and compare all conditions of ``pairing``.

    Parameters
    ----------
    alpha
        False discovery rate of a DE gene.
    max_cells
        Cells a side in a condition's energy distance.
    seed
        Of the draw of these cells; the draw of a condition does not depend on the other conditions.
    """
    tests, control_means, num_controls = _controls(pairing)
    by_perturbation: dict[str, list[Condition]] = defaultdict(list)
    for condition in pairing.conditions:
        by_perturbation[condition[2]].append(condition)
    rows = []
    with track("evaluate", len(pairing.conditions), "conditions") as progress:
        for perturbation, conditions in by_perturbation.items():
            real = [pairing.real.cells(pairing.real.rows[c]) for c in conditions]
            predicted = [pairing.predicted.cells(pairing.predicted.rows[c]) for c in conditions]
            _add_tests(tests, pairing, perturbation, conditions, real, predicted)
            for condition, r, p in zip(conditions, real, predicted, strict=True):
                row = _condition(condition, r, p, control_means.get(condition[:2]), max_cells, seed)
                rows.append({**row, "context": pairing.contexts[condition]})
                progress.advance()
    comparisons = {scope: found.comparison(pairing.genes, alpha) for scope, found in tests.items()}
    sizes = {s: dict(zip(t.perturbations, t.sizes, strict=True)) for s, t in tests.items()}
    return Scored(comparisons, sizes, pd.DataFrame(rows), num_controls)


def _controls(pairing: Pairing) -> tuple[dict[Scope, _Tests], dict[Group, np.ndarray], int]:
    """Read the controls once; return them sorted for each scope, their mean per group, and their number."""
    groups = {g: pairing.real.cells(rows) for g, rows in pairing.controls.items()}
    means = {g: np.asarray(c.mean(axis=0, dtype=np.float64)).ravel() for g, c in groups.items()}
    tests = {(POOLED, POOLED): _Tests(Controls(*groups.values()))}
    for context in sorted({pairing.contexts[c] for c in pairing.conditions}):
        members = {c[:2] for c in pairing.conditions if pairing.contexts[c] == context}
        if found := [groups[g] for g in sorted(members) if g in groups]:  # else it is part of the pool only
            tests["context", context] = _Tests(Controls(*found))
    return tests, means, sum(c.shape[0] for c in groups.values())


def _add_tests(
    tests: dict[Scope, _Tests],
    pairing: Pairing,
    perturbation: str,
    conditions: list[Condition],
    real: list[Sparse],
    predicted: list[Sparse],
) -> None:
    contexts = [pairing.contexts[c] for c in conditions]
    for scope, found in tests.items():
        chosen = [i for i, c in enumerate(contexts) if scope[0] == POOLED or c == scope[1]]
        if chosen:
            found.add(perturbation, [real[i] for i in chosen], [predicted[i] for i in chosen])


def _condition(
    condition: Condition,
    real: Sparse,
    predicted: Sparse,
    control_mean: np.ndarray | None,
    max_cells: int,
    seed: int,
) -> dict[str, object]:
    cell_type, batch, perturbation = condition
    if not predicted.shape[0] or not real.shape[0]:
        raise UserError(f"condition {'|'.join(condition)} has no cells on one side")
    own_seed = zlib.crc32("\0".join((*condition, str(seed))).encode())
    mean = np.asarray(real.mean(axis=0, dtype=np.float64)).ravel()
    return {
        "cell_type": cell_type,
        "batch": batch,
        "perturbation": perturbation,
        "n_cells": real.shape[0],
        "n_predicted": predicted.shape[0],
        "effect": float("nan") if control_mean is None else float(np.linalg.norm(mean - control_mean)),
        **condition_metrics(predicted, real, DISTRIBUTION, max_cells=max_cells, seed=own_seed),
    }
