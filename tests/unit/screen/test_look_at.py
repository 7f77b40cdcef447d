"""What is guessed of a file or an AnnData, and how what is missing is told."""

import anndata as ad
import messy_screens
import numpy as np
import pandas as pd
import pytest
from tiny_data import tiny_counts

from perturbdiff.runtime.errors import UserError
from perturbdiff.screen import look_at

EXPECTED = {
    "counts_in_a_layer": {"layer": "layers/umi counts", "input_scale": "counts"},
    "only_logarithms": {"layer": "X", "input_scale": "log1p"},
    "scaled_with_logarithms_in_raw": {"layer": "raw", "input_scale": "log1p"},
    "odd_column_names": {
        "perturbation_key": "Stim.Condition",
        "control": "Un-stim",
        "cell_type_key": "Cell Type",
        "batch_key": "Donor ID",
    },
    "integer_labels": {"control": "0", "batch_key": "batch"},
    "ensembl_ids_with_duplicate_symbols": {"gene_key": None},
    "duplicate_symbols_with_ids": {"gene_key": "gene_ids"},
    "missing_labels": {"missing_labels": "drop"},
    "unicode_labels": {"control": "ctrl", "cell_type_key": "cell_type"},
    "one_perturbation": {"control": "control"},
    "no_batch_and_no_cell_type": {"cell_type_key": None, "batch_key": None},
    "tenx_folder": {"gene_key": "id", "perturbation_key": "perturbation", "batch_key": "batch"},
}


def given_in(options):
    """The options of ``run`` as `look_at` takes them."""
    words = dict(zip(options[1::2], options[2::2], strict=True))
    names = {"--control": "control", "--batch-col": "batch_key"}
    return {names[key]: value for key, value in words.items() if key in names}, words.get("--obs")


@pytest.mark.parametrize("make", messy_screens.UNDERSTOOD, ids=lambda make: make.__name__)
def test_messy_files_are_understood(make, tmp_path):
    options = make(tmp_path)
    given, obs = given_in(options)
    screen = look_at(options[0], given, obs)
    assert screen.problems == ()
    assert {key: screen.data.get(key) for key in EXPECTED[make.__name__]} == EXPECTED[make.__name__]
    assert all(guess.why for guess in screen.guesses)
    assert screen.conditions["n_cells"].sum() + screen.without_label == screen.n_cells


def test_a_file_and_the_same_anndata_in_memory_are_judged_alike(tmp_path):
    path = messy_screens.counts_in_a_layer(tmp_path)[0]
    on_disk, in_memory = look_at(path), look_at(ad.read_h5ad(path))
    assert on_disk.data == in_memory.data
    pd.testing.assert_frame_equal(on_disk.conditions, in_memory.conditions)


def test_cells_without_a_label_are_counted(tmp_path):
    screen = look_at(messy_screens.missing_labels(tmp_path)[0])
    assert screen.without_label == 12
    assert any("9 in 'perturbation'" in note and "7 in 'cell_type'" in note for note in screen.notes)


def test_all_problems_are_told_at_once(tmp_path):
    options = messy_screens.hopeless(tmp_path)
    screen = look_at(options[0], given_in(options)[0])
    with pytest.raises(UserError) as error:
        screen.check()
    for said in (
        "negative values",
        "not unique (same)",
        "no obs column 'plate'",
        "no label of 'perturbation'",
    ):
        assert said in str(error.value)
    for remedy in ("data.layer=", "data.gene_key=", "--batch-col COLUMN", "--control LABEL"):
        assert remedy in str(error.value)


def test_in_memory_the_remedy_is_an_argument():
    adata = tiny_counts()
    adata.obs["perturbation"] = adata.obs["perturbation"].cat.rename_categories({"control": "first"})
    (problem,) = look_at(adata).problems
    assert problem.endswith("add control=LABEL")


def test_a_label_may_stand_for_its_column():
    adata = tiny_counts()
    adata.obs = adata.obs.rename(columns={"perturbation": "label"})
    screen = look_at(adata, {"perturbation_key": "p1", "control": "control"})
    assert screen.data["perturbation_key"] == "label"
    assert any("'p1' is a label of obs column 'label'" in note for note in screen.notes)


def test_a_sample_that_is_one_treatment_of_one_donor_is_no_batch():
    adata = tiny_counts()
    obs = adata.obs.astype(str)
    adata.obs = obs[["perturbation", "cell_type"]].assign(sample=obs["batch"] + "_" + obs["perturbation"])
    screen = look_at(adata)
    assert screen.data["batch_key"] is None
    assert any("do not meet" in guess.why for guess in screen.guesses if guess.key == "data.batch_key")


def test_a_wrong_name_gets_the_nearest_one():
    (problem,) = look_at(tiny_counts(), {"cell_type_key": "celltype"}).problems
    assert "did you mean 'cell_type'?" in problem


def test_unused_categories_are_no_perturbations(tmp_path):
    screen = look_at(messy_screens.one_perturbation(tmp_path)[0])
    assert set(screen.conditions["perturbation"]) == {"control", "p1"}


def test_a_screen_of_controls_only_is_refused():
    adata = tiny_counts()
    adata = adata[adata.obs["perturbation"] == "control"].copy()
    (problem,) = look_at(adata).problems
    assert "every cell is 'control'" in problem


def test_values_that_are_not_finite_are_told():
    adata = tiny_counts()
    values = np.asarray(adata.X.todense())
    values[3, 4] = np.nan
    adata.X = values
    assert "missing or infinite" in look_at(adata).problems[0]


def test_a_cell_line_is_preferred_to_a_cell_type_that_all_cells_share():
    adata = tiny_counts()
    adata.obs = adata.obs.rename(columns={"cell_type": "cell_line"}).assign(celltype="lymphoblast")
    assert look_at(adata).data["cell_type_key"] == "cell_line"
