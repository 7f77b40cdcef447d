"""`PerturbDiff`: cells and scores in memory, in the user's own names and units, and the same as from the commands."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from own_screen import COLUMNS, SETTINGS

import perturbdiff
from perturbdiff import PerturbDiff, UserError
from perturbdiff.config import recipes


def unfitted(data, **more) -> PerturbDiff:
    return PerturbDiff(data, **{**COLUMNS, "config": "tiny", "settings": SETTINGS, "device": "cpu", **more})


def state_of(adata: anndata.AnnData) -> list:
    """Everything that a careless function would change, for a comparison."""
    x = adata.X.toarray() if sp.issparse(adata.X) else np.asarray(adata.X)
    return [
        hashlib.sha256(np.ascontiguousarray(x)).hexdigest(), type(adata.X).__name__, adata.X.dtype, adata.is_view,
        adata.obs.to_csv(), list(adata.obs.dtypes), adata.var.to_csv(), sorted(adata.obsm), dict(adata.uns),
        sorted(adata.layers), list(adata.obs_names),
    ]  # fmt: skip


def test_predictions_have_the_users_columns_labels_genes_and_units(model, screen, tmp_path):
    cells = model.predict()
    real = screen[(screen.obs["gene"] != "ntc") & (screen.obs["plate"] == 2)]
    assert list(cells.obs.columns) == ["gene", "line", "plate", "set"]
    assert cells.obs["plate"].dtype == screen.obs["plate"].dtype
    assert set(cells.obs["plate"]) == {2}
    assert isinstance(cells.obs["line"].dtype, pd.CategoricalDtype)
    assert cells.obs["gene"].dtype == screen.obs["gene"].dtype
    wanted = real.obs.groupby(["gene", "line"], observed=True).size()
    predicted = cells.obs.groupby(["gene", "line"], observed=True).size()
    pd.testing.assert_series_equal(predicted, wanted[predicted.index])
    assert set(cells.var_names) <= set(screen.var_names)
    assert list(cells.var["symbol"]) == list(screen.var.loc[cells.var_names, "symbol"])
    np.testing.assert_allclose(cells.X.toarray(), np.expm1(cells.layers["log1p"].toarray()), rtol=1e-6)
    assert cells.X.dtype == np.float32
    assert cells.uns["perturbdiff"]["target_sum"] == model.store.target_sum
    cells.write_h5ad(tmp_path / "cells.h5ad")
    again = anndata.read_h5ad(tmp_path / "cells.h5ad")
    assert (again.X != cells.X).nnz == 0
    assert again.uns["perturbdiff"]["columns"] == {
        "perturbation": "gene",
        "cell_type": "line",
        "batch": "plate",
    }


def test_predictions_as_whole_counts(model, screen):
    cells = model.predict(values="counts")
    assert cells.X.dtype == np.int32
    assert cells.var["predicted"].all()
    assert list(cells.obs.columns) == ["gene", "line", "plate", "set", "n_counts"]
    controls = screen[(screen.obs["gene"] == "ntc") & (screen.obs["plate"] == 2)]
    assert set(cells.obs["n_counts"]) <= set(np.asarray(controls.X.sum(axis=1)).ravel().astype(np.float32))
    assert cells.uns["perturbdiff"]["scale"] == "counts"
    assert cells.obs.drop(columns="n_counts").equals(model.predict().obs)


def test_the_users_anndata_is_not_changed(screen, tmp_path):
    for data in (screen.copy(), screen[screen.obs["line"] != "cell_type_2"]):
        before = state_of(data)
        model = unfitted(data, settings={**SETTINGS, "train.max_steps": 2}).fit()
        model.predict()
        model.predict(data)
        assert state_of(data) == before


@pytest.mark.parametrize("kind", ["dense", "layer", "raw", "categories", "numbers", "csc", "float64"])
def test_any_anndata_with_the_same_counts_gives_the_same_store(screen, model, kind):
    data, more = screen.copy(), {}
    if kind == "dense":
        data.X = data.X.toarray()
    elif kind == "csc":
        data.X = data.X.tocsc()
    elif kind == "float64":
        data.X = data.X.astype(np.float64)
    elif kind == "layer":
        data.layers["counts"], more = data.X.copy(), {"layer": "layers/counts"}
        data.X = sp.csr_matrix(np.log1p(data.X.toarray()))
    elif kind == "raw":
        data.raw = data.copy()
        data, more = data[:, :50].copy(), {"layer": "raw"}
    elif kind == "categories":
        data.obs = data.obs.astype("category")
    else:
        data.obs["plate"] = data.obs["plate"].astype(float)
    store = perturbdiff.preprocess(data, config=unfitted(data, **more).config)
    assert store.genes == model.store.genes
    pd.testing.assert_frame_equal(store.conditions, model.store.conditions)
    rows = slice(0, store.n_cells)
    assert (store.expression(rows) != model.store.expression(rows)).nnz == 0


def test_it_does_what_the_commands_do(model, screen, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    screen.copy().write_h5ad("screen.h5ad")
    recipe = Path("recipe.yaml")
    recipe.write_text((model._scratch.path / "recipe.yaml").read_text())
    for command in (
        ("preprocess", "screen.h5ad", "--out", "store"),
        ("split", "store", "--out", "split.parquet"),
        ("train", "store", "--split", "split.parquet", "--out", "bundle", "--device", "cpu"),
    ):
        assert run_cli(*command, "--config", recipe).code == 0
    done = run_cli(
        "sample", "bundle", "store", "--split", "split.parquet", "--out", "predicted.h5ad", "--device", "cpu"
    )
    assert done.code == 0, done.err
    assert Path("bundle/model.safetensors").read_bytes() == (model.path / "model.safetensors").read_bytes()
    assert Path("split.parquet").read_bytes() == model.stages.split.read_bytes()
    pd.testing.assert_frame_equal(perturbdiff.read_store("store").conditions, model.store.conditions)
    theirs = anndata.read_h5ad("predicted.h5ad")
    theirs = theirs[theirs.obs["source"] == "predicted"]
    ours = model.predict()
    assert (ours.layers["log1p"] != theirs.X).nnz == 0
    assert ours.obs["set"].tolist() == theirs.obs["set"].tolist(), "which cells were sampled together"


def test_conditions_by_name_by_table_and_by_cells(model, screen):
    groups = screen.obs.loc[screen.obs["gene"] == "ntc", ["line", "plate"]].drop_duplicates()
    name = model.bundle.vocabulary.perturbation[1]
    by_name = model.predict(name)
    assert len(by_name.obs[["gene", "line", "plate"]].drop_duplicates()) == len(groups)
    table = pd.DataFrame({"gene": [name], "line": ["cell_type_1"], "plate": [1], "n_cells": [7]})
    by_table = model.predict(table)
    assert by_table.n_obs == 7
    assert dict(by_table.obs.iloc[0]) == {"gene": name, "line": "cell_type_1", "plate": 1, "set": 0}
    in_one = model.predict(pd.DataFrame({"gene": [name], "line": ["cell_type_1"]}))
    assert set(in_one.obs["line"]) == {"cell_type_1"}
    assert set(in_one.obs["plate"]) == {1, 2}
    some = screen[screen.obs["line"] == "cell_type_1"]
    of_cells = model.predict(some)
    real = some.obs[some.obs["gene"] != "ntc"].groupby(["gene", "plate"]).size()
    pd.testing.assert_series_equal(of_cells.obs.groupby(["gene", "plate"]).size(), real)
    perturbed = model.predict(some[some.obs["gene"] != "ntc"])  # has no controls: those of the data are taken
    assert (perturbed.layers["log1p"] != of_cells.layers["log1p"]).nnz == 0


def test_a_saved_bundle_predicts_from_other_control_cells(model, screen, tmp_path, caplog):
    place = model.save(tmp_path / "bundle")
    loaded = PerturbDiff.load(str(place))
    name = model.bundle.vocabulary.perturbation[1]
    ours = model.predict(name)
    for controls in (screen, model.store, model.store.path):
        theirs = loaded.predict(name, controls=controls)
        assert (theirs.layers["log1p"] != ours.layers["log1p"]).nnz == 0
    assert theirs.obs["plate"].dtype != ours.obs["plate"].dtype  # a store knows labels as text
    alone = screen[screen.obs["gene"] == "ntc"].copy()
    caplog.clear()
    of_controls = loaded.predict(name, controls=alone)
    assert set(of_controls.obs["gene"]) == {name}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    del alone.obs["gene"]  # without the column, all cells are controls
    alone.obs = alone.obs.rename(columns={"line": "louvain"})
    table = ours.obs[["gene", "line", "plate"]].value_counts(sort=False).rename("n_cells").reset_index()
    wanted = table.rename(columns={"line": "louvain"})
    other = PerturbDiff.load(place, cell_type="louvain").predict(wanted, controls=alone[:, ::-1])
    assert list(other.obs.columns) == ["gene", "louvain", "plate", "set"]
    expected = model.predict(table).layers["log1p"]
    assert (other.layers["log1p"] != expected).nnz == 0
    with pytest.raises(UserError, match="is there already"):
        model.save(place)


def test_log1p_data_give_log1p_predictions(screen):
    data = screen.copy()
    depth = np.asarray(data.X.sum(1)).ravel()[:, None]
    data.X = sp.csr_matrix(np.log1p(data.X.toarray() / depth * 1000).astype("float32"))
    cells = unfitted(data).fit().predict()
    assert not cells.layers
    assert cells.uns["perturbdiff"]["scale"] == "log1p"
    assert cells.X.max() < 15


def test_mistakes_are_user_errors_that_name_the_remedy(model, screen, tmp_path):
    with pytest.raises(UserError, match="did you mean 'gene'"):
        unfitted(screen, perturbation="gen")
    with pytest.raises(UserError, match="control"):
        unfitted(screen, control="nothing-like-it")
    with pytest.raises(UserError, match="call fit"):
        unfitted(screen).predict()
    with pytest.raises(UserError, match="call fit"):
        unfitted(screen).evaluate()
    with pytest.raises(UserError, match="not trained with perturbation GENE99"):
        model.predict("GENE99")
    with pytest.raises(UserError, match="no control cells of cell_type 'B cell'"):
        model.predict(pd.DataFrame({"gene": ["GENE28"], "line": ["B cell"]}))
    with pytest.raises(UserError, match="give control cells"):
        PerturbDiff.load(model.path).predict("GENE28")
    with pytest.raises(UserError, match="no such|not found|bundle"):
        PerturbDiff.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="no preset or file 'recommend', did you mean 'recommended'"):
        unfitted(screen, config="recommend")
    with pytest.raises(UserError, match="train.max_step'"):
        unfitted(screen, settings={"train.max_step": 5})
    with pytest.raises(UserError, match="input not found"):
        unfitted(tmp_path / "nothing.h5ad")
    with pytest.raises(UserError, match="is a store"):
        unfitted(model.store.path)


def test_a_split_of_ones_own_and_genes_of_the_training_cells(model, screen):
    split = model.split
    split.loc[split["part"] == "test", "part"] = "unused"
    split.loc[(split["cell_type"] == "cell_type_1") & (split["perturbation"] != "ntc"), "part"] = "test"
    settings = {**SETTINGS, "train.max_steps": 2, "data.hvg_cells": "train"}
    own = unfitted(screen, split=split, settings=settings).fit()
    pd.testing.assert_frame_equal(own.split, split)
    assert set(own.predict().obs["line"]) == {"cell_type_1"}
    made = perturbdiff.preprocess(screen, split=split, config=own.config)
    assert own.store.genes == made.genes


def test_data_without_batches_and_some_labels_get_as_many_cells_as_asked(screen):
    data = screen.copy()
    del data.obs["plate"]
    data.obs["gene"] = data.obs["gene"].mask(np.arange(data.n_obs) < 5)
    settings = {"train.max_steps": 2, "data.random_batches": 2}
    model = unfitted(data, batch=False, settings=settings).fit()
    assert model.config.data.batch_key is None
    assert model.store.n_cells == data.n_obs - 5
    cells = model.predict(data)
    assert list(cells.obs.columns) == ["gene", "line", "set"]
    wanted = data.obs[data.obs["gene"] != "ntc"].value_counts(sort=False)
    pd.testing.assert_series_equal(
        cells.obs[["gene", "line"]].value_counts(sort=False).sort_index(), wanted.sort_index()
    )


def test_recipes_seeds_and_devices_can_be_given(screen):
    recipe = recipes.load("tiny", ["train.max_steps=7"])
    given = unfitted(screen, config=recipe, settings={"train.learning_rate": np.float32(0.5)}, seed=5).config
    assert (given.train.max_steps, given.train.learning_rate, given.seed) == (7, 0.5, 5)
    assert given.model == recipe.model
    assert given.data.perturbation_key == "gene"


def test_what_it_says_of_itself(model, screen, tmp_path):
    assert "1200 cells × 90 genes" in repr(unfitted(screen))
    assert "not fitted" in repr(unfitted(screen))
    assert "4 perturbations, 3 cell types, 2 batches" in repr(model)
    assert str(model.path) in repr(PerturbDiff.load(model.path))


def test_with_a_folder_files_stay_and_a_second_fit_finds_them(screen, tmp_path):
    settings = {**SETTINGS, "train.max_steps": 2}
    first = unfitted(screen, settings=settings, folder=tmp_path / "results").fit()
    made = (tmp_path / "results" / "bundle" / "run.json").read_bytes()
    unfitted(screen, settings=settings, folder=tmp_path / "results").fit()
    assert (tmp_path / "results" / "bundle" / "run.json").read_bytes() == made
    first.predict()
    assert (tmp_path / "results" / "predictions" / "perturbdiff.h5ad").is_file()


def test_nothing_stays_in_the_temporary_folder(screen, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = unfitted(screen, settings={**SETTINGS, "train.max_steps": 2}).fit()
    scores = model.evaluate(baselines=())
    model.predict()
    del model, scores
    gc.collect()
    assert list(tmp_path.iterdir()) == []
