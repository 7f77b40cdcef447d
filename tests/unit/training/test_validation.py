"""Criteria of the choice of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.store.pseudobulk import correlation_of_changes, r2
from perturbdiff.training.callbacks.validation import Population, compare, is_better
from perturbdiff.training.training_stages import train


def test_scores_of_profiles_are_those_of_the_field():
    truth, prediction, control = np.random.default_rng(0).random((3, 40))
    assert r2(truth, prediction) == pytest.approx(r2_score(truth, prediction))
    assert r2(truth, truth) == 1
    expected = np.corrcoef(truth - control, prediction - control)[0, 1]
    assert correlation_of_changes(truth, prediction, control) == pytest.approx(expected)
    assert correlation_of_changes(truth, truth * 2 - control, control) == pytest.approx(1)


def test_profiles_without_a_change_score_nothing():
    truth, control = np.random.default_rng(0).random((2, 40))
    assert correlation_of_changes(truth, control, control) == 0
    assert r2(np.ones(4), np.zeros(4)) == 0


def population(context, real, found, control, sets=3):
    own, generator = Population(context), torch.Generator().manual_seed(0)
    for _ in range(sets):
        noise = 0.01 * torch.randn(3, 4, len(real), generator=generator)
        own.add(real + noise[0], found + noise[1], control + noise[2])
    return own


def test_conditions_count_alike_and_contexts_share_their_controls():
    control = torch.tensor([1.0, 2.0, 3.0, 4.0])
    up, down = control + torch.tensor([1.0, 0, 0, 0]), control - torch.tensor([1.0, 0, 0, 0])
    scores = compare({0: population((1, 1), up, up, control, 5), 1: population((1, 1), up, down, control, 1)})
    assert scores["pdcorr"] == pytest.approx(0, abs=0.02)  # one right, one the wrong way round
    # sums of squares: 4 for the difference, 2.75 for the truth
    assert scores["r2"] == pytest.approx((1 + (1 - 4 / 2.75)) / 2, abs=0.03)
    assert scores["energy"] == pytest.approx(2 * 2 / 6, abs=0.05)  # by sets: one of six is two units off


@pytest.mark.parametrize(("metric", "order"), [("energy", -1), ("loss", -1), ("r2", 1), ("pdcorr", 1)])
def test_each_criterion_knows_its_direction(metric, order):
    assert is_better(metric, 0.5, math.nan)
    assert is_better(metric, 0.6, 0.5) == (order > 0)
    assert is_better(metric, 0.4, 0.5) == (order < 0)
    assert not is_better(metric, math.nan, 0.5)
    assert not is_better(metric, math.nan, math.nan)


@pytest.mark.parametrize("metric", ["r2", "pdcorr"])
def test_the_step_with_the_highest_score_is_chosen(trained, tmp_path, metric):
    recipe = recipes.load(
        "tiny",
        ["split.held_out=[d2]", "split.valid_fraction=0.4", f"train.valid_metric={metric}",
         "train.max_steps=8", "train.valid_every=2", "train.learning_rate=0.02", "train.ema_decay=0"],
    )  # fmt: skip
    out = train(trained / "store", trained / "split.parquet", tmp_path / "b", recipe, device="cpu")
    bundle = Bundle.load(out)
    valid = bundle.curve[bundle.curve["split"] == "valid"].set_index("step")
    assert valid.index.tolist() == [2, 4, 6, 8]
    assert valid[["total", "energy", "r2", "pdcorr"]].notna().all(axis=None)
    assert valid[metric].nunique() > 1
    assert bundle.training["chosen_step"] == valid[metric].idxmax()
    assert bundle.training[f"validation_{metric}"] == pytest.approx(valid[metric].max(), rel=1e-4)
