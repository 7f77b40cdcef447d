"""One run, several threads, several parts: the same tables; and parts that do not belong together."""

from __future__ import annotations

import shutil
import subprocess
import sys

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.ceiling_stage import ceiling
from perturbdiff.evaluation.evaluation_stage import evaluate, merge
from perturbdiff.evaluation.metrics.catalogue import chosen
from perturbdiff.evaluation.metrics.differential import Controls
from perturbdiff.evaluation.scoring import condition_pass, scopes
from perturbdiff.runtime.errors import UserError

GENES = [f"g{i}" for i in range(24)]
CONFIG = EvaluateConfig(embed_conditions=2, embed_cells=8, max_cells=10, bootstrap=100)


def screen(seed, *, types=("B", "NK", "T"), perturbations=("p1", "p2", "p3", "p4"), method="ours"):
    """Cells of some types in two batches; not every type has every perturbation."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(99)
    blocks, obs = [], []
    for i, t in enumerate(types):
        for b in ("d1", "d2"):
            blocks.append(np.log1p(fixed.poisson(1.0, (20, len(GENES)))))
            obs += [(t, b, "control")] * 20
            for k, p in enumerate(perturbations[i:]):
                rate = np.ones(len(GENES))
                rate[3 * k : 3 * k + 6] += 1.0 + k
                n = 6 + 3 * i + k
                blocks.append(np.log1p(rng.poisson(rate, (n, len(GENES)))))
                obs += [(t, b, p)] * n
    frame = pd.DataFrame(obs, columns=["cell_type", "batch", "perturbation"]).astype("category")
    frame.index = [f"c{i}" for i in range(len(frame))]
    adata = ad.AnnData(sp.csr_matrix(np.vstack(blocks), dtype=np.float32), frame, pd.DataFrame(index=GENES))
    adata.uns["perturbdiff"] = {"scale": "log1p", "control": "control", "target_sum": 1e4, "method": method}
    return adata


def written(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "run.json"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, seed in (("pred", 1), ("real", 0)):
        screen(seed).write_h5ad(folder / f"{name}.h5ad")
    return folder / "pred.h5ad", folder / "real.h5ad"


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    return evaluate(*files, tmp_path_factory.mktemp("one") / "out", CONFIG, threads=1)


@pytest.fixture(scope="module")
def parts(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return [evaluate(*files, folder / f"part{i}", CONFIG, shard=(i, 3)) for i in range(3)]


def test_threads_do_not_matter(files, one, tmp_path):
    assert written(evaluate(*files, tmp_path / "out", CONFIG, threads=3)) == written(one)


def test_where_intermediate_results_wait_does_not_matter(files, one, tmp_path, monkeypatch):
    monkeypatch.setattr(scopes, "HELD_BYTES", 0)
    monkeypatch.setattr(condition_pass, "HELD_BYTES", 0)
    monkeypatch.setattr(condition_pass, "KEPT_VALUES", 0)
    assert written(evaluate(*files, tmp_path / "out", CONFIG, threads=2)) == written(one)


def test_merged_parts_are_one_run(one, parts, tmp_path):
    out = merge(parts[::-1], tmp_path / "out")
    assert written(out) == written(one)
    stamp = (out / "summary.json").stat().st_mtime_ns
    merge(parts, out)
    assert (out / "summary.json").stat().st_mtime_ns == stamp, "an equal merge has nothing to do"


def test_more_parts_than_scopes_and_parts_of_a_ceiling(files, tmp_path):
    made = [ceiling(files[1], tmp_path / f"c{i}", CONFIG, shard=(i, 6), seed=3) for i in range(6)]
    whole = ceiling(files[1], tmp_path / "whole", CONFIG, seed=3)
    assert written(merge(made, tmp_path / "out")) == written(whole)


@pytest.mark.parametrize(
    "case", ["missing", "twice", "whole", "other data", "other settings", "other number", "none"]
)
def test_parts_that_do_not_belong_together(files, one, parts, tmp_path, case):
    def other(config=CONFIG, count=3, seed=0, predictions=files[0]):
        return evaluate(predictions, files[1], tmp_path / "other", config, shard=(1, count), seed=seed)

    if case == "other data":
        screen(5).write_h5ad(tmp_path / "pred.h5ad")
    build, message = {
        "missing": (lambda: parts[:2], "2/3 are not given|2/3"),
        "twice": (lambda: [*parts, shutil.copytree(parts[1], tmp_path / "copy")], "part 1/3, as .*part1 is"),
        "whole": (lambda: [parts[0], one], "not a part"),
        "other data": (
            lambda: [parts[0], other(predictions=tmp_path / "pred.h5ad"), parts[2]],
            "inputs differ in predictions",
        ),
        "other settings": (
            lambda: [parts[0], other(CONFIG.model_copy(update={"alpha": 0.1})), parts[2]],
            "config differ in alpha",
        ),
        "other number": (lambda: [parts[0], other(count=4), parts[2]], "one of 4 parts, not of 3"),
        "none": (list, "no part"),
    }[case]
    with pytest.raises(UserError, match=message):
        merge(build(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "names",
    [
        ("distribution",),
        ("energy_distance",),
        ("expression",),
        ("wasserstein", "MAE"),
        ("de", "further"),
        ("ES",),
    ],
)
def test_metrics_alone_equal_those_of_the_full_run(files, one, tmp_path, names, monkeypatch):
    tests = []
    real = Controls.test_columns
    monkeypatch.setattr(Controls, "test_columns", lambda *a, **k: tests.append(1) or real(*a, **k))
    out = evaluate(*files, tmp_path / "out", CONFIG.model_copy(update={"metrics": names}), threads=1)
    for table, keys in (
        ("metrics.csv", ["scope_kind", "scope", "perturbation", "metric"]),
        ("aggregate.csv", ["scope_kind", "scope", "metric"]),
    ):
        alone, full = (pd.read_csv(f / table).set_index(keys) for f in (out, one))
        assert len(alone)
        rounded = [name for name in ("low", "high") if name in alone and table == "aggregate.csv"]
        full = full.loc[alone.index]
        pd.testing.assert_frame_equal(
            alone.drop(columns=rounded), full.drop(columns=rounded), check_exact=True
        )
        # a matrix product's last digit depends on the number of its columns
        pd.testing.assert_frame_equal(alone[rounded], full[rounded], rtol=1e-12, atol=0)
    assert set(alone.index.get_level_values("metric")) == set(chosen(names))
    assert bool(tests) == (names[0] in ("de", "ES")) == (out / "de_real.parquet").exists()


def test_one_context_is_the_pool_and_tested_once(tmp_path, monkeypatch):
    for name, seed in (("pred", 1), ("real", 0)):
        screen(seed, types=("B",)).write_h5ad(tmp_path / f"{name}.h5ad")
    tests = []
    real = Controls.test_columns
    monkeypatch.setattr(Controls, "test_columns", lambda *a, **k: tests.append(1) or real(*a, **k))
    paths = tmp_path / "pred.h5ad", tmp_path / "real.h5ad"
    out = evaluate(*paths, tmp_path / "out", CONFIG, threads=1)
    assert len(tests) == 2 * 4
    metrics = pd.read_parquet(out / "metrics.parquet")
    pool, context = (
        metrics[metrics["scope"] == s].drop(columns=["scope", "scope_kind"]).reset_index(drop=True)
        for s in ("pooled", "B")
    )
    pd.testing.assert_frame_equal(pool, context)
    tables = pd.read_parquet(out / "de_pred.parquet")
    assert tables["scope"].value_counts().to_dict() == {"pooled": 4 * 24, "B": 4 * 24}


def test_own_controls_serve_the_predicted_side_alone(files, one, tmp_path):
    config = CONFIG.model_copy(update={"controls": "own"})
    same = pd.read_csv(evaluate(*files, tmp_path / "same", config) / "aggregate.csv")
    pd.testing.assert_frame_equal(same, pd.read_csv(one / "aggregate.csv"))
    other = screen(1)
    control = (other.obs["perturbation"] == "control").to_numpy()
    other.X = sp.csr_matrix(other.X.multiply(np.where(control, 0.5, 1.0)[:, None]), dtype=np.float32)
    other.write_h5ad(tmp_path / "other.h5ad")
    out = evaluate(tmp_path / "other.h5ad", files[1], tmp_path / "out", config)
    real, predicted = (pd.read_parquet(out / f"de_{side}.parquet") for side in ("real", "pred"))
    pd.testing.assert_frame_equal(real, pd.read_parquet(one / "de_real.parquet"))
    np.testing.assert_allclose(predicted["control_mean"], 0.5 * real["control_mean"], rtol=1e-5)
    pd.testing.assert_series_equal(predicted["mean"], pd.read_parquet(one / "de_pred.parquet")["mean"])


def test_conditions_without_a_context_are_in_the_pool_only(tmp_path):
    for name, seed in (("pred", 1), ("real", 0)):
        adata = screen(seed)
        adata.obs = adata.obs.drop(columns="cell_type")
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
    paths = tmp_path / "pred.h5ad", tmp_path / "real.h5ad"
    whole = evaluate(*paths, tmp_path / "whole", CONFIG)
    assert set(pd.read_parquet(whole / "metrics.parquet")["scope_kind"]) == {"pooled", "condition"}
    made = [evaluate(*paths, tmp_path / f"part{i}", CONFIG, shard=(i, 2)) for i in range(2)]
    assert written(merge(made, tmp_path / "out")) == written(whole)


@pytest.mark.parametrize("where", ["score_tables.write_folder", "scoring.condition_pass._joined"])
def test_a_killed_run_leaves_no_results_and_the_next_one_is_whole(files, one, tmp_path, where):
    module, _, name = where.rpartition(".")
    program = f"""
import os, signal
from pathlib import Path
import perturbdiff.evaluation.{module}
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.evaluation_stage import evaluate
perturbdiff.evaluation.{module}.{name} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
config = EvaluateConfig.model_validate_json('''{CONFIG.model_dump_json()}''')
evaluate(Path({str(files[0])!r}), Path({str(files[1])!r}), Path({str(tmp_path / "out")!r}), config)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "out").exists()
    out = evaluate(*files, tmp_path / "out", CONFIG)
    assert written(out) == written(one)
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "what the killed run left is gone"
