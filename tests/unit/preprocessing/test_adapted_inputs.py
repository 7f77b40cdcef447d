"""Files that are not quite as they should be: cells to leave out, doubled genes, other scales, matrices of obsm."""

import json
import logging

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tiny_data import tiny_counts

from perturbdiff.conditions.gene_names import read_aliases
from perturbdiff.config import recipes
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.alignment import align_genes
from perturbdiff.inspection import inspect_study, study_of
from perturbdiff.io.counts import Inputs
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.screen.plan import plan_screen
from perturbdiff.splits.splits import make_split
from perturbdiff.store.store import Store

KEYS = ["cell_type", "batch", "perturbation"]


pytestmark = pytest.mark.filterwarnings("ignore:Variable names are not unique")


@pytest.fixture(autouse=True)
def _heard(monkeypatch):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)


def write(path, adata, layout="csr"):
    adata = adata.copy()
    made = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": lambda x: x.toarray()}
    adata.X = made[layout](sp.csr_matrix(adata.X))
    adata.write_h5ad(path)
    return path


def some_genes(number):
    return tiny_counts()[:, :number].copy()


def config(**changes):
    return DataConfig(**{"num_hvgs": None, **changes})


def stored(path, out, **changes):
    return Store(preprocess([path], out, config(**changes)))


def by_name(store):
    """The store's values as a frame by names of cells and genes."""
    names = store.cell_names(0, store.n_cells)
    values = store.counts(slice(0, store.n_cells)).toarray()
    return pd.DataFrame(values, index=names, columns=store.genes).sort_index()


@pytest.fixture
def filtered(tmp_path):
    """A screen in which p3 has no cell that passes, and cells that do not pass lack a label."""
    adata = tiny_counts()
    adata.obs = adata.obs.astype(str)
    full = (np.arange(adata.n_obs) % 3 > 0) & (adata.obs["perturbation"] != "p3").to_numpy()
    adata.obs["pass_filter"] = np.where(full, "full", "minimal")
    adata.obs.loc[adata.obs_names[~full][:4], "cell_type"] = np.nan
    return write(tmp_path / "screen.h5ad", adata), adata[full]


KEEP = "pass_filter == 'full'"


def test_a_store_has_only_the_cells_that_are_kept(filtered, tmp_path, caplog):
    path, kept = filtered
    caplog.set_level("INFO")
    store = stored(path, tmp_path / "store", keep=KEEP)
    assert (
        f"data.keep leaves out {tiny_counts().n_obs - kept.n_obs} of {tiny_counts().n_obs} cells"
        in caplog.text
    )
    values = by_name(store)
    assert list(values.index) == sorted(kept.obs_names)
    np.testing.assert_array_equal(values, kept[values.index].X.toarray())
    assert "p3" not in set(store.conditions["perturbation"])
    record = json.loads((store.path / "manifest.json").read_text())
    assert record["config"]["data"]["keep"] == KEEP
    found = record["results"]["store"]
    assert found["left_out"] == tiny_counts().n_obs - kept.n_obs
    assert found["without_label"] == 0
    # the same store as of a file that has only these cells, but for the numbers of rows
    alone = stored(write(tmp_path / "alone.h5ad", kept), tmp_path / "alone")
    pd.testing.assert_frame_equal(store.conditions, alone.conditions)
    assert store.target_sum == alone.target_sum


def test_split_check_and_run_see_the_cells_of_the_store(filtered, tmp_path):
    path, kept = filtered
    rule = [f"data.keep={KEEP}", "data.num_hvgs=null", "split.held_out=[d2]"]
    recipe = recipes.load("tiny", rule)
    table = pd.read_parquet(make_split(path, tmp_path / "split.parquet", recipe))
    sizes = kept.obs.groupby(KEYS, observed=True).size()
    assert table.set_index(KEYS)["n_cells"].sort_index().to_dict() == sizes.sort_index().to_dict()
    found = inspect_study(study_of([str(path)], "tiny", rule))
    assert not found.problems
    said = " / ".join(one.text for one in found.found)
    assert f"data.keep leaves out {tiny_counts().n_obs - kept.n_obs} of" in said
    assert "perturbations 2," in said
    made = plan_screen(path, "tiny", rule)
    assert made.screen.conditions.set_index(KEYS)["n_cells"].to_dict() == sizes.to_dict()
    assert KEEP in recipes.load(made.write(tmp_path / "plan")).data.keep


def test_a_table_of_labels_can_say_which_cells_are_kept(tmp_path):
    adata, table = tiny_counts(), tmp_path / "labels.csv"
    good = np.arange(adata.n_obs) % 2 == 0
    pd.DataFrame({"cell": adata.obs_names, "doublet": np.where(good, "no", "yes")}).to_csv(table, index=False)
    path = write(tmp_path / "x.h5ad", adata)
    made = preprocess([path], tmp_path / "store", config(keep="doublet != 'yes'"), obs=[table])
    assert set(Store(made).cell_names(0, good.sum())) == set(adata.obs_names[good])


def test_what_does_not_fit_is_told_by_all_of_them(filtered, tmp_path):
    path, _ = filtered
    wrong = "pass_filter == 'ful'"
    with pytest.raises(UserError, match="no cell has 'ful' .*did you mean 'full'"):
        stored(path, tmp_path / "store", keep=wrong)
    with pytest.raises(UserError, match="keeps no cell"):
        stored(path, tmp_path / "store", keep=f"{KEEP} and perturbation == 'p3'")
    assert not (tmp_path / "store").exists()
    problems = " / ".join(inspect_study(study_of([str(path)], "tiny", [f"data.keep={wrong}"])).problems)
    assert "did you mean 'full'" in problems
    problems = inspect_study(study_of([str(path)], "tiny", ["data.keep=passes == 'full'"])).problems
    assert any("no obs column 'passes'" in text for text in problems)
    with pytest.raises(UserError, match="did you mean 'full'"):
        plan_screen(path, "tiny", [f"data.keep={wrong}"])


@pytest.mark.parametrize("layout", ["csr", "csc", "dense"])
def test_doubled_genes_are_summed_or_the_first_is_taken(tmp_path, layout):
    adata = some_genes(12)
    names = ["a", "b", "a", "c", "b", "d", "a", *"efghi"]
    adata.var_names = names
    path = write(tmp_path / "x.h5ad", adata, layout)
    with pytest.raises(UserError, match="not unique .*data.duplicate_genes=sum"):
        stored(path, tmp_path / "no")
    dense = pd.DataFrame(adata.X.toarray(), index=adata.obs_names, columns=names)
    summed = dense.T.groupby(level=0, sort=False).sum().T.sort_index()
    store = stored(path, tmp_path / "sum", duplicate_genes="sum")
    assert list(store.genes) == list("abcdefghi")
    np.testing.assert_array_equal(by_name(store), summed)
    first = stored(path, tmp_path / "first", duplicate_genes="first")
    np.testing.assert_array_equal(by_name(first), dense.loc[summed.index, ~pd.Index(names).duplicated()])
    record = json.loads((store.path / "manifest.json").read_text())["config"]["data"]
    assert record["duplicate_genes"] == "sum"


def test_sums_are_of_counts_not_of_logarithms(tmp_path):
    adata = some_genes(4)
    adata.var_names = ["a", "b", "a", "c"]
    adata.X = adata.X.log1p()
    with pytest.raises(UserError, match="duplicate_genes=sum adds up counts.*first"):
        Inputs(
            [write(tmp_path / "x.h5ad", adata)], config(duplicate_genes="sum", input_scale="log1p"), tmp_path
        )


def normalised(genes=80, total=1e4):
    adata = some_genes(genes)
    depth = np.asarray(adata.X.sum(axis=1)).ravel()
    adata.X = sp.csr_matrix(adata.X.multiply(total / depth[:, None]).astype(np.float32))
    return adata


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_normalised_values_become_log1p(tmp_path, layout):
    adata = normalised()
    store = stored(write(tmp_path / "x.h5ad", adata, layout), tmp_path / "store", input_scale="normalised")
    assert store.input_scale == "log1p"
    logs = adata.copy()
    logs.X = logs.X.log1p()
    same = stored(write(tmp_path / "log.h5ad", logs), tmp_path / "logs", input_scale="log1p")
    np.testing.assert_array_equal(by_name(store), by_name(same))


def test_counts_logarithms_and_other_totals_are_not_taken_for_normalised(tmp_path, caplog):
    adata = tiny_counts()
    with pytest.raises(UserError, match="whole numbers.*input_scale=counts"):
        Inputs([write(tmp_path / "x.h5ad", adata)], config(input_scale="normalised"), tmp_path)
    logs = normalised()
    logs.X = logs.X.log1p()
    with pytest.raises(UserError, match="logarithms.*input_scale=log1p"):
        Inputs([write(tmp_path / "l.h5ad", logs)], config(input_scale="normalised"), tmp_path)
    some = write(tmp_path / "s.h5ad", normalised()[:, :30])
    Inputs([some], config(input_scale="normalised"), tmp_path).close()
    assert "the totals of its cells differ" in caplog.text
    with pytest.raises(UserError, match="min_counts needs counts, but data.input_scale is normalised"):
        stored(some, tmp_path / "store", input_scale="normalised", min_counts=5)


def test_a_matrix_of_obsm_is_read_with_the_genes_that_are_known(tmp_path):
    adata = some_genes(20)
    chosen = np.arange(20) % 4 == 1
    adata.obsm["X_hvg"] = adata.X[:, chosen].toarray() + 1
    path = write(tmp_path / "x.h5ad", adata)
    with pytest.raises(UserError, match="genes of the 5 columns of obsm/X_hvg are not known.*X_hvg_genes"):
        stored(path, tmp_path / "no", layer="obsm/X_hvg")
    adata.var["highly_variable"] = chosen
    store = stored(write(path, adata), tmp_path / "store", layer="obsm/X_hvg")
    assert list(store.genes) == [f"g{k}" for k in range(20) if k % 4 == 1]
    values = by_name(store)
    np.testing.assert_array_equal(values, adata[values.index].obsm["X_hvg"])
    adata.uns["X_hvg_genes"] = np.array(list("abcde"), object)
    listed = stored(write(path, adata), tmp_path / "listed", layer="obsm/X_hvg")
    assert list(listed.genes) == list("abcde")
    with pytest.raises(UserError, match="has no 'obsm/X_hgv'"):
        stored(path, tmp_path / "no", layer="obsm/X_hgv")
    with h5py.File(path, "r+") as file:  # the library would read what is missing as zeros
        del file["obsm/X_hvg"]
        file["obsm"].create_dataset("X_hvg", (adata.n_obs, 5), "f4", chunks=(50, 5))[:50] = 1
    with pytest.raises(UserError, match="'obsm/X_hvg'.*lacks|lacks.*'obsm/X_hvg'|incomplete"):
        stored(path, tmp_path / "no", layer="obsm/X_hvg")


def test_the_expression_of_a_mudata_file_is_read(tmp_path):
    adata, path = some_genes(6), tmp_path / "x.h5mu"
    proteins = ad.AnnData(np.ones((adata.n_obs, 2), np.float32), pd.DataFrame(index=adata.obs_names))
    with h5py.File(path, "w", userblock_size=512) as file:
        file.attrs["encoding-type"] = "MuData"
        ad.io.write_elem(file, "obs", pd.DataFrame(index=adata.obs_names))
        ad.io.write_elem(file, "var", pd.DataFrame(index=[*adata.var_names, "0", "1"]))
        for name, part in (("prot", proteins), ("rna", adata)):
            ad.io.write_elem(file.require_group("mod"), name, part)
    with path.open("r+b") as file:
        file.write(b"MuData (format-version=0.1.0;creator=mudata;creator-version=0.3.1)")
    store = stored(path, tmp_path / "store")
    plain = stored(write(tmp_path / "x.h5ad", adata), tmp_path / "plain")
    pd.testing.assert_frame_equal(by_name(store), by_name(plain))
    assert plan_screen(path, "tiny", []).screen.n_genes == 6
    with h5py.File(path, "r+") as file:
        file.move("mod/rna", "mod/atac")
    with pytest.raises(UserError, match="MuData file of atac, prot.*as h5ad"):
        stored(path, tmp_path / "no")


def test_a_list_of_genes_is_matched_after_doubled_ones_are_joined(tmp_path):
    adata = some_genes(4)
    adata.var_names = ["a", "b", "a", "c"]
    path, genes = write(tmp_path / "x.h5ad", adata), tmp_path / "genes.txt"
    genes.write_text("c\na\n")
    out = align_genes(path, genes, tmp_path / "out", config(duplicate_genes="sum"), write=tmp_path / "y.h5ad")
    found = ad.read_h5ad(tmp_path / "y.h5ad")
    assert list(found.var_names) == ["c", "a"]
    np.testing.assert_array_equal(
        found.X.toarray()[:, 1], adata.X[:, 0].toarray().ravel() + adata.X[:, 2].toarray().ravel()
    )
    assert (out / "alignment.csv").is_file()


def test_genes_get_their_symbols_by_a_table_of_aliases(tmp_path, caplog):
    adata, table = some_genes(6), tmp_path / "aliases.csv"
    adata.var_names = ["SEPT2", "b", "MARCH1", "SEPTIN2", "e", "f"]
    path = write(tmp_path / "x.h5ad", adata)
    table.write_text("alias,symbol\nMARCH1,MARCHF1\nnowhere,Z\nMARCH1,MARCHF1\n")
    with caplog.at_level("INFO"):
        store = stored(path, tmp_path / "one", gene_aliases=str(table))
    assert list(store.genes) == ["SEPT2", "b", "MARCHF1", "SEPTIN2", "e", "f"]
    assert "1 of 6 genes are renamed" in caplog.text
    record = json.loads((store.path / "manifest.json").read_text())
    assert set(record["inputs"]) == {"input 0", "gene aliases"}
    assert "gene_aliases" not in record["config"]["data"]
    table.write_text("alias,symbol\nSEPT2,SEPTIN2\n")
    with pytest.raises(UserError, match="one name .SEPTIN2: SEPT2, SEPTIN2.*data.duplicate_genes=sum"):
        stored(path, tmp_path / "two", gene_aliases=str(table))
    summed = stored(path, tmp_path / "two", gene_aliases=str(table), duplicate_genes="sum")
    assert list(summed.genes) == ["SEPTIN2", "b", "MARCH1", "e", "f"]
    both = by_name(store)[["SEPT2", "SEPTIN2"]].sum(axis=1)
    np.testing.assert_array_equal(by_name(summed)["SEPTIN2"], both)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alias,symbol\nA,B\nA,C\n", "two symbols .A."),
        ("alias,symbol\nA,\n", "line 2: a name is empty"),
        ("old,new\nA,B\n", "columns alias, symbol"),
    ],
)
def test_a_wrong_table_of_aliases_is_told(tmp_path, text, message):
    (tmp_path / "aliases.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_aliases(tmp_path / "aliases.csv")
