"""`evaluate` and `ceiling` from file to file: what is written, and what a user is told."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.io import row_file
from perturbdiff.runtime.errors import UserError

GENES = [f"g{i}" for i in range(30)]
CONFIG = EvaluateConfig(embed_conditions=3, embed_cells=10)


def cells(rng, shift, n=15):
    return np.log1p(rng.poisson(1.0 + shift, (n, len(GENES)))).astype(np.float32)


def make(seed=0, *, skill=1.0, perturbations=("p1", "p2", "p3"), declared=None) -> ad.AnnData:
    """2 cell types × 2 batches; controls are the same for every seed, perturbed cells are drawn anew."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(99)
    blocks, obs = [], []
    for t in ("B", "T"):
        for b in ("d1", "d2"):
            blocks.append(cells(fixed, 0.0))
            obs += [(t, b, "control", "control")] * 15
            for k, p in enumerate(perturbations):
                shift = np.zeros(len(GENES))
                shift[4 * k : 4 * k + 4] = 4.0 * skill * (1 + k)
                blocks.append(cells(rng, shift, 12))
                obs += [(t, b, p, "predicted")] * 12
    frame = pd.DataFrame(obs, columns=["cell_type", "batch", "perturbation", "source"]).astype("category")
    frame.index = [f"c{i}" for i in range(len(frame))]
    adata = ad.AnnData(sp.csr_matrix(np.vstack(blocks)), frame, pd.DataFrame(index=GENES))
    declared = {"scale": "log1p", "control": "control", "target_sum": 1e4, "method": "ours"} | (
        declared or {}
    )
    adata.uns["perturbdiff"] = {k: v for k, v in declared.items() if v is not None}
    return adata


def save(adata, path):
    adata.write_zarr(path) if path.suffix == ".zarr" else adata.write_h5ad(path)
    return path


@pytest.fixture
def files(tmp_path):
    return save(make(1), tmp_path / "pred.h5ad"), save(make(0), tmp_path / "real.h5ad")


def test_what_is_written(files, tmp_path):
    out = evaluate(*files, tmp_path / "out", CONFIG)
    metrics = pd.read_parquet(out / "metrics.parquet")
    assert {"method", "dataset", "scope", "perturbation", "metric", "value", "n_cells", "definition"} <= set(
        metrics
    )
    assert set(metrics["scope"]) == {"pooled", "B", "T", "B|d1", "B|d2", "T|d1", "T|d2"}
    assert (metrics["method"] == "ours").all()
    assert (metrics["dataset"] == "real").all()
    pooled = metrics[metrics["scope"] == "pooled"].set_index(["metric", "perturbation"])
    assert pooled.loc[("MSE", "p1"), "n_cells"] == 48
    assert pooled.loc[("PDCorr", "p3"), "value"] > 0.8
    means = pd.read_csv(out / "aggregate.csv")
    by_hand = metrics.query("scope == 'T' and metric == 'MAE'")["value"].mean()
    assert means.query("scope == 'T' and metric == 'MAE'")["mean"].item() == pytest.approx(by_hand)
    spread = metrics.query("metric == 'energy_distance'")["value"]
    assert means.query("scope == 'pooled' and metric == 'energy_distance'")["n"].item() == len(spread) == 12
    for side in ("de_real", "de_pred"):
        table = pd.read_parquet(out / f"{side}.parquet")
        assert len(table) == 3 * 3 * len(GENES)
        assert {"scope", "perturbation", "gene", "p", "q", "log2fc", "mean"} <= set(table)
    points = pd.read_parquet(out / "embedding.parquet")
    assert set(points["source"]) == {"real", "predicted", "control"}
    assert points.groupby(["condition", "source"]).size().eq(10).all()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_conditions"] == 12
    assert summary["control_groups_replaced"] == 0


def test_the_summary_tells_how_the_predictions_were_made(tmp_path):
    said = {"baseline": "cpa", "baseline_kind": "tool", "version": "0.8.8", "seed": 3, "unknown": "left out"}
    given = save(make(1, declared=said), tmp_path / "pred.h5ad"), save(make(0), tmp_path / "real.h5ad")
    config = CONFIG.model_copy(update={"embed_conditions": 0})
    summary = json.loads((evaluate(*given, tmp_path / "out", config) / "summary.json").read_text())
    assert summary["made_by"] == {k: v for k, v in said.items() if k != "unknown"}
    assert summary["method"] == "ours"


def test_a_second_run_has_nothing_to_do_and_a_forced_one_writes_the_same(files, tmp_path):
    out = evaluate(*files, tmp_path / "out", CONFIG)
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.name != "run.json"}
    stamp = (out / "summary.json").stat().st_mtime_ns
    evaluate(*files, out, CONFIG)
    assert (out / "summary.json").stat().st_mtime_ns == stamp
    evaluate(*files, out, CONFIG, force=True)
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.name != "run.json"} == before


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_format_density_row_and_gene_order_do_not_matter(files, tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(row_file, "HELD_VALUES", 0)  # read from disk in runs of rows
    rng = np.random.default_rng(5)
    shuffled = make(1)[rng.permutation(len(make(1)))][:, rng.permutation(len(GENES))].copy()
    if suffix == ".zarr":
        shuffled.X = shuffled.X.toarray()
    other = save(shuffled, tmp_path / f"shuffled{suffix}")
    config = CONFIG.model_copy(update={"embed_conditions": 0})
    tables = [
        pd.read_csv(evaluate(p, files[1], tmp_path / f"o{i}", config) / "aggregate.csv")
        for i, p in enumerate((files[0], other))
    ]
    pd.testing.assert_frame_equal(*tables, rtol=1e-4)


def test_real_controls_are_used_whatever_the_predictions_carry(files, tmp_path, caplog):
    cheat = make(1)
    cheat.X = cheat.X.multiply(1 + (cheat.obs["source"] == "control").to_numpy()[:, None]).tocsr()
    bare = make(1)
    bare = bare[bare.obs["source"] != "control"].copy()
    paths = [files[0], save(cheat, tmp_path / "cheat.h5ad"), save(bare, tmp_path / "bare.h5ad")]
    tables = []
    for i, path in enumerate(paths):
        out = evaluate(path, files[1], tmp_path / f"o{i}", CONFIG)
        tables.append(pd.read_csv(out / "aggregate.csv"))
    pd.testing.assert_frame_equal(tables[0], tables[1])
    pd.testing.assert_frame_equal(tables[0], tables[2])
    assert json.loads((tmp_path / "o1" / "summary.json").read_text())["control_groups_replaced"] == 4
    assert "real controls are used" in caplog.text


def test_one_perturbation_has_no_discrimination_and_no_effect_size(tmp_path):
    paths = [save(make(s, perturbations=("p1",)), tmp_path / f"{s}.h5ad") for s in (1, 0)]
    out = evaluate(*paths, tmp_path / "out", CONFIG)
    metrics = pd.read_parquet(out / "metrics.parquet")
    withheld = metrics[metrics["metric"].isin(["PDS_L1", "PDS_L2", "PDS_cos", "ES"])]
    assert withheld["value"].isna().all()
    assert (withheld["status"] == "n/a").all()
    means = pd.read_csv(out / "aggregate.csv").set_index(["scope", "metric"])
    assert means.loc[("pooled", "PDS_L1"), "n_defined"] == 0


def test_contexts_may_be_batches(files, tmp_path):
    out = evaluate(*files, tmp_path / "out", CONFIG.model_copy(update={"context_column": "batch"}))
    metrics = pd.read_parquet(out / "metrics.parquet")
    assert set(metrics.query("scope_kind == 'context'")["scope"]) == {"d1", "d2"}


def change(adata, **parts):
    for name, value in parts.items():
        setattr(adata, name, value)
    return adata


def negative(adata):
    adata.X.data[3] = -0.5
    return adata


def unlabelled(adata):
    adata.obs.loc[adata.obs_names[0], "batch"] = np.nan
    return adata


BAD = {
    "scale": (lambda: make(1, declared={"scale": "counts"}), "not whole numbers.*cell 'c.*gene 'g"),
    "other scale": (lambda: make(1, declared={"scale": "z-score"}), "z-score"),
    "undeclared": (lambda: make(1, declared={"scale": None}), "--scale"),
    "no control": (lambda: make(1, declared={"control": None}), "--control"),
    "other control": (lambda: make(1, declared={"control": "ctrl"}), "ctrl"),
    "depth": (lambda: make(1, declared={"target_sum": 1e6}), "1e\\+06"),
    "genes": (lambda: make(1)[:, 2:].copy(), "g0, g1"),
    "conditions": (lambda: make(1, perturbations=("p1", "p9")), "B.d1.p9"),
    "negative": (lambda: negative(make(1)), "negative"),
    "nan": (lambda: change(make(1), X=make(1).X * np.nan), "not finite"),
    "labels": (lambda: unlabelled(make(1)), "batch"),
    "only controls": (lambda: make(1, perturbations=()), "no predicted cell"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_and_leaves_nothing(files, tmp_path, case):
    build, message = BAD[case]
    with pytest.raises(UserError, match=message):
        evaluate(save(build(), tmp_path / "bad.h5ad"), files[1], tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_mistakes_in_the_truth_are_named(files, tmp_path):
    with pytest.raises(UserError, match="no obs column 'donor'"):
        evaluate(*files, tmp_path / "out", CONFIG.model_copy(update={"context_column": "donor"}))
    with pytest.raises(UserError, match="no obs column 'cell_typ'.*did you mean 'cell_type'"):
        evaluate(*files, tmp_path / "out", CONFIG.model_copy(update={"cell_type_key": "cell_typ"}))
    with pytest.raises(UserError, match="not found"):
        evaluate(files[0], tmp_path / "none.h5ad", tmp_path / "out", CONFIG)
    (tmp_path / "text.h5ad").write_text("no")
    with pytest.raises(UserError, match="text.h5ad"):
        evaluate(tmp_path / "text.h5ad", files[1], tmp_path / "out", CONFIG)


def test_a_word_for_undeclared_values_is_enough(tmp_path):
    paths = []
    for seed in (1, 0):
        adata = make(seed)
        del adata.uns["perturbdiff"]
        paths.append(save(adata, tmp_path / f"{seed}.h5ad"))
    config = CONFIG.model_copy(update={"scale": "log1p", "control": "control"})
    assert (evaluate(*paths, tmp_path / "out", config) / "summary.json").is_file()


def test_a_context_must_be_constant_within_conditions(files, tmp_path):
    adata = make(0)
    adata.obs["lane"] = np.arange(len(adata)) % 2
    truth = save(adata, tmp_path / "lanes.h5ad")
    with pytest.raises(UserError, match="several contexts"):
        evaluate(files[0], truth, tmp_path / "out", CONFIG.model_copy(update={"context_column": "lane"}))
