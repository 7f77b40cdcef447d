"""Squidiff, trained for a few steps by `perturbdiff baseline squidiff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
from small_store import SmallStore, small_store

from perturbdiff.baselines.external import known_tools, tool_environments

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(
        tool_environments.installed(known_tools.load("squidiff")) is None,
        reason="not installed: perturbdiff baseline install squidiff",
    ),
]
FEW = {"width": 64, "steps": 300, "batch_size": 32, "sample_steps": 10}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    return small_store(tmp_path_factory.mktemp("small"))


def run(run_cli: Any, made: SmallStore, out: Path, seed: int = 0, **options: Any) -> Any:
    """Return how the command ended."""
    sets = [f"baseline.options.{name}={value}" for name, value in {**FEW, **options}.items()]
    words = [word for one in ("baseline.settings=quick", *sets) for word in ("--set", one)]
    given = ["baseline", "squidiff", made.store, "--split", made.split, "--out", out, "--seed", seed]
    return run_cli(*given, "--threads", 1, "--device", "cpu", *words)


def values_of(path: Path) -> np.ndarray:
    """Return the predicted cells, float32 [n, G]."""
    found = anndata.read_h5ad(path)
    return found[(found.obs["source"] == "predicted").to_numpy()].to_df().to_numpy()


def facts_of(path: Path) -> dict[str, Any]:
    """Return what the adapter noted of its run."""
    return json.loads(path.with_name(f"{path.name}.run.json").read_text())["method_run"]


def test_same_seed_same_cells(run_cli: Any, made: SmallStore, tmp_path: Path) -> None:
    outs = [tmp_path / f"{name}.h5ad" for name in ("first", "again", "other")]
    for out, seed in zip(outs, (0, 0, 1), strict=True):
        ended = run(run_cli, made, out, seed)
        assert ended.code == 0, ended.err
    first, again, other = (values_of(out) for out in outs)
    assert np.isfinite(first).all()
    assert first.min() >= 0
    assert first.std(axis=0).max() > 0
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_loss_falls_and_training_cells_come_back(run_cli: Any, made: SmallStore, tmp_path: Path) -> None:
    out = tmp_path / "out.h5ad"
    ended = run(run_cli, made, out)
    assert ended.code == 0, ended.err
    facts = facts_of(out)
    assert facts["steps"] == FEW["steps"]
    assert facts["loss_of"] == "cell"
    assert facts["loss_last"] < facts["loss_first"]
    assert len(facts["loss_last_by_quarter"]) == 4
    assert facts["reconstruction_unexplained"] < 1


def test_a_network_that_predicts_noise_and_has_not_converged_is_refused(
    run_cli: Any, made: SmallStore, tmp_path: Path
) -> None:
    out = tmp_path / "out.h5ad"
    ended = run(run_cli, made, out, predict_xstart="false", steps=20)
    assert ended.code == 2
    assert not out.exists()
    assert "diverged" in ended.err


def test_the_authors_latent_arithmetic_runs(run_cli: Any, made: SmallStore, tmp_path: Path) -> None:
    out = tmp_path / "out.h5ad"
    ended = run(run_cli, made, out, latent_from="mean", latent_noise=0.7, steps=40)
    assert ended.code == 0, ended.err
