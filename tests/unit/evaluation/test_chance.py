"""The chance level against all mismatched pairs, one by one."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from perturbdiff.evaluation.metrics import bounds as module
from perturbdiff.evaluation.metrics.bounds import chance
from perturbdiff.evaluation.metrics.catalogue import METRICS, score
from perturbdiff.evaluation.metrics.differential import DEFINITIONS, Differential
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.metrics.spread import Spread

TABLE = [n for n, m in METRICS.items() if m.compute is not None]
RANKED = ("PDS_L1", "PDS_L2", "PDS_cos", "centroid_accuracy")
PER_PAIR = [
    n for n in TABLE if METRICS[n].per_perturbation and n not in RANKED and METRICS[n].family != "count"
]


def compare(num, genes=80, *, definition="cell-eval-0.6.6", noise=0.3, seed=0):
    """Return a comparison whose predictions are the truth plus noise, with DE genes on both sides."""
    rng = np.random.default_rng(seed)
    control = rng.random(genes) + 0.2
    common, effect = rng.normal(0, 0.2, genes), rng.normal(0, 0.3, (num, genes))
    sides = []
    for extra in (0.0, noise):
        mean = np.maximum(control + common + effect + extra * rng.normal(0, 0.3, (num, genes)), 0.0)
        p = np.minimum(1.0, 10.0 ** (1 - 20 * np.abs(mean - control)))
        sides.append(Differential.of(p, mean, control, definition=DEFINITIONS[definition]))
    names = tuple(f"p{i:04d}" for i in range(num))
    variance = rng.random((num, genes)) + 0.1
    cells = rng.integers(20, 50, (2, num))
    spread = Spread(variance, rng.random(num) * genes, variance[0], *cells)
    return Comparison(
        names, tuple(f"g{i}" for i in range(genes)), *sides, DEFINITIONS[definition], spread=spread
    )


def with_predictions_of(comparison, order):
    arrays = {f.name: getattr(comparison.predicted, f.name) for f in fields(Differential)}
    moved = {name: a[order] for name, a in arrays.items() if a.ndim == 2}
    spread = comparison.spread.paired(np.arange(len(order)), np.asarray(order))
    return replace(comparison, predicted=replace(comparison.predicted, **moved), spread=spread)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_few_perturbations_give_the_mean_over_all_mismatched_pairs(definition):
    comparison = compare(6, definition=definition)
    order = np.arange(6)
    values = [score(with_predictions_of(comparison, np.roll(order, k)), PER_PAIR) for k in range(1, 6)]
    found = chance(comparison, seed=3)
    for name in PER_PAIR:
        assert found[name] == pytest.approx(np.nanmean([v[name] for v in values]), rel=1e-9), name


def test_two_perturbations_are_swapped():
    comparison = compare(2)
    swapped = score(with_predictions_of(comparison, [1, 0]))
    found = chance(comparison)
    for name in (*PER_PAIR, "ES"):
        assert found[name] == pytest.approx(np.nanmean(swapped[name]), nan_ok=True), name


def test_discrimination_has_a_formula_and_a_guess_reaches_it():
    comparison = compare(40)
    found = chance(comparison, ["PDS_L1", "PDS_L2", "PDS_cos"])
    assert set(found.values()) == {41 / 80}
    assert chance(comparison, ["centroid_accuracy"])["centroid_accuracy"] == 0.5
    rng = np.random.default_rng(0)
    guesses = [
        score(with_predictions_of(comparison, rng.permutation(40)), ["PDS_L2"])["PDS_L2"].mean()
        for _ in range(30)
    ]
    assert np.mean(guesses) == pytest.approx(41 / 80, abs=0.03)


def test_effect_sizes_are_those_of_whole_derangements():
    comparison = compare(7)
    rng = np.random.default_rng(5)
    ring = rng.permutation(7)
    values = []
    for places in range(1, 7):
        guesser = np.empty(7, int)
        guesser[np.roll(ring, -places)] = ring
        assert (guesser != np.arange(7)).all()
        values.append(score(with_predictions_of(comparison, guesser), ["ES"])["ES"][0])
    assert chance(comparison, ["ES"], seed=5)["ES"] == pytest.approx(np.mean(values), rel=1e-12)


def test_many_perturbations_are_sampled(monkeypatch):
    comparison = compare(60)
    whole = chance(comparison, PER_PAIR, draws=59, seed=0)
    monkeypatch.setattr(module, "PAIRS", 30)
    seen = []
    monkeypatch.setattr(module, "score", lambda c, names: seen.append(c) or score(c, names))
    few = chance(comparison, PER_PAIR, draws=20, seed=1)
    assert [len(c.perturbations) for c in seen] == [30]
    for name in PER_PAIR:
        assert few[name] == pytest.approx(whole[name], abs=0.15), name
    same = [  # no prediction keeps its perturbation
        np.array_equal(
            seen[0].predicted.mean[i], comparison.predicted.mean[comparison.perturbations.index(name)]
        )
        for i, name in enumerate(seen[0].perturbations)
    ]
    assert not any(same)


def test_each_alone_equals_all_together_and_the_seed_fixes_it():
    comparison = compare(30)
    found = chance(comparison, seed=2)
    assert list(found) == TABLE
    for name in TABLE:
        np.testing.assert_equal(chance(comparison, [name], seed=2)[name], found[name])
    score(comparison)  # ranks found for the scores are used again
    np.testing.assert_equal(chance(comparison, seed=2), found)
    assert chance(comparison, ["PDCorr"], seed=3)["PDCorr"] != found["PDCorr"]


def test_a_good_prediction_is_better_than_chance():
    comparison = compare(20)
    own, found = score(comparison), chance(comparison)
    for name in ("PDCorr", "R2", "AUROC", "DirAgr", "DEOver", "PDS_cos"):
        assert own[name].mean() > found[name] + 0.1, name
    assert own["MSE"].mean() < found["MSE"]


def test_what_has_no_chance_level():
    assert np.isnan(list(chance(compare(1)).values())).all()
    assert np.isnan(list(chance(compare(5), draws=0).values())).all()
    assert np.isnan(chance(compare(5), ["n_DE_real"])["n_DE_real"])
    for name in ("energy_distance", "PDcorr"):
        with pytest.raises(ValueError, match=name):
            chance(compare(3), [name])
