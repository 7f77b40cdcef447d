"""Files laid out as the public ones go through their presets: `data check` first, then `preprocess` and `split`."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from public_schemas import GENES, SPLITS, labels_of, parse_pbmc, state_replogle, tahoe_parquet, tahoe_plate

from perturbdiff.config import recipes
from perturbdiff.inspection import costs, inspect_study, study_of
from perturbdiff.inspection.costs import Hours
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.splits.splits import make_split
from perturbdiff.store.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:Variable names are not unique")


@pytest.fixture(autouse=True)
def _no_network_of_the_paper(monkeypatch):
    monkeypatch.setattr(costs, "on_gpu", lambda *_: Hours(1.0, 0.5, 10))


def through(paths, name, tmp_path, *changes):
    """Check files against a preset and its published split, then preprocess and split them; the store and split."""
    toml = SPLITS / f"{name}.toml"
    found = inspect_study(study_of([str(path) for path in paths], f"paper-{name}", list(changes), toml=toml))
    assert found.problems == []
    recipe = recipes.load(f"paper-{name}", list(changes))
    store = preprocess(paths, tmp_path / "store", recipe.data)
    split = make_split(store, tmp_path / "split.parquet", recipe, toml=toml)
    said = " / ".join(one.text for one in found.found)
    sizes = pd.read_parquet(split).groupby("part")["n_cells"].sum()
    assert f"validation cells {sizes['valid']:,}, test cells {sizes['test']:,}" in said
    return Store(store), pd.read_parquet(split), said


def test_parse_pbmc(tmp_path):
    path = parse_pbmc(tmp_path / "pbmc.h5ad")
    (problem,) = inspect_study(study_of([str(path)], "paper-pbmc", [])).problems
    assert "gene names are not unique (TSPAN6)" in problem
    assert "data.duplicate_genes=sum" in problem
    store, split, _ = through([path], "pbmc", tmp_path, "data.duplicate_genes=sum")
    assert (store.n_genes, store.dtype) == (GENES - 1, np.uint16)
    assert set(store.conditions["batch"]) == {"Donor1", "Donor4", "Donor9", "Donor12", "Donor10"}
    assert "CD8 Naive" in set(store.conditions["cell_type"])
    held = split[split["part"].isin(["valid", "test"])]
    assert set(held["perturbation"]) == set(labels_of("pbmc"))
    assert set(held["batch"]) == {"Donor1", "Donor4", "Donor9", "Donor12"}


def test_tahoe_plates_without_cells_that_did_not_pass(tmp_path):
    plates = [tahoe_plate(tmp_path / f"plate{k}.h5ad", plate=k) for k in (1, 2)]
    store, split, said = through(plates, "tahoe100m", tmp_path, "data.keep=pass_filter == 'full'")
    assert said.count("data.keep leaves out 3 of 4,749 cells") == 2
    assert store.n_cells == 2 * 4746
    assert "labels begin or end with a blank" not in said  # the blank of Erdafitinib is within the label
    assert "[('Erdafitinib ', 0.05, 'uM')]" in set(split["perturbation"][split["part"] == "valid"])
    assert set(store.conditions["batch"]) == {"plate1", "plate2"}


def test_tahoe_as_state_filtered_it_with_few_of_the_conditions(tmp_path):
    path = tahoe_plate(tmp_path / "c1.h5ad", every=False, normalised=True)
    changes = ["data.input_scale=normalised", "data.keep=pass_filter != 'minimal'"]
    toml = SPLITS / "tahoe100m.toml"
    problems = inspect_study(study_of([str(path)], "paper-tahoe100m", changes, toml=toml)).problems
    assert len(problems) == 5  # a line for each cell line, with all of its conditions
    assert all("783 of 789 held-out perturbations have no cells" in text for text in problems)
    (problem,) = inspect_study(study_of([str(path)], "paper-tahoe100m", changes[1:], toml=None)).problems
    assert "data.input_scale=normalised" in problem
    store, split, _ = through([path], "tahoe100m", tmp_path, *changes, "split.missing=warn")
    assert store.input_scale == "log1p"
    assert store.n_cells == 6 * 8
    assert len(set(split["perturbation"][split["part"].isin(["valid", "test"])])) == 6


def test_tahoe_as_parquet_gives_the_store_of_the_same_cells(tmp_path):
    plates = [tahoe_plate(tmp_path / f"plate{k}.h5ad", plate=k, every=False) for k in (1, 2)]
    folder = tahoe_parquet(tmp_path / "hub", plates)
    changes = ["data.cell_type_key=cell_line_id", "split.missing=warn"]
    store, split, _ = through([folder], "tahoe100m", tmp_path, *changes)
    for plate in plates:
        cells = ad.read_h5ad(plate)
        cells[cells.obs["pass_filter"] == "full"].write_h5ad(plate)
    (tmp_path / "other").mkdir()
    other, same, _ = through(plates, "tahoe100m", tmp_path / "other", "split.missing=warn")
    assert split.equals(same)
    assert (store.genes, store.dtype, store.target_sum) == (other.genes, other.dtype, other.target_sum)
    assert store.conditions.equals(other.conditions)
    names = ["cell", "cell_type", "batch", "perturbation", "n_counts", "n_genes"]
    pd.testing.assert_frame_equal(store.obs(names), other.obs(names))
    every = slice(0, store.n_cells)
    np.testing.assert_array_equal(store.counts(every).toarray(), other.counts(every).toarray())


def test_replogle_as_state_processed_it(tmp_path):
    path = state_replogle(tmp_path / "replogle.h5ad")
    store, split, _ = through([path], "replogle", tmp_path)
    assert store.input_scale == "log1p"
    assert set(store.conditions["cell_type"]) == {"hepg2", "jurkat", "k562", "rpe1"}
    held = split[split["part"].isin(["valid", "test"])]
    assert set(held["cell_type"]) == {"hepg2"}
    assert set(held["perturbation"]) == set(labels_of("replogle"))
    (tmp_path / "hvg").mkdir()
    hvg, again, _ = through([path], "replogle", tmp_path / "hvg", "data.layer=obsm/X_hvg")
    assert list(hvg.genes) == list(store.genes)[1::2]
    assert again.equals(split)
    np.testing.assert_array_equal(
        hvg.counts(slice(0, 9)).toarray(), store.counts(slice(0, 9)).toarray()[:, 1::2]
    )
