"""What is specific to a perturbation: against slow formulas, at perfection and by chance, and on degenerate input."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from perturbdiff.evaluation import METRICS, compare, score, tabulate
from perturbdiff.evaluation.metrics.catalogue import chosen
from perturbdiff.evaluation.metrics.effects import direction_precision, direction_reach
from perturbdiff.evaluation.metrics.spread import gene_weights

EFFECT = [name for name in chosen(["effect"]) if METRICS[name].compute is not None]
SIZES = {"control": 40, "A": 25, "B": 12, "C": 30}
LABELS = np.repeat(list(SIZES), list(SIZES.values()))


def cells(seed, genes=30, shift=1.0):
    """Return log1p values whose perturbations change a few genes each, by label."""
    rng = np.random.default_rng(seed)
    rates = np.random.default_rng(99).lognormal(0.5, 0.5, genes)
    expected = np.tile(rates, (len(LABELS), 1))
    for i, name in enumerate("ABC"):
        expected[name == LABELS, 5 * i : 5 * i + 8] *= 1 + 2 * shift
    return np.log1p(rng.poisson(expected)).astype(np.float32)


def scored(real, predicted, labels=LABELS, **more):
    found = compare(real, predicted, labels, labels, control="control", **more)
    return found, tabulate(found, ["effect"])


@pytest.fixture(scope="module")
def study():
    real, predicted = cells(0), cells(1)
    return real, predicted, *scored(real, predicted)


def slow_weights(real, name):
    """Return the weights of scanpy's t-test_overestim_var against all other perturbed cells."""
    own = real[name == LABELS].astype(float)
    rest = real[(name != LABELS) & (LABELS != "control")].astype(float)
    t = stats.ttest_ind_from_stats(
        own.mean(0),
        own.std(0, ddof=1),
        len(own),
        rest.mean(0),
        rest.std(0, ddof=1),
        len(own),
        equal_var=False,
    ).statistic
    size = np.abs(t)
    weights = ((size - size.min()) / (size.max() - size.min())) ** 2
    return weights / weights.sum()


def test_weighted_errors_equal_the_slow_formula(study):
    real, predicted, _, table = study
    mean = {n: real[n == LABELS].mean(0, dtype=float) for n in "ABC"}
    middle = np.mean(list(mean.values()), axis=0)
    for name in "ABC":
        w, guess = slow_weights(real, name), predicted[name == LABELS].mean(0, dtype=float)
        error = (w * (guess - mean[name]) ** 2).sum()
        delta = mean[name] - middle
        total = (w * (delta - np.average(delta, weights=w)) ** 2).sum()
        assert table.loc[name, "WMSE"] == pytest.approx(error, rel=1e-6)
        assert table.loc[name, "R2_weighted"] == pytest.approx(1 - error / total, rel=1e-6)


def test_changes_from_the_others_equal_the_slow_formula(study):
    real, predicted, _, table = study
    mean = {n: real[n == LABELS].mean(0, dtype=float) for n in "ABC"}
    for name in "ABC":
        others = np.mean([mean[n] for n in "ABC" if n != name], axis=0)
        guess = predicted[name == LABELS].mean(0, dtype=float)
        r = np.corrcoef(mean[name] - others, guess - others)[0, 1]
        assert table.loc[name, "PDCorr_perturbed"] == pytest.approx(r, rel=1e-6)
        distance = {n: np.linalg.norm(guess - m) for n, m in mean.items()}
        farther = np.mean([distance[n] > distance[name] for n in "ABC" if n != name])
        assert table.loc[name, "centroid_accuracy"] == pytest.approx(farther)


def test_the_unbiased_error_equals_the_slow_formula_and_caps_the_predicted_noise(study):
    real, predicted, _, table = study

    def noise(side, name):
        own = side[name == LABELS].astype(float)
        return own.var(0, ddof=1).sum() / len(own)

    for name in "ABC":
        gap = predicted[name == LABELS].mean(0, dtype=float) - real[name == LABELS].mean(0, dtype=float)
        own, guess = noise(real, name), noise(predicted, name)
        expected = ((gap**2).sum() - own - min(own, guess)) / real.shape[1]
        assert table.loc[name, "MSE_unbiased"] == pytest.approx(expected, rel=1e-5)
    spread = np.where(np.arange(len(real))[:, None] % 2, 2 * real, 0)  # the same mean from cells far apart
    _, earned = scored(real, spread.astype(np.float32))
    _, honest = scored(real, real)
    bound = [noise(real, n) / real.shape[1] for n in "ABC"]
    np.testing.assert_allclose(honest["MSE_unbiased"], [-2 * b for b in bound], rtol=1e-5)
    assert (earned["MSE_unbiased"] >= [-2 * b for b in bound]).all()


def test_the_unbiased_error_of_a_perfect_model_is_zero_on_average():
    found = [scored(cells(2 * i), cells(2 * i + 1))[1] for i in range(25)]
    unbiased, plain = (np.array([f[n] for f in found]) for n in ("MSE_unbiased", "WMSE"))
    error = unbiased.std() / np.sqrt(unbiased.size)
    assert abs(unbiased.mean()) < 4 * error < plain.mean()


def test_directions_of_a_ranking_worked_out_by_hand(study):
    base = study[2]
    one = np.zeros((1, 30), np.float32)

    def side(folds, q):
        fold, adjusted = one.copy(), np.ones((1, 30), np.float32)
        fold[0, : len(folds)], adjusted[0, : len(q)] = folds, q
        significant = adjusted < 0.05
        p = adjusted.astype(float)
        return dataclasses.replace(base.real, log2_fold=fold, q=adjusted, p=p, significant=significant)

    genes = [f"g{i}" for i in range(30)]
    real = side([1, 1, -1, 1, 0, 2], [0.01] * 5 + [0.5])
    # In order: right, right, wrong, then a gene without a real direction, then right.
    predicted = side([3, 1, 1, 1, 1, -1], [0.001, 0.002, 0.003, 0.04, 0.03, 0.02])
    assert direction_reach(real, predicted, genes) == pytest.approx(2 / 5)
    assert direction_precision(real, predicted) == pytest.approx(3 / 5)  # g4 has no real sign, g5 is wrong
    left_out = np.zeros((1, 30), bool)
    left_out[0, 2] = True  # without the wrong one, the other three are pure
    assert direction_reach(real, predicted, genes, left_out) == pytest.approx(3 / 4)
    nothing = side([], [])
    assert np.isnan(direction_reach(nothing, predicted, genes)).all()
    assert direction_reach(real, nothing, genes) == 0.0
    assert direction_precision(real, nothing) == 0.0
    assert np.isnan(direction_precision(nothing, predicted)).all()
    # Nine right ones mend an early miss: the reach is the deepest pure beginning, not the first impure place.
    long = side([1] * 10, [0.01] * 10)
    assert direction_reach(long, side([-1] + [1] * 9, np.arange(1, 11) / 1000), genes) == 1.0
    assert direction_reach(long, side([-1, -1] + [1] * 8, np.arange(1, 11) / 1000), genes) == 0.0


def test_direction_reach_leaves_out_the_targets_that_a_table_tells(study):
    real, predicted, found, table = study
    genes = [f"g{i}" for i in range(30)]
    of_a = [gene for gene, de in zip(genes, found.real.significant[0], strict=True) if de]
    _, other = scored(real, predicted, genes=genes, targets={"A": of_a, "B": ["g29"]})
    assert of_a
    assert np.isnan(other.loc["A", "DirReach"])
    assert other.loc["C", "DirReach"] == table.loc["C", "DirReach"]


def test_the_truth_is_the_best_prediction(study):
    real, _, _, worse = study
    _, best = scored(real, real)
    for name in EFFECT:
        metric = METRICS[name]
        ideal = {"WMSE": 0.0}.get(name, 1.0)
        if name != "MSE_unbiased":
            np.testing.assert_allclose(best[name], ideal, atol=1e-12, err_msg=name)
        sign = 1 if metric.higher else -1
        assert (sign * (best[name] - worse[name]) >= -1e-12).all(), name


def test_a_mean_of_the_others_tells_nothing(study):
    real = study[0]
    mean = {n: real[n == LABELS].mean(0, dtype=float) for n in "ABC"}
    predicted = real.copy()
    for name in "ABC":
        predicted[name == LABELS] = np.mean([mean[n] for n in "ABC" if n != name], axis=0)
    _, table = scored(real, predicted)
    np.testing.assert_array_equal(table["PDCorr_perturbed"], 0.0)
    assert (table["R2_weighted"] < 0).all()


def test_one_perturbation_is_weighted_against_the_controls():
    some = np.isin(LABELS, ["control", "A"])
    real, predicted, labels = cells(0)[some], cells(1)[some], LABELS[some]
    _, table = scored(real, predicted, labels)
    assert table[["PDCorr_perturbed", "centroid_accuracy"]].isna().all(axis=None)
    assert table[["WMSE", "R2_weighted", "MSE_unbiased"]].notna().all(axis=None)
    own, controls = real[labels == "A"].astype(float), real[labels == "control"].astype(float)
    error = np.sqrt((own.var(0, ddof=1) + controls.var(0, ddof=1)) / len(own))
    w = gene_weights((own.mean(0) - controls.mean(0)) / error)
    gap = predicted[labels == "A"].mean(0, dtype=float) - own.mean(0)
    assert table.loc["A", "WMSE"] == pytest.approx((w * gap**2).sum(), rel=1e-6)


def test_weights():
    np.testing.assert_allclose(gene_weights(np.array([-3.0, 1.0, 2.0])), [0.8, 0.0, 0.2])
    np.testing.assert_allclose(gene_weights(np.array([2.0, -2.0])), [0.5, 0.5])
    assert np.isnan(gene_weights(np.zeros(3))).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), flat=st.sampled_from(["real", "predicted", "both", "zero", "few"]))
def test_degenerate_cells_give_a_number_or_nan_and_no_warning(seed, flat):
    rng = np.random.default_rng(seed)
    names = ["control", "A", "B", "g1"]
    labels = np.repeat(names, rng.integers(1, 4, 4) if flat == "few" else [6, 4, 3, 5])
    sides = [np.log1p(rng.poisson(0.7, (len(labels), 6))).astype(np.float32) for _ in range(2)]
    for side in range(2):
        if flat in ("both", ("real", "predicted")[side]):
            sides[side][:] = sides[side][0]
        if flat == "zero":
            sides[side][:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        genes = [f"g{i}" for i in range(6)]
        found = compare(sides[0], sides[1], labels, labels, control="control", genes=genes)
        values = score(found, EFFECT)
    for name, each in values.items():
        assert not np.isinf(each).any(), name
        defined = each[~np.isnan(each)]
        assert ((defined >= METRICS[name].low) & (defined <= METRICS[name].high + 1e-12)).all(), name
