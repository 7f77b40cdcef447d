import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from small_store import small_store

from perturbdiff.baselines import NAMES, predict, simple
from perturbdiff.predictions import read_predictions
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store.pseudobulk import condition_means, group_means
from perturbdiff.store.store import Store

OVERRIDES = ["split.valid_fraction=0", "split.train_fraction=0.34"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("baselines"), OVERRIDES)


@pytest.fixture(scope="module")
def facts(small):
    """Dense values, the labels of every cell and whether it is training data."""
    store = small.opened
    split = parts(store.conditions, read_split(small.split))
    obs = store.obs(["cell_type", "batch", "perturbation", "cell"]).astype(str)
    obs["part"] = np.repeat(split, store.conditions["n_cells"])
    return obs, store.expression(slice(None)).toarray()


@pytest.fixture(scope="module")
def made_by(small, tmp_path_factory):
    """Predictions of a baseline, made once."""
    folder, known = tmp_path_factory.mktemp("predictions"), {}

    def get(name):
        if name not in known:
            known[name] = read_predictions(predict(name, small.store, small.split, folder / f"{name}.h5ad"))
        return known[name]

    return get


@pytest.fixture(scope="module")
def noisy(small, tmp_path_factory):
    """The store with the counts of all test cells overwritten by noise."""
    path = tmp_path_factory.mktemp("noisy") / "store"
    shutil.copytree(small.store, path)
    store, table = Store(path), read_split(small.split)
    test = store.conditions[parts(store.conditions, table) == "test"]
    group = zarr.open_group(path / "part-0000.zarr" / "X", mode="r+")
    indptr, data = group["indptr"][:], group["data"][:]
    rng = np.random.default_rng(0)
    for start, stop in zip(test["start"], test["stop"], strict=True):
        a, b = indptr[start], indptr[stop]
        data[a:b] = rng.integers(1, 1000, b - a)
    assert not np.array_equal(data, group["data"][:])
    group["data"][:] = data
    return path


def predicted(adata):
    return adata[adata.obs["source"] == "predicted"]


def test_baselines_are_documented_as_they_are():
    page = (Path(__file__).parents[3] / "docs" / "baselines.md").read_text()
    table = page.partition("## Methods of the package")[2].partition("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {one.cell} | {one.unseen} |" for name, one in simple.BASELINES.items()]


@pytest.mark.parametrize("name", NAMES)
def test_as_many_cells_as_in_truth_and_the_real_controls(facts, made_by, name):
    obs, values = facts
    adata = made_by(name)
    truth = obs[obs["part"] == "test"].groupby(["cell_type", "batch", "perturbation"]).size()
    made = predicted(adata).obs.groupby(["cell_type", "batch", "perturbation"], observed=True).size()
    assert made.to_dict() == truth.to_dict()
    controls = adata[adata.obs["source"] == "control"]
    expected = obs[(obs["perturbation"] == "control") & (obs["batch"] == "d2")]
    assert controls.obs["cell"].tolist() == expected["cell"].tolist()
    np.testing.assert_array_equal(controls.X.toarray(), values[expected.index])
    assert adata.X.min() >= 0
    assert adata.uns["perturbdiff"]["method"] == name


@pytest.mark.parametrize("name", NAMES)
def test_expression_of_held_out_cells_is_never_read(small, noisy, made_by, tmp_path, name):
    """With noise in the place of the test cells the predictions are the same to the bit."""
    new = read_predictions(predict(name, noisy, small.split, tmp_path / "after.h5ad"))
    np.testing.assert_array_equal(made_by(name).X.toarray(), new.X.toarray())


def test_unseen_group_gets_the_overall_mean(facts, tmp_path, caplog):
    other = small_store(
        tmp_path / "s", ["split.train_fraction=0", "split.valid_fraction=0", "split.perturbations=[p3]"]
    )
    table = read_split(other.split)
    table.loc[table["perturbation"] == "p3", "part"] = "test"
    mine = tmp_path / "mine.parquet"
    table.to_parquet(mine)
    obs, values = facts
    made = predicted(read_predictions(predict("mean-perturbation", other.store, mine, tmp_path / "p.h5ad")))
    expected = values[(obs["perturbation"] != "p3").to_numpy()].mean(axis=0)
    np.testing.assert_allclose(made.X[0].toarray()[0], expected, rtol=1e-5)
    assert "1 of the predicted perturbations are unseen in training (p3)" in caplog.text
    for name in ("linear", "nearest-context", "resample"):
        caplog.clear()
        predict(name, other.store, mine, tmp_path / f"{name}.h5ad")
        assert "unseen in training (p3)" in caplog.text


def test_control_and_resample_copy_the_right_cells(facts, made_by):
    obs, values = facts
    for name in ("control", "resample"):
        made = predicted(made_by(name))
        for i in range(made.n_obs):
            here = made.obs.iloc[i]
            if name == "control":
                use = (obs["perturbation"] == "control") & (obs["cell_type"] == here["cell_type"])
                use &= obs["batch"] == here["batch"]
            else:
                use = (obs["perturbation"] == here["perturbation"]) & (obs["part"] == "train")
            assert (values[use] == made.X[i].toarray()).all(axis=1).any()
        for rows in made.obs.groupby(["cell_type", "perturbation"], observed=True).indices.values():
            assert len(np.unique(made.X[rows].toarray(), axis=0)) == len(rows)


def test_predictions_depend_on_the_seed(small, made_by, tmp_path):
    predict("resample", small.store, small.split, tmp_path / "p.h5ad", seed=1)
    other = read_predictions(tmp_path / "p.h5ad")
    assert not np.array_equal(made_by("resample").X.toarray(), other.X.toarray())


def test_record_tells_what_learning_and_predicting_took(small, tmp_path):
    out = predict("linear", small.store, small.split, tmp_path / "p.h5ad", seed=2)
    spent = json.loads((tmp_path / "p.h5ad.run.json").read_text())["method_run"]
    for kind in ("seconds", "cpu_seconds"):
        assert set(spent[kind]) == {"train", "predict"}
        assert min(spent[kind].values()) >= 0
    facts = read_predictions(out).uns["perturbdiff"]
    assert (facts["baseline"], facts["baseline_kind"], facts["seed"]) == ("linear", "built-in", 2)
    assert facts["controls"] == "balanced"


def test_who_starts_from_no_control_cells_says_nothing_of_them(made_by):
    assert "controls" not in made_by("mean-overall").uns["perturbdiff"]


def test_zarr_output_and_skipping(small, tmp_path, caplog):
    out = tmp_path / "p.zarr"
    predict("control", small.store, small.split, out)
    assert read_predictions(out).n_obs > 0
    caplog.set_level("INFO", "perturbdiff")
    predict("control", small.store, small.split, out)
    assert "up to date" in caplog.text


def test_unknown_name(small, tmp_path):
    with pytest.raises(UserError, match="no baseline 'mean-cell-type', did you mean 'mean-celltype'"):
        predict("mean-cell-type", small.store, small.split, tmp_path / "x.h5ad")


def test_streamed_means_are_exact(small, facts):
    _obs, values = facts
    store = small.opened
    groups = np.array([-1, 0, 1, 0, *[-1] * (len(store.conditions) - 5), 1])
    means, cells = group_means(store, groups, 3)
    of_cell = np.repeat(groups, store.conditions["n_cells"])
    for g in (0, 1):
        np.testing.assert_allclose(means[g], values[of_cell == g].mean(axis=0, dtype=np.float64), rtol=1e-6)
        assert cells[g] == (of_cell == g).sum()
    assert cells[2] == 0
    wanted = [1, 2, 5, 9]
    found = dict(condition_means(store, np.array(wanted)))
    assert sorted(found) == wanted
    for c in wanted:
        rows = slice(store.conditions["start"][c], store.conditions["stop"][c])
        np.testing.assert_allclose(found[c], values[rows].mean(axis=0, dtype=np.float64), rtol=1e-6)


def test_condition_means_across_block_borders(small, monkeypatch):
    store = small.opened
    whole = dict(condition_means(store, np.arange(len(store.conditions))))
    monkeypatch.setattr("perturbdiff.store.pseudobulk.row_ranges.__defaults__", (7,))
    pieces = dict(condition_means(store, np.arange(len(store.conditions))))
    assert list(whole) == list(pieces) == list(range(len(store.conditions)))
    for c, mean in whole.items():
        np.testing.assert_allclose(pieces[c], mean, rtol=1e-12)


@pytest.mark.parametrize("shape", [(6, 30), (30, 12)])
def test_gene_embedding_spans_the_leading_components(shape):
    profiles = np.random.default_rng(2).normal(size=shape)
    scores = simple.gene_embedding(profiles, 4)
    centred = profiles.T - profiles.T.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(scores), np.abs(left[:, :4] * values[:4]), atol=1e-8)


def test_perturbation_embedding_uses_genes_only_when_most_are_measured():
    genes, embedding = ["a", "b", "c"], np.arange(6.0).reshape(3, 2) + 1
    rows = simple.perturbation_embedding(["a", "x", "c", "q"], genes, embedding, seen=["a", "b", "x"])
    np.testing.assert_array_equal(rows, [[1, 2, 0], [0, 0, 1], [5, 6, 0], [0, 0, 0]])
    drugs = simple.perturbation_embedding(["a", "x"], genes, embedding, seen=["a", "x", "y"])
    np.testing.assert_array_equal(drugs, [[1, 0, 0], [0, 1, 0]])
