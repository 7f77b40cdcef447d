"""The columns by option: the same store and split as by the recipe's keys."""

import json

import pytest
from tiny_data import TINY, tiny_counts

ASKED = ("--pert-col", "gene", "--control", "0", "--cell-type-col", "line", "--batch-col", "none")
SET = ("data.perturbation_key=gene", "data.control=0", "data.cell_type_key=line", "data.batch_key=null")


@pytest.fixture
def renamed(tmp_path):
    adata = tiny_counts()
    names = {"perturbation": "gene", "cell_type": "line", "batch": "plate"}
    adata.obs = adata.obs.rename(columns=names)
    adata.obs["gene"] = adata.obs["gene"].cat.rename_categories({"control": "0"})
    adata.write_h5ad(tmp_path / "mine.h5ad")
    return tmp_path


def record(path):
    """Return what determined an output."""
    text = json.loads(path.read_text())
    return {key: text[key] for key in ("config", "inputs", "seed")}


def test_options_mean_the_recipe_s_keys(renamed, run_cli):
    keys = [word for one in SET for word in ("--set", one)]
    held = ("--set", "split.context_column=cell_type", "--set", "split.held_out=T")
    for name, options in (("a", ASKED), ("b", keys)):
        made = run_cli("preprocess", renamed / "mine.h5ad", "--out", renamed / name, *TINY, *options)
        assert made.code == 0, made.err
        split = run_cli(
            "split", renamed / "mine.h5ad", "--out", renamed / f"{name}.parquet", *TINY, *options, *held
        )
        assert split.code == 0, split.err
    assert record(renamed / "a" / "manifest.json") == record(renamed / "b" / "manifest.json")
    assert (renamed / "a.parquet").read_bytes() == (renamed / "b.parquet").read_bytes()


def test_a_ceiling_of_cells_without_a_batch(renamed, run_cli):
    made = run_cli(
        "ceiling",
        renamed / "mine.h5ad",
        "--out",
        renamed / "c",
        *ASKED,
        "--scale",
        "counts",
        "--metrics",
        "MSE",
    )
    assert made.code == 0, made.err
