"""Discrimination scores: by hand, and under the attack that they must resist."""

from __future__ import annotations

import numpy as np
import pytest

from perturbdiff.evaluation import DEFINITIONS, Comparison, chance, compare, score, tabulate
from perturbdiff.evaluation.metrics import profile_metrics as m

PDS = ("PDS_L1", "PDS_L2", "PDS_cos")
NUM, GENES = 12, 60
NAMES = tuple(f"g{i:02d}" for i in range(GENES))
PERTURBATIONS = NAMES[:NUM]


def scores_of(real: np.ndarray, predicted: np.ndarray, definition: str = "perturbdiff") -> dict[str, float]:
    """Return the mean discrimination scores of changes, which are given as means over a control of zero."""
    sides = []
    for means in (real, predicted):
        cells, labels = np.repeat(means, 2, axis=0), np.repeat(PERTURBATIONS, 2)
        sides += [np.vstack([np.full((2, GENES), 3.0), cells + 3.0]), ["control"] * 2 + labels.tolist()]
    found = compare(
        sides[0], sides[2], sides[1], sides[3], control="control", genes=NAMES, definition=definition
    )
    return tabulate(found, PDS).mean().to_dict()


def screen(seed: int = 0) -> np.ndarray:
    """Return changes: each perturbation lowers its own gene and changes a few others."""
    rng = np.random.default_rng(seed)
    changes = rng.normal(0, 0.1, (NUM, GENES))
    changes[np.arange(NUM), np.arange(NUM)] = -2.0
    changes[:, NUM:] += rng.normal(0, 0.5, (NUM, GENES - NUM)) * (rng.random((NUM, GENES - NUM)) < 0.2)
    return changes


def spikes() -> np.ndarray:
    """Return changes without biology: each prediction lowers its own target and raises those of all others."""
    raised = np.zeros((NUM, GENES))
    raised[:, :NUM] = 2.0
    raised[np.arange(NUM), np.arange(NUM)] = -2.0
    return raised


@pytest.mark.parametrize("name", PDS)
def test_spikes_gain_in_the_definitions_of_cell_eval_and_nothing_in_ours(name):
    real = screen()
    assert scores_of(real, spikes(), "cell-eval-0.6.6")[name] > 0.8
    assert scores_of(real, spikes(), "cell-eval-0.8.2")[name] > 0.8
    assert scores_of(real, spikes())[name] == pytest.approx(0.5)
    assert scores_of(real, real)[name] == pytest.approx(1.0)


@pytest.mark.parametrize("distance", ["l1", "l2", "cosine"])
def test_one_answer_for_all_scores_one_half_whatever_it_is(distance):
    real = screen(1)
    for answer in (real.mean(axis=0), real[3], np.zeros(GENES), -real[5]):
        same = np.tile(answer, (NUM, 1))
        found = m.panel_discrimination(real, same, np.zeros(GENES, bool), distance=distance)
        assert found.mean() == pytest.approx(0.5)


def test_ranks_by_hand():
    real = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [2.0, 9.0]])
    predicted = np.array([[1.9, 0.0], [1.0, 0.0], [2.0, 1.0], [0.0, 0.0]])
    second = np.array([False, True])
    # without the second gene 2 and 3 are the same: one half for a tie; of the last, two others are closer
    expected = [1 - 3 / 3, 1.0, 1 - 0.5 / 3, 1 - 2.5 / 3]
    for distance in ("l1", "l2"):
        found = m.panel_discrimination(real, predicted, second, distance=distance)
        np.testing.assert_allclose(found, expected)
    assert np.isnan(m.panel_discrimination(real[:1], predicted[:1], second, distance="l1")).all()
    everything = m.panel_discrimination(real, predicted, np.array([True, True]), distance="cosine")
    np.testing.assert_allclose(everything, 0.5)  # nothing is left to tell by


def test_chance_is_the_mean_of_all_ranks():
    rng = np.random.default_rng(0)
    for name, level in {"perturbdiff": 0.5, "cell-eval-0.6.6": (NUM + 1) / (2 * NUM)}.items():
        cells, labels = rng.random((3 * (NUM + 1), GENES)), np.repeat(("control", *PERTURBATIONS), 3)
        found = compare(cells, cells, labels, labels, control="control", genes=NAMES, definition=name)
        assert chance(found, PDS) == dict.fromkeys(PDS, pytest.approx(level))
        assert score(found, PDS)["PDS_L1"].mean() == pytest.approx(1.0)


def test_a_table_of_targets_says_what_is_left_out():
    guides = tuple(f"guide_{i}" for i in range(NUM))
    rng = np.random.default_rng(2)
    cells, labels = rng.random((2 * (NUM + 1), GENES)), np.repeat(("control", *guides), 2)
    told = {guide: [gene] for guide, gene in zip(guides, NAMES, strict=False)}
    found = compare(cells, cells, labels, labels, control="control", genes=NAMES, targets=told)
    assert found.target_genes.tolist() == [True] * NUM + [False] * (GENES - NUM)
    without = compare(cells, cells, labels, labels, control="control", genes=NAMES)
    assert not without.target_genes.any()
    assert isinstance(found, Comparison)
    assert {d.left_out for n, d in DEFINITIONS.items() if n.startswith("cell-eval-0.")} == {"own"}
