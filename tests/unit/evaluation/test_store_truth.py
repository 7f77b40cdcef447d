"""Predictions against a store, and the ceiling of a store, with the stages before them run for real."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from tiny_data import tiny_counts

from perturbdiff.conditions.condition import Condition
from perturbdiff.config.settings import Config, DataConfig, EvaluateConfig, SplitConfig
from perturbdiff.evaluation.ceiling_stage import ceiling, split_seeds
from perturbdiff.evaluation.embedding import choose
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.evaluation.metrics.catalogue import score
from perturbdiff.evaluation.pseudobulk_de import Replicates
from perturbdiff.evaluation.readers.inputs import open_predictions, open_truth
from perturbdiff.evaluation.readers.pairing import pair
from perturbdiff.evaluation.references import pair_reference
from perturbdiff.evaluation.scoring.aggregate import joined, taken_apart
from perturbdiff.evaluation.scoring.condition_pass import score_cells
from perturbdiff.predictions import PredictionWriter, append_controls
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import make_split
from perturbdiff.store.store import Store

EVALUATE = EvaluateConfig(context_column="batch", embed_conditions=2)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    tiny_counts().write_h5ad(folder / "counts.h5ad")
    config = Config(data=DataConfig(num_hvgs=None), split=SplitConfig(held_out=("d2",)))
    preprocess([folder / "counts.h5ad"], folder / "store", config.data)
    make_split(folder / "store", folder / "split.parquet", config)
    return folder


def copied(folder, conditions, path):
    """Write the real cells of some conditions as predictions."""
    store = Store(folder / "store")
    with PredictionWriter(
        path, store.genes, method="copy", control=store.control, target_sum=store.target_sum, dataset="tiny"
    ) as writer:
        for row in conditions.itertuples():
            values = store.expression(slice(row.start, row.stop))
            labels = {"cell_type": row.cell_type, "batch": row.batch, "perturbation": row.perturbation}
            writer.append(
                values,
                pd.DataFrame({k: [v] * values.shape[0] for k, v in labels.items()}).assign(
                    source="predicted"
                ),
            )
        append_controls(writer, store, conditions)
    return path


def test_the_real_cells_themselves_score_best(work, tmp_path):
    table = Store(work / "store").conditions
    wanted = table[(table["batch"] == "d2") & ~table["is_control"]]
    predictions = copied(work, wanted, tmp_path / "copy.h5ad")
    out = evaluate(predictions, work / "store", tmp_path / "out", EVALUATE)
    means = pd.read_csv(out / "aggregate.csv").set_index(["scope", "metric"])["nanmean"]
    for metric in ("R2", "PDCorr", "PDS_L1", "DirAgr", "nonzero_ratio", "correlation_agreement"):
        assert means["d2", metric] == pytest.approx(1.0), metric
    assert means["pooled", "MSE"] == pytest.approx(0.0, abs=1e-12)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["dataset"] == "tiny"
    assert summary["method"] == "copy"
    assert summary["control_groups_replaced"] == 0


def test_some_genes_of_a_store_score_as_a_store_of_these_genes(work, tmp_path):
    genes = Store(work / "store").genes
    listed = tmp_path / "genes.txt"
    listed.write_text("\n".join(genes[::-2]) + "\n")
    preprocess([work / "counts.h5ad"], tmp_path / "store", DataConfig(num_hvgs=None), genes=listed)
    table = Store(work / "store").conditions
    predictions = copied(work, table[(table["batch"] == "d2") & ~table["is_control"]], tmp_path / "copy.h5ad")
    config = EVALUATE.model_copy(update={"metrics": ("expression", "de", "distribution")})
    chosen = config.model_copy(update={"genes": str(listed)})
    outs = [
        evaluate(predictions, tmp_path / "store", tmp_path / "small", config),
        evaluate(predictions, work / "store", tmp_path / "chosen", chosen),
    ]
    small, some = (pd.read_parquet(out / "metrics.parquet") for out in outs)
    assert json.loads((outs[1] / "summary.json").read_text())["num_genes"] == len(genes[::-2])
    pd.testing.assert_frame_equal(small.assign(dataset=""), some.assign(dataset=""))
    listed.write_text("\n".join([*genes[:3], "none of these"]) + "\n")
    with pytest.raises(UserError, match=r"1 of its 4 genes are not in .*: none of these"):
        evaluate(predictions, work / "store", tmp_path / "refused", chosen)


def test_replicates_of_a_store_are_sums_of_its_counts(work, tmp_path):
    store = Store(work / "store")
    wanted = store.conditions[(store.conditions["batch"] == "d2") & ~store.conditions["is_control"]]
    predictions = copied(work, wanted, tmp_path / "copy.h5ad")
    truth = open_truth(work / "store", EVALUATE)
    pairs = pair(open_predictions(predictions, EVALUATE), truth, EVALUATE)
    replicates = Replicates.read(pairs, "batch")
    assert replicates.has_counts
    for row in wanted.itertuples():
        found = replicates.of_condition(Condition(row.perturbation, row.cell_type, row.batch))
        counts = store.counts(slice(row.start, row.stop)).toarray()
        np.testing.assert_array_equal(found[row.batch], np.append(counts.sum(axis=0), len(counts)))
    assert {name for sums in replicates.of_controls().values() for name in sums} == {"d2"}
    with pytest.raises(UserError, match="'well'"):
        Replicates.read(pairs, "well")


def test_a_column_that_the_predictions_lack_is_named_although_a_store_has_its_own(work, tmp_path):
    table = Store(work / "store").conditions
    predictions = copied(work, table[~table["is_control"]], tmp_path / "copy.h5ad")
    with pytest.raises(UserError, match="no obs column 'guide'.*perturbation"):
        evaluate(predictions, work / "store", tmp_path / "out", EvaluateConfig(perturbation_key="guide"))
    assert not (tmp_path / "out").exists()


def test_the_ceiling_scores_disjoint_halves_of_the_test_cells(work, tmp_path):
    out = ceiling(
        work / "store", tmp_path / "out", EVALUATE, split=work / "split.parquet", dataset="tiny", seed=3
    )
    summary = json.loads((out / "summary.json").read_text())
    split = pd.read_parquet(work / "split.parquet")
    assert summary["kind"] == summary["method"] == "ceiling"
    assert summary["num_conditions"] == (split["part"] == "test").sum()
    assert (
        summary["num_cells_real"] + summary["num_cells_predicted"]
        == split.query("part == 'test'")["n_cells"].sum()
    )
    assert 0 < summary["headline"]["pooled"]["R2"] < 1
    other = ceiling(work / "store", tmp_path / "other", EVALUATE, split=work / "split.parquet", seed=4)
    assert json.loads((other / "summary.json").read_text())["headline"] != summary["headline"]


def test_the_ceiling_is_the_mean_over_splits_with_its_sd(work, tmp_path):
    config = EVALUATE.model_copy(
        update={"metrics": ("MSE", "wasserstein"), "ceiling_splits": 3, "bootstrap": 0, "embed_conditions": 0}
    )
    truth = open_truth(work / "store", config)
    by_hand = {"MSE": [], "wasserstein": []}
    for seed in split_seeds(7, 3):
        scored = score_cells(pair_reference(truth, truth.rows, "perturbed_mean", seed=seed), config, seed=7)
        by_hand["MSE"].append(score(scored.comparisons["pooled", "pooled"], ["MSE"])["MSE"].mean())
        by_hand["wasserstein"].append(scored.conditions.query("own")["wasserstein"].mean())
    out = ceiling(work / "store", tmp_path / "out", config, reference="perturbed_mean", seed=7)
    means = pd.read_csv(out / "aggregate.csv").query("scope_kind == 'pooled'").set_index("metric")
    for metric, values in by_hand.items():
        assert means.loc[metric, "nanmean"] == pytest.approx(np.mean(values))
        assert means.loc[metric, "split_sd"] == pytest.approx(np.std(values, ddof=1))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["kind"], summary["method"], summary["splits"]) == ("reference", "perturbed_mean", 3)
    assert not [c for c in pd.read_parquet(out / "metrics.parquet") if c.startswith("split")]
    run = read_runs([out])[0]
    assert (run.kind, run.is_reference) == ("ceiling", True)
    assert run.split_sd("MSE") == pytest.approx(np.std(by_hand["MSE"], ddof=1))


def test_values_that_some_splits_lack_leave_mean_and_splits_consistent():
    tables = [
        pd.DataFrame({"value": [1.0, np.nan, np.nan], "status": ["ok", "undefined", "absent"]}),
        pd.DataFrame({"value": [3.0, 8.0, np.nan], "status": ["ok", "ok", "absent"]}),
    ]
    plain, splits = taken_apart(joined(tables, ["value"], keep=["value"]))
    assert plain["status"].tolist() == ["ok", "ok", "absent"]
    np.testing.assert_array_equal(plain["value"], [2.0, 8.0, np.nan])
    np.testing.assert_array_equal([split["value"].mean() for split in splits], [4.5, 5.5])
    assert np.mean([4.5, 5.5]) == plain["value"].mean()


def test_a_part_without_conditions_is_named(work, tmp_path):
    with pytest.raises(UserError, match="'unused'"):
        ceiling(work / "store", tmp_path / "out", EVALUATE, split=work / "split.parquet", part="unused")


def test_other_columns_of_the_cells_may_be_contexts_or_are_named(work, tmp_path):
    table = Store(work / "store").conditions
    predictions = copied(work, table[~table["is_control"]].iloc[:2], tmp_path / "copy.zarr.h5ad")
    with pytest.raises(UserError, match="no obs column 'donor'"):
        evaluate(predictions, work / "store", tmp_path / "out", EvaluateConfig(context_column="donor"))


def test_a_condition_without_cells_in_the_store_is_named(work, tmp_path):
    table = Store(work / "store").conditions
    path = copied(work, table[~table["is_control"]].iloc[:2], tmp_path / "copy.h5ad")
    adata = ad.read_h5ad(path)
    adata.obs["batch"] = adata.obs["batch"].cat.rename_categories(lambda b: "d7")
    adata.write_h5ad(path)
    with pytest.raises(UserError, match="d7"):
        evaluate(path, work / "store", tmp_path / "out", EVALUATE)


def test_the_strongest_conditions_are_shown_each_perturbation_once():
    conditions = pd.DataFrame(
        {
            "cell_type": list("aabb"),
            "batch": "x",
            "perturbation": ["p", "q", "p", "q"],
            "n_cells": [50, 50, 50, 10],
            "effect": [3.0, 1.0, 2.0, np.nan],
        }
    )
    assert choose(conditions, 2) == [("p", "a", "x"), ("q", "a", "x")]
    assert choose(conditions, 9)[2] == ("p", "b", "x")
    assert choose(conditions, 0) == []
