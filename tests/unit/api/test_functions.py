"""The stages as functions of AnnData or paths: what they give is what the commands write."""

from __future__ import annotations

import json

import anndata
import numpy as np
import pandas as pd
import pytest

import perturbdiff
from perturbdiff import UserError
from perturbdiff.runtime.files import sha256

PLAIN = ("perturbation", "cell_type", "batch", "control")
HELD_OUT = {"split.held_out": ["d2"], "split.valid_fraction": 0.4, "train.max_steps": 4}


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """All functions one after another, once with outputs and once without."""
    from tiny_data import tiny_counts

    made = {}
    for kind in ("files", "memory"):
        folder = tmp_path_factory.mktemp(kind)
        given = tiny_counts()
        if kind == "files":
            given.write_h5ad(folder / "adata")
            given = str(folder / "adata")

        def out(name, folder=folder, kind=kind):
            return folder / name if kind == "files" else None

        store = perturbdiff.preprocess(given, out("store"), config="tiny")
        split = perturbdiff.split(store, out("split.parquet"), config="tiny", settings=HELD_OUT)
        model = perturbdiff.train(store, split, out("bundle"), config="tiny", settings=HELD_OUT, device="cpu")
        cells = perturbdiff.sample(model, store, out("cells.h5ad"), split=split, device="cpu")
        scores = perturbdiff.evaluate(cells, store, out("scores"))
        made[kind] = {"store": store, "split": split, "model": model, "cells": cells, "scores": scores}
        made[kind]["folder"] = folder
    return made


def test_without_outputs_the_results_are_the_same(chain):
    files, memory = chain["files"], chain["memory"]
    stores = files["store"], memory["store"]
    assert sha256(stores[0].path / "part-0000.zarr") == sha256(stores[1].path / "part-0000.zarr")
    pd.testing.assert_frame_equal(files["split"], memory["split"])
    weights = [sha256(one["model"].path / "model.safetensors") for one in (files, memory)]
    assert weights[0] == weights[1]
    assert (files["cells"].X != memory["cells"].X).nnz == 0
    pd.testing.assert_frame_equal(files["cells"].obs, memory["cells"].obs)
    pd.testing.assert_frame_equal(pd.DataFrame(files["scores"]), pd.DataFrame(memory["scores"]))


def test_the_commands_find_the_functions_outputs_done(chain, run_cli, monkeypatch):
    monkeypatch.chdir(chain["files"]["folder"])
    changes = [text for key, value in HELD_OUT.items() for text in ("--set", f"{key}={value}")]
    cpu = ("--device", "cpu")
    for command in (
        ("preprocess", "adata", "--out", "store", "--config", "tiny"),
        ("split", "store", "--out", "split.parquet", "--config", "tiny", *changes),
        ("train", "store", "--split", "split.parquet", "--out", "bundle", "--config", "tiny", *changes, *cpu),
        ("sample", "bundle", "store", "--split", "split.parquet", "--out", "cells.h5ad", *cpu),
    ):  # fmt: skip
        done = run_cli(*command)
        assert done.code == 0, done.err
        assert "is up to date, nothing to do" in done.err


def test_several_anndata_make_one_store():
    from tiny_data import tiny_counts

    whole = tiny_counts()
    halves = [whole[:100], whole[100:]]
    store = perturbdiff.preprocess(halves, config="tiny")
    assert store.n_cells == whole.n_obs
    assert set(store.obs(["source_file"])["source_file"]) == {"adata-0", "adata-1"}


def test_columns_layers_and_genes_can_be_named():
    from tiny_data import tiny_counts

    counts = tiny_counts()
    counts.obs = counts.obs.rename(columns={"perturbation": "stim", "batch": "donor"})
    counts.layers["raw"] = counts.X
    counts.X = counts.X * 0.5
    store = perturbdiff.preprocess(
        counts, config="tiny", perturbation="stim", batch="donor", layer="layers/raw", genes=["g3", "g1"]
    )
    assert store.genes == ["g3", "g1"]
    assert set(store.conditions["batch"]) == {"d1", "d2"}
    parts = perturbdiff.split(
        counts, config="tiny", perturbation="stim", batch="donor", settings={"split.held_out": ["d1"]}
    )
    assert set(parts.loc[parts["part"] == "test", "batch"]) == {"d1"}


def test_cells_can_be_given_where_a_store_can(chain):
    """They become a store on the way, so that weights and cells are those of the store."""
    from tiny_data import tiny_counts

    made, cells = chain["memory"], tiny_counts()
    cells.obs = cells.obs.rename(columns={"perturbation": "stim"})
    split = made["split"]
    named = {"config": "tiny", "perturbation": "stim", "settings": HELD_OUT, "device": "cpu"}
    model = perturbdiff.train(cells, split, **named)
    assert sha256(model.path / "model.safetensors") == sha256(made["model"].path / "model.safetensors")
    predicted = perturbdiff.sample(model, cells, split=split, device="cpu")
    assert (predicted.X != made["cells"].X).nnz == 0
    assert predicted.obs.equals(made["cells"].obs)
    assert "stim" in model.predict(["p1"]).obs
    controls = cells[cells.obs["stim"] == "control"]
    asked = perturbdiff.sample(model.path, controls, conditions=["p1"], device="cpu")
    assert set(asked.obs.loc[asked.obs["source"] == "predicted", "perturbation"]) == {"p1"}


def test_a_split_changed_by_hand_is_used(chain):
    store, split = chain["memory"]["store"], chain["memory"]["split"].copy()
    wanted = split.loc[split["part"] == "test", "perturbation"].iloc[0]
    split.loc[(split["part"] == "test") & (split["perturbation"] != wanted), "part"] = "unused"
    cells = perturbdiff.sample(chain["memory"]["model"], store, split=split, device="cpu")
    predicted = cells.obs[cells.obs["source"] == "predicted"]
    assert set(predicted["perturbation"]) == {wanted}
    with pytest.raises(UserError, match="lacks the column part"):
        perturbdiff.train(store, split.drop(columns="part"), config="tiny")


def test_evaluation_of_predictions_in_the_users_units(model, screen, scores):
    again = perturbdiff.evaluate(model.predict(), model.store, settings={"evaluate.bootstrap": 50})
    both = [c for c in again.columns if c in scores.columns]
    np.testing.assert_allclose(again[both].iloc[0], scores.loc["perturbdiff", both].astype(float), rtol=1e-6)


def findings_of(scores) -> str:
    return " ".join(
        entry["text"] for entry in json.loads((scores.folders[0] / "summary.json").read_text())["findings"]
    )


def test_evaluation_of_anyones_anndata(screen):
    real = screen[screen.obs["line"] == "cell_type_1"].copy()
    depth = np.asarray(real.X.sum(1))
    real.X = np.log1p(real.X.toarray() / depth * 1e3)
    predicted = real[real.obs["gene"] != "ntc"][:, ::-1].copy()
    found = perturbdiff.evaluate(
        predicted, real, perturbation="gene", control="ntc", cell_type="line", batch="plate", scale="log1p",
        method="copy", metrics=["expression"], settings={"evaluate.bootstrap": 0},
    )  # fmt: skip
    assert list(found.index) == ["copy"]
    assert found.loc["copy", "MSE"] == 0
    assert "energy_distance" not in found
    said = findings_of(found)
    assert "perturbdiff-" not in said
    assert "predictions: its genes are in another order" in said
    with pytest.raises(UserError, match="scale"):
        perturbdiff.evaluate(
            predicted, real, perturbation="gene", control="ntc", cell_type="line", batch="plate"
        )


def test_report_takes_scores_and_folders(chain, scores, model, tmp_path):
    page = perturbdiff.report([scores], tmp_path / "report.html", models=[model], splits=[model.split])
    assert "nearest-context" not in page.read_text()
    assert "linear" in page.read_text()
    one = perturbdiff.report(
        str(chain["files"]["folder"] / "scores"), str(tmp_path / "one.html"), title="One method"
    )
    assert "One method" in one.read_text()


def test_mistakes_are_user_errors(chain, screen, tmp_path):
    with pytest.raises(UserError, match="^adata: no obs column 'perturbation'"):
        perturbdiff.train(screen, chain["memory"]["split"], config="tiny")
    with pytest.raises(UserError, match="not a finished store"):
        perturbdiff.read_store(tmp_path)
    with pytest.raises(UserError, match="not int"):
        perturbdiff.preprocess(3)
    with pytest.raises(UserError, match="^adata: no obs column 'perturbation'"):
        perturbdiff.preprocess(screen, config="tiny")
    with pytest.raises(UserError, match="is no value of a recipe"):
        perturbdiff.simulate(settings={"simulate.cells": object()})
    screen.copy().write_h5ad(tmp_path / "screen.h5ad")
    backed = anndata.read_h5ad(tmp_path / "screen.h5ad", backed="r")
    with pytest.raises(UserError, match="give that path instead"):
        perturbdiff.preprocess(backed, config="tiny")
