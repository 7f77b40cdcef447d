"""A user's mistake: one line that names the place and the remedy, exit code 2, nothing left behind."""

import os
import shutil
import subprocess

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from refusals import nothing_left, refused
from tiny_data import TINY, tiny_counts


def changed(tmp_path, change):
    """Write the tiny counts after ``change`` was applied to them."""
    adata = tiny_counts()
    result = change(adata)
    adata = adata if result is None else result
    path = tmp_path / "counts.h5ad"
    adata.write_h5ad(path)
    return path


def put(value):
    """Return a change that sets one stored value."""

    def change(adata):
        adata.X.data[3] = value

    return change


def rename_column(adata):
    adata.obs = adata.obs.rename(columns={"perturbation": "perturbatoin"})


def no_controls(adata):
    return adata[adata.obs["perturbation"] != "control"].copy()


def misspelt_control(adata):
    adata.obs["perturbation"] = adata.obs["perturbation"].cat.rename_categories({"control": "Contrl"})


def log_data(adata):
    adata.X.data = np.log1p(adata.X.data)


def duplicate_genes(adata):
    adata.var_names = ["g0", "g0", *adata.var_names[2:]]


def genes_merged_by_their_numbers_alone(adata):
    adata.X.indices[adata.X.indices == 1] = 0


def missing_label(adata):
    adata.obs["cell_type"] = adata.obs["cell_type"].where(np.arange(adata.n_obs) > 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename_column, ["counts.h5ad", "'perturbation'", "did you mean 'perturbatoin'"]),
        (no_controls, ["counts.h5ad", "'control'", "perturbation"]),
        (misspelt_control, ["counts.h5ad", "'control'", "did you mean 'Contrl'"]),
        (put(-1.0), ["counts.h5ad", "negative"]),
        (put(np.nan), ["counts.h5ad", "missing or infinite", "'g"]),
        (put(1.5), ["counts.h5ad", "not whole numbers", "data.layer"]),
        (log_data, ["counts.h5ad", "log-transformed", "data.input_scale=log1p"]),
        (duplicate_genes, ["counts.h5ad", "not unique", "g0", "var_names_make_unique"]),
        (
            genes_merged_by_their_numbers_alone,
            ["counts.h5ad", "two values in one place (gene 'g0'", "sum_duplicates"],
        ),
        (missing_label, ["counts.h5ad", "cell_type", "missing"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_preprocess_refuses(tmp_path, run_cli, change, words):
    path = changed(tmp_path, change)
    refused(run_cli("preprocess", path, "--out", tmp_path / "store", *TINY), *words)
    nothing_left(tmp_path, "counts.h5ad")


def test_counts_declared_as_log1p(tmp_path, run_cli):
    def large(adata):
        adata.X.data[:] = adata.X.data * 30

    path = changed(tmp_path, large)
    outcome = run_cli(
        "preprocess", path, "--out", tmp_path / "store", *TINY, "--set", "data.input_scale=log1p"
    )
    refused(outcome, "counts.h5ad", "log1p")
    nothing_left(tmp_path, "counts.h5ad")


def test_empty_file(tmp_path, run_cli):
    (tmp_path / "counts.h5ad").touch()
    refused(
        run_cli("preprocess", tmp_path / "counts.h5ad", "--out", tmp_path / "store", *TINY),
        "counts.h5ad",
        "empty",
    )
    nothing_left(tmp_path, "counts.h5ad")


def test_no_cells(tmp_path, run_cli):
    path = changed(tmp_path, lambda a: a[:0].copy())
    refused(run_cli("preprocess", path, "--out", tmp_path / "store", *TINY), "counts.h5ad", "has 0 cells")
    nothing_left(tmp_path, "counts.h5ad")


def test_truncated_file(counts_file, tmp_path, run_cli):
    os.truncate(counts_file, counts_file.stat().st_size // 2)
    refused(
        run_cli("preprocess", counts_file, "--out", tmp_path / "store", *TINY), "counts.h5ad", "truncated"
    )
    nothing_left(tmp_path, "counts.h5ad")


def test_missing_file(tmp_path, run_cli):
    refused(
        run_cli("preprocess", tmp_path / "nothing.h5ad", "--out", tmp_path / "store", *TINY), "nothing.h5ad"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.max_step=3", ["unknown key 'train.max_step'", "did you mean 'train.max_steps'"]),
        ("train.max_steps=many", ["'train.max_steps'", "integer", "'many'"]),
    ],
)
def test_configuration(counts_file, tmp_path, run_cli, override, words):
    refused(run_cli("preprocess", counts_file, "--out", tmp_path / "store", *TINY, "--set", override), *words)
    nothing_left(tmp_path, "counts.h5ad")


def test_output_below_a_file(counts_file, tmp_path, run_cli):
    (tmp_path / "file").touch()
    refused(
        run_cli("preprocess", counts_file, "--out", tmp_path / "file" / "store", *TINY),
        "cannot write",
        "store",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_folder_not_writable(counts_file, tmp_path, run_cli):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(
        run_cli("preprocess", counts_file, "--out", locked / "store", *TINY), "cannot write", "permission"
    )
    nothing_left(locked)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_disk_full_while_writing_a_store(small_disk, tmp_path, run_cli):
    big = ad.concat([tiny_counts(seed, genes=400) for seed in range(12)])
    big.obs_names_make_unique()
    big.write_h5ad(tmp_path / "counts.h5ad")
    recipe = [*TINY, "--set", "data.num_hvgs=400"]
    line = ("preprocess", tmp_path / "counts.h5ad", "--out", small_disk / "store", *recipe)
    refused(run_cli(*line), "disk full", "store", "run again", ".store.partial")
    nothing_left(small_disk, ".store.partial")  # what is done
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert run_cli(*line).code == 0
    nothing_left(small_disk, "store")
    assert run_cli("store", "check", small_disk / "store").code == 0


def test_toml_names_a_condition_without_cells(counts_file, tmp_path, run_cli):
    toml = tmp_path / "split.toml"
    toml.write_text('[training]\ncounts = "train"\n[fewshot."counts.d2"]\ntest = ["p9"]\n')
    outcome = run_cli("split", counts_file, "--out", tmp_path / "s.parquet", *TINY, "--toml", toml)
    refused(outcome, "p9")
    nothing_left(tmp_path, "counts.h5ad", "split.toml")


def test_held_out_context_misspelt(counts_file, tmp_path, run_cli):
    outcome = run_cli(
        "split", counts_file, "--out", tmp_path / "s.parquet", *TINY, "--set", "split.held_out=[d22]"
    )
    refused(outcome, "'d22'", "did you mean 'd2'")
    nothing_left(tmp_path, "counts.h5ad")


def test_no_gene_in_common_with_the_bundle(trained, tmp_path, run_cli):
    foreign = tiny_counts()
    foreign.var_names = [f"other{i}" for i in range(foreign.n_vars)]
    foreign.write_h5ad(tmp_path / "foreign.h5ad")
    assert run_cli("preprocess", tmp_path / "foreign.h5ad", "--out", tmp_path / "store", *TINY).code == 0
    arguments = ["--split", trained / "split.parquet", "--out", tmp_path / "pred.h5ad"]
    refused(run_cli("sample", trained / "bundle", tmp_path / "store", *arguments), "no gene in common")
    nothing_left(tmp_path, "foreign.h5ad", "store")


def test_requested_condition_is_unknown(trained, tmp_path, run_cli):
    table = tmp_path / "wanted.csv"
    pd.DataFrame({"cell_type": ["B"], "batch": ["d1"], "perturbation": ["p11"], "n_cells": [4]}).to_csv(
        table, index=False
    )
    outcome = run_cli(
        "sample",
        trained / "bundle",
        trained / "store",
        "--conditions",
        table,
        "--out",
        tmp_path / "pred.h5ad",
    )
    refused(outcome, "p11", "did you mean 'p1'")
    nothing_left(tmp_path, "wanted.csv")


def test_damaged_bundle(trained, tmp_path, run_cli):
    broken = tmp_path / "bundle"
    shutil.copytree(trained / "bundle", broken)
    os.truncate(broken / "model.safetensors", 100)
    arguments = [
        broken,
        trained / "store",
        "--split",
        trained / "split.parquet",
        "--out",
        tmp_path / "pred.h5ad",
    ]
    refused(run_cli("sample", *arguments), "model.safetensors", "was changed since it was made")
    nothing_left(tmp_path, "bundle")


def test_not_a_store(trained, tmp_path, run_cli):
    arguments = [trained / "bundle", "--split", trained / "split.parquet", "--out", tmp_path / "out"]
    for more in ([], ["--checkpoints", tmp_path / "checkpoints"]):
        refused(run_cli("train", *arguments, *more, *TINY), "bundle", "store")
        nothing_left(tmp_path)


def test_sets_larger_than_any_condition_are_drawn_with_replacement_and_said_once(trained, tmp_path, run_cli):
    recipe = [*TINY, "--set", "train.set_size=64", "--set", "train.max_steps=3", "--device", "cpu"]
    arguments = [trained / "store", "--split", trained / "split.parquet", "--out", tmp_path / "bundle"]
    outcome = run_cli("train", *arguments, *recipe)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("with replacement") == 1
