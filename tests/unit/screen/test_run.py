"""``perturbdiff run`` and ``init``: from one file to a report, again, interrupted, and refused."""

from dataclasses import replace
from pathlib import Path

import messy_screens
import numpy as np
import pandas as pd
import pytest
from tiny_data import TINY, tiny_counts

from perturbdiff.config import recipes
from perturbdiff.embeddings.embedding_tables import EmbeddingTable, SemanticKind
from perturbdiff.screen.stages import Stages
from perturbdiff.store.store import Store

pytestmark = pytest.mark.usefixtures("without_pictures")
QUICK = (*TINY, "--set", "train.max_steps=4", "--set", "evaluate.bootstrap=50")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


def test_a_run_ends_in_a_report_and_the_same_command_finds_it_up_to_date(run_cli, finished):
    options = messy_screens.ids_and_unicode_labels_in_a_layer(finished)
    done = run_cli("run", *options, "--out", finished / "out", *QUICK)
    assert done.code == 0, done.err
    *lines, page = done.out.splitlines()
    assert page == str(finished / "out" / "report.html")
    assert (finished / "out" / "report.html").stat().st_size > 10_000
    assert len(lines) == 3
    assert lines[1].startswith("energy distance: ")
    assert "best baseline" in lines[1]
    for said in (
        "values: layers/umi counts",
        "control: ctrl",
        "held out: its 3 perturbations in cell type",
        "[10/10]",
    ):
        assert said in done.err
    again = run_cli("run", *options, "--out", finished / "out", *QUICK)
    assert again.out == done.out
    assert again.err.count("is up to date") == 1 + 4 + 9 + 10 + 2


def test_the_written_recipe_gives_the_same_files_with_single_commands(run_cli, finished):
    out = finished / "out"
    config = recipes.load(out / "recipe.yaml")
    assert (config.train.max_steps, config.data.layer) == (4, "layers/umi counts")
    recipe = ("--config", out / "recipe.yaml")
    done = run_cli("preprocess", finished / "my.h5ad", "--out", out / "store", *recipe)
    done_too = run_cli(
        "train", out / "store", "--split", out / "split.parquet", "--out", out / "bundle", *recipe
    )
    described = run_cli("stats", out / "store", "--split", out / "split.parquet", "--out", out / "statistics")
    for command in (done, done_too, described):
        assert "is up to date" in command.err


def test_an_edited_recipe_is_not_replaced_but_can_be_used(run_cli, finished):
    recipe = finished / "out" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 4", "max_steps: 5"))
    command = ("run", finished / "my.h5ad", "--out", finished / "out")
    refused = run_cli(*command, *QUICK)
    assert refused.code == 2
    assert "was edited" in refused.err
    assert f"--config {recipe}" in refused.err
    assert "max_steps: 5" in recipe.read_text()
    trained = run_cli(*command, "--config", recipe)
    assert trained.code == 2
    assert "train.max_steps (4 then, 5 now)" in trained.err
    done = run_cli(*command, "--config", recipe, "--force")
    assert done.code == 0, done.err
    assert (finished / "out" / "bundle.previous").is_dir()
    assert done.err.count("is up to date") == 3 + 8 + 1 + 9  # only what depends on the model is made again
    assert run_cli(*command, "--config", recipe, "--seed", "1").code == 2


def test_a_file_with_little_in_it_ends_in_a_report(run_cli, tmp_path):
    given = messy_screens.one_perturbation_without_batch_and_cell_type(tmp_path)
    done = run_cli("run", *given, "--out", tmp_path / "out", *QUICK)
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("make", messy_screens.RUN[1:], ids=lambda make: make.__name__)
def test_other_messy_files_become_stores_like_any_other(run_cli, tmp_path, make):
    """What comes after store and split sees nothing of the file."""
    source, *options = make(tmp_path)
    planned = run_cli("init", source, *options, "--out", tmp_path / "out", *QUICK)
    assert planned.code == 0, planned.err
    recipe = ("--config", tmp_path / "out" / "recipe.yaml")
    table = options[options.index("--obs") :][:2] if "--obs" in options else ()
    stored = run_cli("preprocess", source, "--out", tmp_path / "store", *recipe, *table)
    assert stored.code == 0, stored.err
    parted = run_cli("split", tmp_path / "store", "--out", tmp_path / "split.parquet", *recipe)
    assert parted.code == 0, parted.err
    counts = pd.read_csv(tmp_path / "split.parquet.counts.csv", index_col=0)
    assert counts.loc[["train", "test"], "cells"].gt(0).all()


def test_the_sets_of_a_file_reach_the_store(run_cli, tmp_path):
    cells = tiny_counts()
    cells.obs["well"] = np.random.default_rng(3).choice(["w0", "w1"], cells.n_obs)
    cells.write_h5ad(tmp_path / "my.h5ad")
    source, recipe = tmp_path / "my.h5ad", ("--config", tmp_path / "out" / "recipe.yaml")
    planned = run_cli("init", source, "--out", tmp_path / "out", *QUICK, "--set", "data.set_key=well")
    assert planned.code == 0, planned.err
    stored = run_cli("preprocess", source, "--out", tmp_path / "store", *recipe)
    assert stored.code == 0, stored.err
    assert Store(tmp_path / "store").sets == ["w0", "w1"]


@pytest.mark.parametrize("make", messy_screens.REFUSED, ids=lambda make: make.__name__)
def test_hopeless_files_end_in_one_message(run_cli, tmp_path, make):
    done = run_cli("run", *make(tmp_path), "--out", tmp_path / "out", *QUICK)
    assert done.code == 2
    assert done.err.count("error:") == 1
    assert "Traceback" not in done.err
    assert "add " in done.err
    assert not (tmp_path / "out").exists()


def test_init_writes_what_run_would_use(run_cli, tmp_path):
    options = messy_screens.unicode_labels(tmp_path)
    done = run_cli("init", *options, "--out", tmp_path / "plan", "--seed", "3", *TINY)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        str(tmp_path / "plan" / name) for name in ("recipe.yaml", "samplesheet.csv")
    ]
    config = recipes.load(tmp_path / "plan" / "recipe.yaml")
    assert (config.data.control, config.seed, config.train.max_steps) == ("ctrl", 3, 20)
    assert config.split.held_out[0] in {"Zelle Ä", "細胞"}
    (row,) = pd.read_csv(tmp_path / "plan" / "samplesheet.csv").to_dict("records")
    assert row["input"] == options[0]
    assert (row["preset"], row["mode"], row["seed"]) == ("recipe.yaml", "train", 3)


def test_init_does_not_replace_what_someone_else_made(run_cli, tmp_path):
    options = messy_screens.unicode_labels(tmp_path)
    for name in ("recipe.yaml", "samplesheet.csv"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("mine\n")
        done = run_cli("init", *options, "--out", folder)
        assert done.code == 2
        assert name in done.err
        assert (folder / name).read_text() == "mine\n"


@pytest.mark.parametrize("name", ["recipe.yaml", "samplesheet.csv"])
def test_init_does_not_replace_what_was_edited(run_cli, tmp_path, name):
    options = messy_screens.unicode_labels(tmp_path)
    assert run_cli("init", *options, "--out", tmp_path).code == 0
    edited = (tmp_path / name).read_text() + "# mine\n"
    (tmp_path / name).write_text(edited)
    done = run_cli("init", *options, "--out", tmp_path)
    assert done.code == 2
    assert f"{name}: was edited" in done.err
    assert (tmp_path / name).read_text() == edited


def test_the_recipe_of_a_preset_keeps_its_columns_and_its_split(run_cli, tmp_path):
    tiny_counts().write_h5ad(tmp_path / "my.h5ad")
    (tmp_path / "mine.yaml").write_text(
        "base: tiny\ndata: {batch_key: null}\nsplit: {context_column: cell_type, held_out: [T], train_fraction: 0.4}\n"
    )
    done = run_cli(
        "init", tmp_path / "my.h5ad", "--out", tmp_path / "plan", "--config", tmp_path / "mine.yaml"
    )
    assert done.code == 0, done.err
    config = recipes.load(tmp_path / "plan" / "recipe.yaml")
    assert config.data.batch_key is None
    assert (config.split.held_out, config.split.train_fraction) == (("T",), 0.4)
    assert config.model == recipes.load("tiny").model


def test_a_recipe_whose_split_does_not_fit_is_refused_before_anything_runs(run_cli, tmp_path):
    tiny_counts().write_h5ad(tmp_path / "my.h5ad")
    done = run_cli(
        "run", tmp_path / "my.h5ad", "--out", tmp_path / "out", *TINY, "--set", "split.held_out=[d9]"
    )
    assert done.code == 2
    assert "no cells of context 'd9'" in done.err
    assert not (tmp_path / "out").exists()


def test_vectors_of_perturbations_bring_kernel_ridge_among_the_baselines(run_cli, trained, tmp_path):
    table = trained / "store", trained / "split.parquet"
    labels = sorted({str(p) for p in Store(table[0]).conditions["perturbation"]})
    vectors = np.random.default_rng(0).normal(size=(len(labels), 4))
    EmbeddingTable(tuple(labels), vectors).write(tmp_path / "agents.parquet")
    given: dict[SemanticKind, Path] = {"perturbation": tmp_path / "agents.parquet"}
    stages = Stages(tmp_path, recipes.load("tiny"), "it", *table, trained / "bundle", embeddings=given)
    assert set(stages.baselines) - set(replace(stages, embeddings={}).baselines) == {"kernel-ridge"}
    stages.predict_baselines(("control", "kernel-ridge"))
    assert stages.predictions("kernel-ridge").is_file()
    done = run_cli("run", tmp_path / "my.h5ad", "--embedding", "drug=agents.parquet")
    assert done.code == 2
    assert "write it as KIND=FILE" in done.err
