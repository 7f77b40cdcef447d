"""CPA for real, where it is installed: it trains on a small store and predicts the held-out batch."""

from __future__ import annotations

import json
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from small_store import SmallStore, small_store
from tiny_data import tiny_counts

from perturbdiff.baselines.external import known_tools, tool_environments

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(
        tool_environments.installed(known_tools.load("cpa")) is None,
        reason="perturbdiff baseline install cpa",
    ),
]
SHORT = ["baseline.settings=quick", "baseline.options.epochs=4", "baseline.options.check_val_every_n_epoch=2"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SmallStore:
    """The tiny data set; one label has the sign that CPA reads as a combination of two."""
    adata = tiny_counts()
    adata.obs["perturbation"] = adata.obs["perturbation"].cat.rename_categories({"p2": "p2 +x_µ"})
    return small_store(tmp_path_factory.mktemp("cpa"), adata=adata)


def predict(run_cli, small: SmallStore, out: Path, *options: str, seed: int = 0) -> ad.AnnData:
    sets = [word for option in (*SHORT, *options) for word in ("--set", option)]
    split = ["--split", small.split, "--out", out, "--seed", seed, "--threads", 1, "--device", "cpu"]
    outcome = run_cli("baseline", "cpa", small.store, *split, *sets)
    assert outcome.code == 0, outcome.err
    return ad.read_h5ad(out)


def test_predicts_cells_that_differ_and_repeats_itself(run_cli, small, tmp_path):
    first = predict(run_cli, small, tmp_path / "first.h5ad")
    again = predict(run_cli, small, tmp_path / "again.h5ad")
    other = predict(run_cli, small, tmp_path / "other.h5ad", seed=1)
    values = [found[found.obs["source"] == "predicted"].to_df().to_numpy() for found in (first, again, other)]
    assert np.isfinite(values[0]).all()
    assert (values[0] >= 0).all()
    assert values[0].std(axis=0).max() > 0
    np.testing.assert_array_equal(values[0], values[1])
    assert not np.array_equal(values[0], values[2])
    assert "p2 +x_µ" in set(first.obs["perturbation"])
    facts = json.loads((tmp_path / "first.h5ad.run.json").read_text())["method_run"]
    assert facts["epochs"] == 4
    assert facts["stopped_early"] is False
    assert np.isfinite([facts["loss_train"], facts["loss_valid"]]).all()


@pytest.mark.parametrize("loss", ["gauss", "zinb"])
def test_the_other_likelihoods(run_cli, small, tmp_path, loss):
    predict(run_cli, small, tmp_path / "out.h5ad", f"baseline.options.recon_loss={loss}")
