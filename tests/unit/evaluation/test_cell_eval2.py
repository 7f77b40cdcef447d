"""The definition cell-eval2: its numbers, its rules, and what `evaluate` and `report` make of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from counted_pair import CONTROL, GENES, PERTURBATIONS, counted_side, write_pair
from refusals import nothing_left, refused

from perturbdiff.config.settings import DataConfig, EvaluateConfig
from perturbdiff.evaluation.cell_eval2 import count_stage
from perturbdiff.evaluation.cell_eval2.jackknife import sampling_noise
from perturbdiff.evaluation.cell_eval2.metrics import (
    METRICS,
    NORM,
    PARAMETERS,
    PROFILES,
    RULES,
    SCORED,
    Rules,
)
from perturbdiff.evaluation.cell_eval2.scores import SCORE, drawn_levels, levels, scale
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.reporting.figures import svg
from perturbdiff.runtime.errors import UserError

FROZEN = json.loads((Path(__file__).parents[2] / "data/metrics/cell_eval2_values.json").read_text())
FIXTURE = Path(os.environ.get("PERTURBDIFF_DATA", "data")) / "../fixtures/cell_eval2/a"
TARGET = EvaluateConfig(definition="cell-eval2", perturbation_key="target", bootstrap=200)
OPTIONS = ("--definition", "cell-eval2", "--pert-col", "target", "--set", "evaluate.bootstrap=20")


def values_of(folder) -> dict[str, dict[str, float]]:
    """Return each metric's values per perturbation, those that count."""
    table = pd.read_parquet(folder / "metrics.parquet").dropna(subset="value")
    return {str(m): dict(zip(g["perturbation"], g["value"], strict=True)) for m, g in table.groupby("metric")}


def means_of(folder) -> pd.DataFrame:
    return pd.read_csv(folder / "aggregate.csv").set_index("metric")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("counted"))


@pytest.fixture(scope="module")
def scored(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    return {
        rules: evaluate(*pair, folder / rules, TARGET.model_copy(update={"rules": rules}))
        for rules in PROFILES
    }


def test_every_metric_equals_cell_eval2(scored):
    """The values were computed once by cell-eval2 0.20.0 from the same simulated cells, with the preset v2."""
    found = values_of(scored["v2"])
    for metric, expected in FROZEN["values"].items():
        expected = {name: value for name, value in expected.items() if value is not None}
        assert found[metric] == pytest.approx(expected, rel=1e-9, abs=1e-12), metric
    assert set(found) == set(METRICS) - {NORM}


def test_means_baseline_and_replicates_equal_cell_eval2(scored):
    """Both ends draw their cells in the same order, so that even they are the same."""
    table = means_of(scored["vcc2026"])
    for column, frozen in (("nanmean", "means"), ("baseline", "baseline"), ("replicate", "replicate")):
        expected = {name: FROZEN[frozen][name] for name in PROFILES["vcc2026"]}
        assert table.loc[list(expected), column].to_dict() == pytest.approx(expected, rel=1e-9, abs=1e-12), (
            column
        )


def test_both_profiles_agree_and_the_score_is_the_mean_of_six(scored):
    small, large = means_of(scored["vcc2026"]), means_of(scored["v2"])
    assert list(small.index[1:]) == list(PROFILES["vcc2026"])
    assert small["scaled"].equals(large["scaled"].reindex(small.index))
    assert small.loc[SCORE, "scaled"] == pytest.approx(small.loc[list(SCORED), "scaled"].mean())
    inside = small.loc[[SCORE, *SCORED]]
    assert (inside["scaled_low"] <= inside["scaled"]).all()
    assert (inside["scaled"] <= inside["scaled_high"]).all()


@pytest.mark.skipif(not FIXTURE.is_dir(), reason="needs PERTURBDIFF_DATA with fixtures/cell_eval2 beside it")
@pytest.mark.parametrize("rules", list(PROFILES))
def test_the_fixture_of_cell_eval2(tmp_path, rules):
    config = TARGET.model_copy(update={"rules": rules})
    found = values_of(evaluate(FIXTURE / "pred.h5ad", FIXTURE / "real.h5ad", tmp_path / "out", config))
    expected = pd.read_csv(FIXTURE / f"results_{rules}.csv").dropna(subset="value")
    assert set(expected["metric"]) == set(found)
    for metric, rows in expected.groupby("metric"):
        values = dict(zip(rows["perturbation"], rows["value"], strict=True))
        assert found[str(metric)] == pytest.approx(values, rel=1e-9, abs=1e-12), metric


def test_a_declined_prediction_is_scored(scored):
    """Copied controls and one repeated cell say nothing, and have the worst value wherever the others have one."""
    found = values_of(scored["v2"])
    silent, repeated = PERTURBATIONS[4], PERTURBATIONS[6]
    for name, metric in METRICS.items():
        if name in found and silent not in found[name]:
            assert metric.worst is None, name
    assert found["de_wilcoxon_direction_precision"][silent] == 0.0
    assert found["de_wilcoxon_precision_adjusted"][silent] == -1.0
    assert found["de_wilcoxon_direction_fidelity_yield_raw"][silent] == 0.0
    assert found["expr_mse_unbiased"][repeated] > 0.0


@pytest.mark.parametrize(("cells", "spread"), [(30, 0.2), (7, 1.5), (2, 0.1), (1, 0.1)])
def test_sampling_noise_is_the_jackknife(cells, spread):
    rng = np.random.default_rng(cells)
    rate = np.exp(rng.normal(size=40)) * np.exp(spread * rng.normal(size=(cells, 1)))
    counts = rng.poisson(rate).astype(float)
    sums = counts.sum(axis=0)
    left_out = sums - counts
    profiles = np.log1p(5e4 * left_out / np.maximum(left_out.sum(axis=1, keepdims=True), 1))
    expected = (cells - 1) / cells * ((profiles - profiles.mean(axis=0)) ** 2).sum() if cells > 1 else 0.0
    found = sampling_noise(sp.csr_matrix(counts), sums, counts.sum(axis=1), 5e4)
    assert found == pytest.approx(expected, rel=1e-10)


def test_sampling_noise_with_all_counts_in_one_cell():
    counts = np.zeros((3, 4))
    counts[1] = [1, 2, 0, 5]
    profile = np.log1p(5e4 * counts[1] / 8)
    expected = 2 / 3 * ((2 / 3) ** 2 + 2 * (1 / 3) ** 2) * (profile**2).sum()
    found = sampling_noise(sp.csr_matrix(counts), counts.sum(axis=0), counts.sum(axis=1), 5e4)
    assert found == pytest.approx(expected)


def test_the_baseline_scores_zero_and_a_replicate_one():
    rng = np.random.default_rng(1)
    names = [*(name for name in SCORED if name != NORM), "expr_mse_unbiased_capped", "expr_distance_unbiased"]
    low = {name: rng.uniform(0.2, 0.4, 9) for name in names}
    high = {name: v + 0.3 if METRICS[name].direction == "higher" else v * 0.4 for name, v in low.items()}
    high["expr_distance_unbiased"] = low["expr_distance_unbiased"]
    assert all(abs(v[0]) < 1e-12 for v in levels(low, low, [high]).scaled.values())
    assert all(abs(v[0] - 1) < 1e-12 for v in levels(high, low, [high, high]).scaled.values())
    draws = drawn_levels(high, low, [high], draws=50, seed=(0, 0))
    assert np.allclose(draws.scaled[SCORE], 1.0)


def test_data_that_cannot_tell_have_no_scaled_score():
    name = "pds_cosine"
    assert np.isnan(scale(name, np.array([0.9]), np.array([0.6]), np.array([0.5])))[0]
    assert (
        scale(name, np.array([np.nan]), np.array([0.5]), np.array([1.0])) == -1.0
    )  # nothing predicted: the floor
    assert scale("de_wilcoxon_lfc_nmae", np.array([50.0]), np.array([1.0]), np.array([0.5])) == -6.0


DIFFERENT = {"profile": "v2", "reference": "others"}


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_every_rule_changes_the_digest(parameter):
    given = {"genes": ["A", "B"], "targets": [("pooled", "p", "A")], "controls": "x"}
    rules = RULES["vcc2026"]
    value = DIFFERENT.get(parameter)
    changed = dataclasses.replace(rules, **{parameter: value or getattr(rules, parameter) + 1})
    assert changed.digest(**given) != rules.digest(**given)


def test_genes_targets_controls_and_metrics_change_the_digest(monkeypatch):
    given = {"genes": ["A", "B"], "targets": [("pooled", "p", "A"), ("pooled", "q", "B")], "controls": "x"}
    before = Rules().digest(**given)
    assert Rules().digest(**{**given, "targets": given["targets"][::-1]}) == before
    for other in ({"genes": ["A"]}, {"targets": []}, {"controls": "y"}):
        assert Rules().digest(**{**given, **other}) != before
    monkeypatch.setitem(METRICS, "pds_cosine", dataclasses.replace(METRICS["pds_cosine"], worst=0.0))
    assert Rules().digest(**given) != before


def test_layouts_threads_and_a_store_give_the_same_scores(scored, tmp_path):
    """zarr against h5ad, four threads against one, and a store as the truth, which has its cells in another order."""
    predicted, real = counted_side(1), counted_side(0)
    predicted[::-1, GENES[::-1]].copy().write_zarr(tmp_path / "predicted.zarr")
    real.write_h5ad(tmp_path / "real.h5ad")
    data = DataConfig(
        perturbation_key="target", control=CONTROL, num_hvgs=None, cell_type_key=None, batch_key=None
    )
    preprocess([tmp_path / "real.h5ad"], tmp_path / "store", data)
    expected = means_of(scored["vcc2026"])
    for truth, threads in (("real.h5ad", 4), ("store", 1)):
        out = tmp_path / f"out-{threads}"
        found = means_of(
            evaluate(tmp_path / "predicted.zarr", tmp_path / truth, out, TARGET, threads=threads)
        )
        np.testing.assert_allclose(found["nanmean"][1:], expected["nanmean"][1:], rtol=1e-9)
        if truth != "store":
            np.testing.assert_allclose(found["scaled"], expected["scaled"], rtol=1e-9)


def test_contexts_are_scored_apart(scored, tmp_path):
    """A file of two contexts, the second a copy of the first: both score as one file does."""
    paths = []
    for side, name in ((1, "predicted.h5ad"), (0, "real.h5ad")):
        one = counted_side(side)
        both = ad.concat({"a": one, "b": one}, label="cell_type", index_unique="-")
        both.write_h5ad(tmp_path / name)
        paths.append(tmp_path / name)
    table = pd.read_csv(evaluate(*paths, tmp_path / "out", TARGET) / "aggregate.csv")
    expected = means_of(scored["vcc2026"])
    assert list(dict.fromkeys(table["scope"])) == ["mean of contexts", "a", "b"]
    for _, rows in table.groupby("scope"):
        rows = rows.set_index("metric")
        np.testing.assert_allclose(rows["nanmean"], expected["nanmean"].reindex(rows.index), rtol=1e-9)
        np.testing.assert_allclose(rows["scaled"], expected["scaled"].reindex(rows.index), rtol=1e-9)


def test_ends_of_an_earlier_evaluation_are_read(pair, scored, tmp_path, monkeypatch):
    """They stand for both ends of any method on the same truth, to the last bit, and nothing is made again."""
    for name in ("baseline", "replicates"):
        monkeypatch.setattr(count_stage, name, lambda *_, **__: pytest.fail("made again"))
    out = evaluate(*pair, tmp_path / "out", TARGET, ends=scored["vcc2026"])
    for name in ("metrics.csv", "aggregate.csv", "replicates.csv", "ends.parquet"):
        assert (out / name).read_bytes() == (scored["vcc2026"] / name).read_bytes(), name


def test_ends_of_other_rules_targets_or_cells_are_refused(pair, scored, tmp_path):
    (tmp_path / "targets.csv").write_text("perturbation,gene\ndrug,G50\n")
    real = counted_side(0)
    real.X.data[0] += 1
    real.write_h5ad(tmp_path / "other.h5ad")
    others = {"targets": str(tmp_path / "targets.csv")}
    wrong = [
        (pair[1], TARGET, scored["v2"]),
        (pair[1], TARGET.model_copy(update=others), scored["vcc2026"]),
        (tmp_path / "other.h5ad", TARGET, scored["vcc2026"]),
    ]
    for truth, config, ends in wrong:
        with pytest.raises(UserError, match="its ends are of other real cells, rules or target genes"):
            evaluate(pair[0], truth, tmp_path / "out", config, ends=ends)
    shutil.copytree(scored["vcc2026"], tmp_path / "changed")
    with (tmp_path / "changed" / "ends.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"ends\.parquet: was changed"):
        evaluate(*pair, tmp_path / "out", TARGET, ends=tmp_path / "changed")
    with pytest.raises(UserError, match=r"has no ends\.parquet"):
        evaluate(*pair, tmp_path / "out", TARGET, ends=pair[0].parent)
    with pytest.raises(UserError, match="only cell-eval2 has two ends"):
        evaluate(
            *pair,
            tmp_path / "out",
            TARGET.model_copy(update={"definition": "perturbdiff"}),
            ends=pair[0].parent,
        )
    assert not (tmp_path / "out").exists()


def test_the_target_table_counts_and_what_does_not_match_is_told(pair, scored, tmp_path):
    table = tmp_path / "targets.csv"
    table.write_text("perturbation,gene\ndrug,G50\ndrug,G51\nG10,\nG17,MISSING\nelse,G01\n")
    out = evaluate(*pair, tmp_path / "out", TARGET.model_copy(update={"targets": str(table)}))
    summary, before = (json.loads((f / "summary.json").read_text()) for f in (out, scored["vcc2026"]))
    assert summary["rules"] != before["rules"]
    assert summary["targets"] == {
        "source": "targets.csv",
        "with_target": len(PERTURBATIONS) - 2,
        "without": ["G10", "G17"],
        "unmeasured": ["MISSING"],
        "unknown": ["else"],
    }
    assert "MISSING" in " ".join(f["text"] for f in summary["findings"])
    found, expected = values_of(out), values_of(scored["vcc2026"])
    changed = {p for p in PERTURBATIONS if found["expr_mse_unbiased"][p] != expected["expr_mse_unbiased"][p]}
    assert changed == {"drug", "G10", "G17"}


def test_one_control_cell_leaves_no_replicate_and_says_so(pair, tmp_path):
    real = ad.read_h5ad(pair[1])
    controls = np.flatnonzero(real.obs["target"] == CONTROL)
    real[np.setdiff1d(np.arange(real.n_obs), controls[1:])].copy().write_h5ad(tmp_path / "real.h5ad")
    out = evaluate(pair[0], tmp_path / "real.h5ad", tmp_path / "out", TARGET)
    table, summary = means_of(out), json.loads((out / "summary.json").read_text())
    assert table["replicate"].isna().all()
    assert table["scaled"].isna().all()
    assert table.loc[list(PROFILES["vcc2026"]), "nanmean"].notna().sum() >= 8
    assert any("no replicate and no scaled score" in f["text"] for f in summary["findings"])


def logged(adata):
    adata.X = adata.X.log1p()
    return adata


def spoiled(adata):
    adata.X.data[-1] = -1.0
    return adata


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (logged, ("predicted.h5ad", "no counts", "cell 'cell", "gene 'G", "--definition cell-eval-0.6.6")),
        (spoiled, ("predicted.h5ad", "-1")),
        (lambda a: a[a.obs["target"] != "G17"].copy(), ("1 of the 12 conditions", "G17")),
        (lambda a: a[:, 1:].copy(), ("1 of the truth's 80 genes", "G00")),
    ],
)
def test_bad_predictions_are_named_and_leave_nothing(run_cli, pair, tmp_path, change, words):
    change(counted_side(1)).write_h5ad(tmp_path / "predicted.h5ad")
    refused(
        run_cli("evaluate", tmp_path / "predicted.h5ad", pair[1], "-o", tmp_path / "out", *OPTIONS), *words
    )
    nothing_left(tmp_path, "predicted.h5ad")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--metrics", "de"), ("leave no choice", "--metrics")),
        (("--shard", "0/2"), ("leave no choice", "--shard")),
        (("--predicted-controls",), ("leave no choice", "--predicted-controls")),
        (("--scale", "log1p"), ("values are log1p", "sample --values counts")),
    ],
)
def test_what_the_rules_fix_cannot_be_chosen(run_cli, pair, tmp_path, options, words):
    refused(run_cli("evaluate", *pair, "-o", tmp_path / "out", *OPTIONS, *options), *words)


def test_left_out_conditions_cannot_be_skipped(run_cli, pair, tmp_path):
    predicted = counted_side(1)
    predicted[predicted.obs["target"] != "G17"].copy().write_h5ad(tmp_path / "predicted.h5ad")
    arguments = ("evaluate", tmp_path / "predicted.h5ad", pair[1], "-o", tmp_path / "out", *OPTIONS)
    refused(run_cli(*arguments, "--missing", "skip"), "1 conditions have no prediction", "scores all of them")


def test_ceiling_makes_the_ends_once_for_all_methods(run_cli, pair, scored, tmp_path, monkeypatch):
    given = ("ceiling", pair[1], "-o", tmp_path / "ends", *OPTIONS, "--control", CONTROL)
    outcome = run_cli(*given)
    assert outcome.code == 0, outcome.err
    assert {path.name for path in (tmp_path / "ends").iterdir()} == {
        "ends.parquet", "manifest.json", "run.json", "summary.json"
    }  # fmt: skip
    for name in ("baseline", "replicates"):
        monkeypatch.setattr(count_stage, name, lambda *_, **__: pytest.fail("made again"))
    out = evaluate(*pair, tmp_path / "out", TARGET, ends=tmp_path / "ends")
    assert (out / "aggregate.csv").read_bytes() == (scored["vcc2026"] / "aggregate.csv").read_bytes()
    assert run_cli(*given).code == 0, "it is there already"
    refused(run_cli(*given[:3], tmp_path / "no", *given[4:], "--reference", "control"), "two ends of its own")
    refused(run_cli("report", tmp_path / "ends", "-o", tmp_path / "r.html"), "ends")


def test_the_report_shows_scaled_scores_and_refuses_other_rules(run_cli, scored, tmp_path, monkeypatch):
    monkeypatch.setattr(svg, "image", lambda figure: b"image")  # drawing takes most of the time
    page = tmp_path / "r.html"
    outcome = run_cli("report", scored["vcc2026"], "-o", page)
    assert outcome.code == 0, outcome.err
    text = page.read_text()
    for word in ("Mean of the six", "Mean response", "Replicate", *SCORED):
        assert word in text, word
    assert "No ceiling" not in text
    outcome = run_cli("report", scored["vcc2026"], scored["v2"], "-o", tmp_path / "mixed.html")
    refused(outcome, "different rules cannot stand in one table", "same definition, truth and target genes")
