"""The known attacks as counts, by the rules of cell-eval2: none reaches the mean response, which anybody can hand in.

Rows that are left out, and controls of the predictions' own, are refused: `test_cell_eval2.py`. Single metrics are
lifted (sets of DE genes by whatever makes many genes DE), their mean is not.
"""

from __future__ import annotations

from collections.abc import Callable

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from counted_pair import CONTROL, GENES, PERTURBATIONS, counted_side, write_pair

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.cell_eval2.metrics import SCORED
from perturbdiff.evaluation.cell_eval2.scaled_scores import SCORE
from perturbdiff.evaluation.evaluation_stage import evaluate

CONFIG = EvaluateConfig(definition="cell-eval2", perturbation_key="target", bootstrap=0)
REAL = counted_side(0)
LABELS, COUNTS = REAL.obs["target"].astype(str).to_numpy(), REAL.X.toarray()
CONTROLS = COUNTS[LABELS == CONTROL]


class Handed:
    """What an attacker has for one perturbation: cells of all the others, and a generator."""

    def __init__(self, name: str) -> None:
        self.name, self.size = name, int((name == LABELS).sum())
        self.rng = np.random.default_rng(PERTURBATIONS.index(name))
        self.others = COUNTS[(name != LABELS) & (LABELS != CONTROL)]
        self.change = self.others.mean(axis=0) - CONTROLS.mean(axis=0)

    def drawn(self, cells: np.ndarray, size: int | None = None) -> np.ndarray:
        return cells[self.rng.integers(0, len(cells), self.size if size is None else size)].copy()

    def of(self, other: str) -> np.ndarray:
        return self.drawn(COUNTS[other == LABELS])

    def spiked(self) -> np.ndarray:
        cells = self.drawn(CONTROLS)
        cells[:, [GENES.index(p) for p in PERTURBATIONS if p in GENES and p != self.name]] += 50
        return cells

    def neighbour(self) -> str:
        return PERTURBATIONS[(PERTURBATIONS.index(self.name) + 1) % len(PERTURBATIONS)]

    def largest(self) -> str:
        return max((p for p in PERTURBATIONS if p != self.name), key=lambda p: (p == LABELS).sum())


ATTACKS: dict[str, Callable[[Handed], np.ndarray]] = {
    "scaled-values": lambda h: 3 * h.drawn(h.others),
    "scaled-changes": lambda h: np.maximum(np.rint(h.drawn(h.others) + 2 * h.change), 0),
    "clipped": lambda h: np.maximum(h.drawn(h.others) - 1, 0),
    "panel-spikes": lambda h: h.spiked(),
    "repeated-cells": lambda h: np.resize(h.drawn(h.others, 5), (h.size, len(GENES))),
    "mean-profile": lambda h: np.tile(np.rint(h.others.mean(axis=0)), (h.size, 1)),
    "control-copies": lambda h: np.resize(CONTROLS, (h.size, len(GENES))),
    "noise": lambda h: h.drawn(h.others) + h.rng.integers(0, 2, (h.size, len(GENES))),
    "few-cells": lambda h: h.drawn(h.others, 5),
    "all-genes-de": lambda h: np.maximum(h.drawn(h.others) + 2 * np.sign(h.change), 0),
    "permuted-labels": lambda h: h.of(h.neighbour()),
    "best-known": lambda h: h.of(h.largest()),
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> dict[str, pd.Series]:
    """The scaled scores of an honest prediction and of every attack, by name."""
    folder = tmp_path_factory.mktemp("attacks")
    honest, truth = write_pair(folder)
    ends = evaluate(honest, truth, folder / "honest", CONFIG)
    folders = {"honest": ends}
    for name, attack in ATTACKS.items():
        cells = [attack(Handed(p)) for p in PERTURBATIONS]
        labels = np.repeat(PERTURBATIONS, [len(part) for part in cells])
        obs = pd.DataFrame({"target": labels}, index=np.arange(len(labels)).astype(str))
        matrix = sp.csr_matrix(np.vstack(cells).astype(np.float32))
        ad.AnnData(matrix, obs, pd.DataFrame(index=GENES)).write_h5ad(folder / f"{name}.h5ad")
        folders[name] = evaluate(folder / f"{name}.h5ad", truth, folder / name, CONFIG, ends=ends)
    return {n: pd.read_csv(f / "aggregate.csv").set_index("metric")["scaled"] for n, f in folders.items()}


def test_no_attack_reaches_the_mean_response(scored):
    assert scored["honest"][SCORE] > 0.1
    reached = {name: scored[name][SCORE] for name in ATTACKS}
    assert all(value < 0 for value in reached.values()), reached


def test_errors_and_discrimination_are_not_lifted_either(scored):
    for name in ("pds_cosine", "expr_mse_unbiased_capped_norm", "de_wilcoxon_lfc_nmae"):
        assert name in SCORED
        reached = {attack: scored[attack][name] for attack in ATTACKS}
        assert all(value <= 0 for value in reached.values()), (name, reached)


def test_single_metrics_of_de_sets_are_lifted(scored):
    """Why their mean with the others is the score: spiked controls share many called genes with the real cells."""
    assert scored["panel-spikes"]["de_wilcoxon_sig_jaccard"] > 0.3
