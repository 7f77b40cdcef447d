"""Each metric on a toy with a known answer, where it is undefined, and alone as in company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from perturbdiff.evaluation.metrics import profile_metrics as m
from perturbdiff.evaluation.metrics.catalogue import METRICS, PAPER, chosen, score
from perturbdiff.evaluation.metrics.differential import DEFINITIONS, Differential
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.runtime.errors import UserError

GENES = tuple(f"g{i}" for i in range(12))


def table(rng, num=5, genes=12):
    control = rng.random(genes) + 0.2
    mean = np.maximum(control + rng.normal(0, 0.3, (num, genes)), 0.01)
    return Differential.of(rng.random((num, genes)) ** 6, mean, control)


@pytest.fixture
def comparison():
    rng = np.random.default_rng(0)
    return Comparison(tuple("abcde"), GENES, table(rng), table(rng))


def with_significant(base: Differential, rows) -> Differential:
    significant = np.zeros(base.p.shape, bool)
    for i, genes in enumerate(rows):
        significant[i, list(genes)] = True
    return dataclasses.replace(base, significant=significant)


def test_the_catalogue_is_complete():
    assert len(PAPER) == 14
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.formula
        assert metric.low < metric.high


def test_each_metric_alone_equals_its_value_among_all(comparison):
    together = score(comparison)
    for name, values in together.items():
        np.testing.assert_array_equal(score(comparison, [name])[name], values)


def test_values_lie_in_their_range(comparison):
    for name, values in score(comparison).items():
        finite = values[~np.isnan(values)]
        assert (finite >= METRICS[name].low - 1e-12).all(), name
        assert (finite <= METRICS[name].high + 1e-12).all(), name


def test_a_perfect_prediction_is_perfect(comparison):
    real = with_significant(comparison.real, [{0, 1}, {2}, {3, 4, 5}, {6, 7}, {8}])
    q = np.where(real.significant, 0.001, 0.9).astype(np.float32)
    real = dataclasses.replace(real, q=q)
    values = score(Comparison(comparison.perturbations, GENES, real, real))
    for name in ("R2", "PDCorr", "PDS_L1", "PDS_L2", "DEOver", "DEPrec", "DirAgr", "AUROC", "AUPRC", "ES"):
        np.testing.assert_allclose(values[name], 1.0, err_msg=name)
    np.testing.assert_allclose(values["MSE"], 0.0)
    np.testing.assert_allclose(values["MAE"], 0.0)


def test_an_unknown_metric_is_refused(comparison):
    with pytest.raises(ValueError, match="nonsense"):
        score(comparison, ["nonsense"])


def test_pearson_delta():
    rng = np.random.default_rng(1)
    x, y = rng.random((3, 9)), rng.random((3, 9))
    expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(m.pearson_delta(x, y), expected)
    assert np.isnan(m.pearson_delta(x[:1], np.zeros((1, 9)))).all()


def test_errors_are_means_over_genes():
    real, predicted = np.array([[1.0, 2.0, 3.0]]), np.array([[1.0, 0.0, 6.0]])
    assert m.mean_squared_error(real, predicted) == pytest.approx(13 / 3)
    assert m.mean_absolute_error(real, predicted) == pytest.approx(5 / 3)
    assert m.r_squared(real, predicted) == pytest.approx(1 - 13 / 2)


def test_r_squared_of_a_flat_profile():
    flat = np.ones((2, 4))
    np.testing.assert_array_equal(m.r_squared(flat, np.stack([np.ones(4), np.arange(4.0)])), [1.0, 0.0])


@pytest.mark.parametrize("distance", ["l1", "l2", "cosine"])
def test_discrimination_ranks_the_own_effect(distance):
    real = np.eye(4)[:, :3] + 0.01
    real[3] = [1.0, 1.0, 0.0]
    predicted = real[[0, 1, 2, 2]]
    scores = m.discrimination(real, predicted, list("abcd"), ["x", "y", "z"], distance=distance)
    np.testing.assert_allclose(scores[:3], 1.0)
    assert scores[3] == 0.25  # all three others are nearer to what was predicted


def test_discrimination_leaves_the_own_gene_out():
    real = np.array([[5.0, 1.0, 0.0], [0.0, 1.0, 0.1]])
    predicted = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.1]])
    named = m.discrimination(real, predicted, ["g0", "p"], ["g0", "g1", "g2"], distance="l2")
    plain = m.discrimination(real, predicted, ["o", "p"], ["g0", "g1", "g2"], distance="l2")
    np.testing.assert_allclose(named, [1.0, 1.0])
    np.testing.assert_allclose(plain, [0.5, 1.0])


def test_equal_distances_rank_by_position_so_that_no_change_scores_chance():
    real = np.random.default_rng(2).normal(size=(6, 8))
    scores = m.discrimination(real, np.zeros((6, 8)), list("abcdef"), list("12345678"), distance="cosine")
    np.testing.assert_allclose(scores, 1 - np.arange(6) / 6)


def test_one_perturbation_is_not_discriminated_nor_correlated(comparison):
    rng = np.random.default_rng(5)
    alone = Comparison(("a",), GENES, table(rng, 1), table(rng, 1))
    values = score(alone)
    for name in ("PDS_L1", "PDS_L2", "PDS_cos", "ES"):
        assert np.isnan(values[name]).all()
    assert np.isfinite(values["MSE"]).all()


def test_overlap_and_precision_count_only_the_top():
    base = table(np.random.default_rng(3), num=3)
    strength = np.tile(np.arange(12.0, 0.0, -1.0), (3, 1)).astype(np.float32)
    base = dataclasses.replace(base, log2_fold=strength)
    real = with_significant(base, [{0, 1}, {0, 5}, ()])
    predicted = with_significant(base, [{1, 2, 3, 4}, (), {3}])
    ranks = [m.top_ranks(side, GENES) for side in (real, predicted)]
    np.testing.assert_allclose(m.top_overlap(*ranks, size="real"), [0.5, 0.0, 0.0])
    np.testing.assert_allclose(m.top_overlap(*ranks, size="predicted"), [0.25, 0.0, 0.0])
    np.testing.assert_allclose(m.top_overlap(*ranks, size="predicted", most=2), [0.5, 0.0, 0.0])
    np.testing.assert_allclose(m.top_overlap(*ranks, size="real", most=1), [0.0, 0.0, 0.0])


def test_ties_in_fold_change_go_to_the_smaller_p_then_to_the_name():
    base = table(np.random.default_rng(3), num=1)
    p = np.linspace(0.9, 0.1, 12)[None]
    p[0, 5] = p[0, 2]
    base = dataclasses.replace(base, log2_fold=np.full((1, 12), 4.0, np.float32), p=p)
    marked = with_significant(base, [{2, 5, 7}])
    np.testing.assert_array_equal(m.top_ranks(marked, GENES)[0, [2, 5, 7]], [1, 2, 0])
    np.testing.assert_array_equal(m.top_ranks(marked, GENES[::-1])[0, [2, 5, 7]], [2, 1, 0])
    assert (m.top_ranks(marked, GENES)[0, [0, 1]] > 12).all()


def test_direction_and_fold_changes_over_real_genes_only(comparison):
    real = with_significant(comparison.real, [{0, 1, 2, 3}, {4}, (), {1, 2}, {5, 6, 7}])
    predicted = comparison.predicted
    agreement = m.direction_agreement(real, predicted)
    same = np.sign(real.log2_fold[0, :4]) == np.sign(predicted.log2_fold[0, :4])
    assert agreement[0] == pytest.approx(same.mean())
    assert np.isnan(agreement[2])
    correlation = m.fold_change_spearman(real, predicted)
    assert correlation[0] == pytest.approx(stats.spearmanr(real.fold[0, :4], predicted.fold[0, :4])[0])
    assert np.isnan(correlation[[1, 2]]).all()


def test_effect_sizes_leave_perturbations_without_real_genes_out(comparison):
    real = with_significant(comparison.real, [{0}, {0, 1}, (), {0, 1, 2}, {0, 1, 2, 3}])
    predicted = with_significant(comparison.predicted, [{0}, {0, 1}, range(12), {0, 1, 2}, {1, 2, 3, 4, 5}])
    assert m.effect_size_spearman(real, predicted) == pytest.approx(1.0)
    none = with_significant(comparison.real, [(), (), (), (), ()])
    assert np.isnan(m.effect_size_spearman(none, predicted)).all()


def test_average_ranks_equal_scipy():
    rng = np.random.default_rng(8)
    for n in (1, 2, 50):
        x = rng.integers(0, 9, n).astype(np.float32)
        x[x == 0] = np.inf
        np.testing.assert_array_equal(m.average_ranks(x), stats.rankdata(x))


def test_areas_equal_the_reference_with_ties():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(4)
    for _ in range(20):
        label, rank = rng.random(30) < 0.3, rng.integers(0, 6, 30).astype(float)
        if label.any() and not label.all():
            roc, precision = m.areas_of(label, rank)
            assert roc == pytest.approx(metrics.roc_auc_score(label, rank))
            assert precision == pytest.approx(metrics.average_precision_score(label, rank))


@pytest.mark.parametrize(
    ("definition", "expected"), [("cell-eval-0.6.6", 10 / 11), ("cell-eval-0.8.2", 10.5 / 11)]
)
def test_areas_without_both_labels_and_a_q_of_zero(comparison, definition, expected):
    real = with_significant(comparison.real, [(), range(12), {0}, {0}, {0}])
    q = comparison.predicted.q.copy()
    q[2], q[2, 0], q[2, 1] = (
        0.5,
        0.0,
        1e-20,
    )  # the zero scores 10, in 0.6.6 below 1e-20's 20, in 0.8.2 like it
    found = m.areas(real, dataclasses.replace(comparison.predicted, q=q), DEFINITIONS[definition])
    assert np.isnan(found[:2]).all()
    assert found[2, 0] == pytest.approx(expected)


def test_metrics_of_enough_genes_leave_the_others_out(comparison):
    real = with_significant(comparison.real, [range(10), range(11), range(9), (), {1}])
    found = dataclasses.replace(comparison, real=real)
    values = score(found, ["DEOver", "DEOver_10", "DEPrec_10"])
    np.testing.assert_array_equal(values["DEOver_10"][:2], values["DEOver"][:2])
    assert np.isnan(values["DEPrec_10"][2:]).all()
    np.testing.assert_array_equal(METRICS["DEOver_10"].absent(found), [False, False, True, True, True])
    np.testing.assert_array_equal(METRICS["DirAgr"].absent(found), [False, False, False, True, False])
    assert np.isfinite(score(dataclasses.replace(found, min_de=1), ["DEOver_10"])["DEOver_10"]).sum() == 4


@pytest.mark.parametrize("distance", ["l1", "l2", "cosine"])
def test_discrimination_equals_the_plain_formula(distance):
    rng = np.random.default_rng(6)
    real, predicted = rng.normal(size=(40, 57)), rng.normal(size=(40, 57))
    predicted[:20] = 0.4 * real[:20] + predicted[:20]
    real[7] = real[3]  # equal distances
    real[9] = 0
    genes = [f"g{i:02d}" for i in range(57)]
    names = genes[:5] + [f"p{i:02d}" for i in range(35)]
    expected = []
    for i, name in enumerate(names):
        keep = np.array(genes) != name
        x, y = real[:, keep], predicted[i, keep]
        if distance == "cosine":
            lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y)
            distances = 1 - (x @ y) / np.where(lengths == 0, 1, lengths)
        else:
            distances = np.linalg.norm(x - y, ord=int(distance[1]), axis=1)
        distances = distances.round(12)  # rounding is no reason to tell two equal rows apart
        expected.append(1 - np.flatnonzero(np.argsort(distances, kind="stable") == i)[0] / 40)
    scores = m.discrimination(real, predicted, names, genes, distance=distance)
    np.testing.assert_allclose(scores, expected)
    turned = m.discrimination(real[::-1], predicted[::-1], names[::-1], genes, distance=distance)
    np.testing.assert_array_equal(turned[::-1], scores)


def test_names_and_families_choose_metrics_in_the_catalogues_order():
    assert chosen(["count", "MSE", "n_DE_real"]) == ("MSE", "n_DE_real", "n_DE_pred")
    assert chosen() == tuple(METRICS)
    with pytest.raises(UserError, match="PDCorr"):
        chosen(["PDCor"])


def test_coupled_metrics_depend_on_the_definition():
    old, new = (DEFINITIONS[f"cell-eval-0.{release}"] for release in ("6.6", "8.2"))
    assert METRICS["PDS_L1"].is_coupled(new)
    assert METRICS["DEOver"].is_coupled(old)
    assert not METRICS["DEOver"].is_coupled(new)
    assert not METRICS["MSE"].is_coupled(old)
