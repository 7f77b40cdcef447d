"""Tables of a store against the same numbers counted in memory."""

import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from perturbdiff.config import DataConfig
from perturbdiff.data.preprocess import preprocess
from perturbdiff.data.statistics import write_statistics
from perturbdiff.data.store import Store
from perturbdiff.errors import UserError

KEYS = ["cell_type", "batch", "perturbation"]


@pytest.fixture
def store(counts_file, tmp_path):
    return preprocess([counts_file], tmp_path / "store", DataConfig(num_hvgs=30))


def test_counts_and_composition(counts_file, store, tmp_path):
    out = write_statistics(store, tmp_path / "stats")
    obs = ad.read_h5ad(counts_file).obs.astype(str)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["n_cells"], summary["n_genes"], summary["n_conditions"]) == (len(obs), 30, 16)
    assert (summary["n_perturbations"], summary["n_cell_types"], summary["n_batches"]) == (3, 2, 2)
    assert summary["n_control_cells"] == (obs["perturbation"] == "control").sum()
    conditions = pd.read_csv(out / "conditions.csv").set_index(KEYS)["n_cells"]
    pd.testing.assert_series_equal(
        conditions.sort_index(), obs.groupby(KEYS).size().sort_index(), check_names=False
    )
    perturbations = pd.read_csv(out / "perturbations.csv").set_index("perturbation")
    assert perturbations["n_cells"].to_dict() == obs["perturbation"].value_counts().to_dict()
    composition = pd.read_csv(out / "composition.csv").set_index(["cell_type", "batch"])
    assert composition["n_cells"].to_dict() == obs.groupby(["cell_type", "batch"]).size().to_dict()
    assert composition["share"].sum() == pytest.approx(1)
    for name, key in (("cell_types", "cell_type"), ("batches", "batch")):
        table = pd.read_csv(out / f"{name}.csv").set_index(key)
        assert table["n_cells"].to_dict() == obs[key].value_counts().to_dict()
        assert (table["n_perturbations"] == 3).all()


def test_expression_tables(store, tmp_path):
    out = write_statistics(store, tmp_path / "stats")
    x = Store(store).expression(slice(None)).toarray().astype(np.float64)
    genes = pd.read_csv(out / "genes.csv")
    np.testing.assert_allclose(genes["mean"], x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(genes["variance"], x.var(axis=0), rtol=1e-4)
    np.testing.assert_allclose(genes["maximum"], x.max(axis=0), rtol=1e-5)
    np.testing.assert_allclose(genes["share_of_cells"], (x > 0).mean(axis=0))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sparsity"] == pytest.approx((x == 0).mean())
    assert summary["genes_per_cell"]["median"] == np.median((x > 0).sum(axis=1))
    assert summary["depth"]["median"] == summary["target_sum"]
    for name in ("genes_per_cell", "depth"):
        table = pd.read_csv(out / f"{name}.csv")
        assert table["n_cells"].sum() == len(x)
        assert (table["lower"] < table["upper"]).all()


def test_split_counts(store, tmp_path):
    split = Store(store).conditions[[*KEYS, "n_cells"]].copy()
    split["part"] = np.where(split["perturbation"] == "p1", "test", "train")
    split.to_parquet(tmp_path / "split.parquet")
    out = write_statistics(store, tmp_path / "stats", split=tmp_path / "split.parquet")
    table = pd.read_csv(out / "split.csv").set_index("split")
    assert table["n_conditions"].to_dict() == {"test": 4, "train": 12}
    assert table["n_cells"].to_dict() == split.groupby("part")["n_cells"].sum().to_dict()
    assert set(pd.read_csv(out / "conditions.csv")["split"]) == {"train", "test"}
    split.iloc[1:].to_parquet(tmp_path / "other.parquet")
    with pytest.raises(UserError):
        write_statistics(store, tmp_path / "again", split=tmp_path / "other.parquet")
    assert not (tmp_path / "again").exists()
