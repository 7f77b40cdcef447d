"""Calibration of metrics: closed forms of its parts, and the stage on cells whose effects are known."""

from __future__ import annotations

import json
import math

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.calibration import separation, verdicts
from perturbdiff.evaluation.calibration.calibration_stage import calibrate
from perturbdiff.evaluation.calibration.predictability import cosine
from perturbdiff.evaluation.calibration.verdicts import Evidence, default_metrics, judge
from perturbdiff.evaluation.evaluation_stage import evaluate, merge
from perturbdiff.runtime.errors import UserError

CONFIG = EvaluateConfig(
    metrics=("PDCorr", "MSE", "PDS_cos", "ES", "energy_distance", "nonzero_ratio", "n_DE_real"), bootstrap=50
)
NAN = math.nan


def test_the_dynamic_range_is_the_median_share_of_the_way_to_a_perfect_score():
    positive = np.array([[0.5, 0.8, 0.0, NAN]])
    negative = np.array([[0.0, 0.6, 0.5, 0.1]])
    # shares 1/2, 1/2 and −1: the last is below −1/2 / 1/2
    assert separation.dynamic_range(positive, negative, 1.0) == pytest.approx(0.5, abs=1e-5)
    errors = -np.array([[0.01]]), -np.array([[0.04]])
    assert separation.dynamic_range(*errors, 0.0) == pytest.approx(0.75, abs=1e-4)
    beyond = np.array([[0.1]]), np.array([[0.2]])  # an unbiased distance below 0 leaves no range
    assert math.isnan(separation.dynamic_range(*beyond, 0.0))
    halves = np.array([[1.0], [0.0]]), np.array([[0.0], [0.0]])
    assert separation.dynamic_range(*halves, 1.0) == pytest.approx(0.5, abs=1e-5)


def test_perfect_scores():
    assert separation.perfect("PDCorr") == 1.0
    assert separation.perfect("energy_distance") == 0.0  # although estimates may be negative
    assert separation.perfect("nonzero_ratio") == 0.0  # its distance from 1
    assert math.isnan(separation.perfect("n_DE_real"))


def test_discrimination_counts_ties_half_and_a_missing_value_as_lost():
    better = np.array([[1.0, 0.5, 0.2, NAN, 0.3, NAN]])
    worse = np.array([[0.5, 0.5, 0.9, 0.1, NAN, NAN]])
    assert separation.discrimination(better, worse) == pytest.approx((1 + 0.5 + 0 + 0 + 1) / 5)
    assert math.isnan(separation.discrimination(better[:, -1:], worse[:, -1:]))


def test_perturbations_needed_reach_the_power_of_the_t_test():
    # Cohen 1988 and G*Power: a paired t-test with effect size 0.5 needs 34 pairs, with 0.8 it needs 15
    assert separation.perturbations_needed(0.5) == 34
    assert separation.perturbations_needed(0.8) == 15
    assert math.isinf(separation.perturbations_needed(0.0))
    assert math.isnan(separation.perturbations_needed(NAN))
    rng = np.random.default_rng(0)
    draws = rng.normal(0.5, 1.0, (4000, 34))
    t = draws.mean(axis=1) / (draws.std(axis=1, ddof=1) / math.sqrt(34))
    assert np.mean(abs(t) > 2.0345) == pytest.approx(0.8, abs=0.02)


def test_cells_needed_follow_the_effect_sizes_of_fewer_cells():
    # the effect size grows with the root of the cells: half of the needed one at 100 cells needs 400
    wanted = (1.959964 + 0.841621) / math.sqrt(20 - 1.959964**2 / 2)
    root = {1.0: wanted / 2, 0.5: wanted / 2 / math.sqrt(2), 0.25: wanted / 4}
    assert separation.cells_needed(root, 20, 100) == pytest.approx(400, abs=1)
    assert (
        separation.cells_needed({1.0: 9.0, 0.5: 9.0, 0.25: 9.0}, 20, 100) == 25
    )  # no more than what was tried
    assert math.isinf(
        separation.cells_needed({1.0: 0.01, 0.5: 0.02, 0.25: 0.03}, 20, 100)
    )  # more cells do not help
    assert math.isinf(separation.cells_needed({1.0: -0.1, 0.5: 0.2, 0.25: 0.2}, 20, 100))
    assert math.isnan(separation.cells_needed(root, 1, 100))


def found(metric="PDCorr", units=20, share=0.5, order=0.9, gain=0.3, low=0.1):
    return Evidence(metric, units, share, order, gain, low)


@pytest.mark.parametrize(
    ("evidence", "verdict", "words"),
    [
        (found(), "keep", "90 %"),
        (found(order=0.74), "weak", "only 74 %"),
        (found(share=0.09), "weak", "only 9 % of the way"),
        (found(low=0.0), "useless", "only within the noise"),
        (found(gain=-0.1, low=-0.2), "useless", "no better than"),
        (found(units=4), "weak", "only 4 of 5"),
        (found(units=0, gain=NAN, low=NAN), "useless", "no perturbation"),
        (found("ES", units=0), "weak", "one number"),
        (found("nonzero_ratio"), "useless", "look real"),
    ],
)
def test_the_first_rule_that_applies_gives_the_verdict(evidence, verdict, words):
    level, reason = judge(evidence)
    assert level == verdict
    assert words in reason


def test_the_default_metrics_are_the_first_kept_one_of_each_question():
    said = {
        "energy_distance": "keep",
        "PDCorr": "weak",
        "PDS_cos": "useless",
        "PDS_L1": "keep",
        "MAE": "keep",
    }
    assert default_metrics(said) == ["energy_distance", "PDS_L1"]
    table = pd.DataFrame({"metric": list(said), "verdict": list(said.values()), "reason": "so it is"})
    assert default_metrics(table) == ["energy_distance", "PDS_L1"]


def screen(effect: float, *, perturbations=8, cells=40, genes=30, seed=0) -> ad.AnnData:
    """Counts of two contexts; each perturbation multiplies three genes of its own, the same in both contexts."""
    rng = np.random.default_rng(seed)
    names = ["control"] * 3 + [f"p{i}" for i in range(perturbations)]
    labels = np.repeat(names, cells)
    contexts = np.tile(["a", "b"], len(labels) // 2)
    rate = np.tile(rng.uniform(1, 5, genes), (len(labels), 1))
    rate[contexts == "b"] *= rng.uniform(0.5, 2, genes)
    for i in range(perturbations):
        own = rng.choice(genes, 3, replace=False)
        rate[np.ix_(labels == f"p{i}", own)] *= np.exp(effect)
    obs = pd.DataFrame(
        {"perturbation": labels, "cell_type": contexts}, index=np.arange(len(labels)).astype(str)
    )
    cells_ = ad.AnnData(np.log1p(rng.poisson(rate)).astype(np.float32), obs=obs)
    cells_.uns["perturbdiff"] = {"scale": "log1p", "control": "control"}
    return cells_


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truths")
    for name, effect in (("strong", 1.5), ("none", 0.0)):
        screen(effect).write_h5ad(folder / f"{name}.h5ad")
    return folder


@pytest.fixture(scope="module")
def calibrated(truths):
    return {
        name: calibrate(truths / f"{name}.h5ad", truths / f"{name}-calibration", CONFIG, threads=1)
        for name in ("strong", "none")
    }


def test_strong_effects_are_told_from_the_mean_and_no_effects_are_not(calibrated):
    tables = {
        name: pd.read_csv(folder / "calibration.csv").set_index("metric")
        for name, folder in calibrated.items()
    }
    strong, none = tables["strong"], tables["none"]
    assert list(strong.columns[:6]) == [
        *("dynamic_range", "discrimination", "cells_needed", "perturbations_needed", "verdict", "reason")
    ]
    kept = ["PDCorr", "MSE", "PDS_cos", "energy_distance"]
    assert (strong.loc[kept, "verdict"] == "keep").all()
    assert not (none["verdict"] == "keep").any()
    assert strong.loc["nonzero_ratio", "verdict"] == "useless"
    assert "n_DE_real" not in strong.index  # a count is no score
    assert strong.loc["PDCorr", "dynamic_range"] > 0.8 > 0.3 > none.loc["PDCorr", "dynamic_range"]
    assert strong.loc["PDCorr", "perturbations_needed"] < 8 < none.loc["PDCorr", "perturbations_needed"]
    order = ["control", "perturbed_mean", "interpolated_duplicate", "technical_duplicate"]
    assert strong.loc["PDCorr", order[1:]].is_monotonic_increasing
    assert default_metrics(strong.reset_index()) == ["energy_distance", "PDCorr", "PDS_cos"]


def test_predictability_tells_effects_from_noise(calibrated):
    strong, none = (
        json.loads((calibrated[name] / "predictability.json").read_text()) for name in ("strong", "none")
    )
    assert strong["above_noise"] == strong["units"] == 8
    assert none["above_noise"] <= 1
    middle = {name: quartiles[1] for name, quartiles in strong["quartiles"].items()}
    assert middle["replicate_cosine"] > 0.8
    assert middle["cross_context_cosine"] > 0.8  # the same effect in both contexts
    assert middle["cosine_with_mean"] < 0.3
    assert middle["de_genes"] == pytest.approx(3, abs=1)
    assert abs(none["quartiles"]["replicate_cosine"][1]) < 0.3
    assert strong["best"]["PDCorr"]["reference"] == "technical_duplicate"
    units = pd.read_csv(calibrated["strong"] / "predictability.csv")
    assert list(units["unit"]) == [f"p{i}" for i in range(8)]
    assert (units["contexts"] == 1).all()


def test_cosines():
    x = np.array([[1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(cosine(x, np.array([[2.0, 2.0], [1.0, 1.0]])), [math.sqrt(0.5), NAN])


def test_an_evaluation_says_what_each_metric_is_worth(truths, calibrated, tmp_path):
    predictions, truth = truths / "none.h5ad", truths / "strong.h5ad"
    whole = evaluate(
        predictions, truth, tmp_path / "whole", CONFIG, calibration=calibrated["strong"], threads=1
    )
    table = pd.read_csv(whole / "aggregate.csv").set_index(["scope_kind", "metric"]).sort_index()
    assert table.loc[[("pooled", "PDCorr")], "calibration"].eq("keep").all()
    assert table.loc[[("pooled", "PDCorr")], "calibration_reason"].str.len().gt(10).all()
    assert table.loc[[("pooled", "n_DE_real")], "calibration"].isna().all()
    said = json.loads((whole / "summary.json").read_text())["calibration"]
    assert said["default"] == ["energy_distance", "PDCorr", "PDS_cos"]
    assert said["metrics"]["nonzero_ratio"]["verdict"] == "useless"
    assert said["predictability"]["units"] == 8
    parts = [
        evaluate(
            *(predictions, truth, tmp_path / f"part{i}", CONFIG),
            calibration=calibrated["strong"],
            shard=(i, 2),
            threads=1,
        )
        for i in range(2)
    ]
    joined = merge(parts, tmp_path / "joined")
    assert (joined / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    assert (joined / "aggregate.csv").read_bytes() == (whole / "aggregate.csv").read_bytes()


def test_a_calibration_of_something_else_is_refused(truths, calibrated, tmp_path):
    given = truths / "none.h5ad", truths / "strong.h5ad", tmp_path / "out"
    with pytest.raises(UserError, match="another truth"):
        evaluate(*given, CONFIG, calibration=calibrated["none"])
    other = CONFIG.model_copy(update={"definition": "cell-eval-0.8.2"})
    with pytest.raises(UserError, match=r"of the metrics of perturbdiff, not of cell-eval-0\.8\.2"):
        evaluate(*given, other, calibration=calibrated["strong"])
    with pytest.raises(UserError, match=r"holds no calibration\.csv"):
        evaluate(*given, CONFIG, calibration=truths)
    assert not (tmp_path / "out").exists()


def test_a_single_perturbation_has_no_mean_of_others(tmp_path):
    one = screen(1.5, perturbations=1)
    one.write_h5ad(tmp_path / "one.h5ad")
    out = calibrate(tmp_path / "one.h5ad", tmp_path / "out", CONFIG, threads=1)
    table = pd.read_csv(out / "calibration.csv").set_index("metric")
    assert table.loc["energy_distance", "negative"] == "control"
    assert table.loc["energy_distance", "units"] == 2  # the same perturbation in two contexts
    assert table.loc["energy_distance", "verdict"] == "weak"
    assert verdicts.default_metrics(table.reset_index()) == []
