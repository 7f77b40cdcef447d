"""Cells without a label: refused, or dropped and counted, by preprocess alone."""

import json

import numpy as np
import pytest
from tiny_data import TINY, tiny_counts

from perturbdiff.store.store import Store


@pytest.fixture
def unlabelled(tmp_path):
    adata = tiny_counts()
    adata.obs = adata.obs.astype(str)
    adata.obs.loc[adata.obs_names[:7], "perturbation"] = np.nan
    adata.write_h5ad(tmp_path / "counts.h5ad")
    return adata


def test_preprocess_alone_refuses_them_and_names_the_setting(run_cli, tmp_path, unlabelled):
    done = run_cli("preprocess", tmp_path / "counts.h5ad", "--out", tmp_path / "store", *TINY)
    assert done.code == 2
    assert "7 missing values" in done.err
    assert "data.missing_labels=drop" in done.err


def test_dropped_cells_are_counted_and_the_others_kept(run_cli, tmp_path, unlabelled):
    drop = ("--set", "data.missing_labels=drop")
    done = run_cli("preprocess", tmp_path / "counts.h5ad", "--out", tmp_path / "store", *TINY, *drop)
    assert done.code == 0, done.err
    store = Store(tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["results"]["store"]["without_label"] == 7
    assert store.n_cells == unlabelled.n_obs - 7
    kept = unlabelled[7:]
    assert set(store.obs(["source_row"])["source_row"]) == set(range(7, unlabelled.n_obs))
    counts = kept.obs.groupby(["cell_type", "batch", "perturbation"], observed=True).size()
    found = store.conditions.set_index(["cell_type", "batch", "perturbation"])["n_cells"]
    assert found.sort_index().to_dict() == counts.sort_index().to_dict()
