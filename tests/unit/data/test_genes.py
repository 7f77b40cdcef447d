"""Gene selection against scanpy, in memory, with the same recipe."""

import logging

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp

from perturbdiff.config import DataConfig
from perturbdiff.data.counts import Inputs
from perturbdiff.data.genes import choose_genes, read_gene_list
from perturbdiff.data.labels import read_labels
from perturbdiff.data.preprocess import preprocess
from perturbdiff.data.scan import median_depth, scan_cells
from perturbdiff.data.store import Store
from perturbdiff.errors import UserError


@pytest.fixture(autouse=True)
def _heard(monkeypatch):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)


def counts(seed, cells=240, genes=300):
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 3, cells)
    mean = rng.lognormal(-0.5, 1.2, genes)
    shift = np.where(rng.random((3, genes)) < 0.1, rng.lognormal(0, 1, (3, genes)), 1.0)
    depth = rng.lognormal(0, 0.4, cells)[:, None]
    x = rng.negative_binomial(2, 2 / (2 + mean * shift[group] * depth)).astype(np.float32)
    obs = pd.DataFrame({"batch": [f"b{g}" for g in group]}, index=[f"c{i}" for i in range(cells)])
    obs["cell_type"] = rng.choice(["B", "T"], cells)
    obs["perturbation"] = rng.choice(["control", "p1", "p2"], cells)
    # gene names out of alphabetical order: scanpy breaks ties by name when it combines batches
    return ad.AnnData(sp.csr_matrix(x), obs, pd.DataFrame(index=[f"g{i}" for i in rng.permutation(genes)]))


def scanpy_table(adata, num, batch_key=None, target_sum=None):
    adata = adata.copy()
    sc.pp.normalize_total(adata, target_sum=target_sum)
    sc.pp.log1p(adata)
    sc.pp.highly_variable_genes(adata, n_top_genes=num, flavor="seurat", batch_key=batch_key)
    return adata.var


def our_table(adata, tmp_path, num, look=None, **settings):
    path = tmp_path / "in.h5ad"
    adata.write_h5ad(path)
    config = DataConfig(num_hvgs=num, **settings)
    with Inputs([path], config, tmp_path) as inputs:
        labels = read_labels(inputs)
        look = np.ones(len(labels.conditions), bool) if look is None else look(labels.conditions)
        scan = scan_cells(inputs, labels, look)
        target = median_depth(scan, look) if config.target_sum == "median" else config.target_sum
        return choose_genes(scan.sums, inputs.genes, target, num, by_batch=config.hvg_by_batch)


def assert_same(ours, theirs):
    assert list(ours.index) == list(theirs.index)
    np.testing.assert_array_equal(ours["highly_variable"], theirs["highly_variable"])
    for column in ("means", "dispersions", "dispersions_norm"):
        np.testing.assert_allclose(ours[column], theirs[column], rtol=2e-4, atol=2e-5, err_msg=column)


@pytest.mark.parametrize(("by_batch", "target_sum"), [(False, "median"), (True, "median"), (True, 1e4)])
def test_choice_equals_scanpy(tmp_path, by_batch, target_sum):
    adata = counts(1)
    ours = our_table(adata, tmp_path, 60, hvg_by_batch=by_batch, target_sum=target_sum)
    given = None if target_sum == "median" else target_sum
    theirs = scanpy_table(adata, 60, "batch" if by_batch else None, given)
    assert_same(ours, theirs)
    if by_batch:
        np.testing.assert_array_equal(ours["highly_variable_nbatches"], theirs["highly_variable_nbatches"])


@pytest.mark.parametrize("by_batch", [False, True])
def test_ties_and_undetected_genes_equal_scanpy(tmp_path, by_batch):
    adata = counts(4)
    x = adata.X.toarray()
    x[:, 100:200] = x[:, :100]  # every one of these genes has a twin, so that the cut falls within a pair
    x[:, 290:] = 0
    x[:, 280:290] = 0
    x[np.arange(10), np.arange(280, 290)] = 1  # detected once
    adata.X = sp.csr_matrix(x)
    for num in (42, 43):
        theirs = scanpy_table(adata, num, "batch" if by_batch else None)
        assert_same(our_table(adata, tmp_path, num, hvg_by_batch=by_batch), theirs)


def test_log1p_input_equals_scanpy(tmp_path):
    adata = counts(5)
    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)
    theirs = adata.copy()
    sc.pp.highly_variable_genes(theirs, n_top_genes=50)
    assert_same(our_table(adata, tmp_path, 50, input_scale="log1p", target_sum=1.0), theirs.var)


def test_training_cells_only(tmp_path):
    adata = counts(6)
    held_out = (adata.obs["batch"] == "b1") & (adata.obs["perturbation"] != "control")
    theirs = scanpy_table(adata[~held_out], 60)

    def look(table):
        return ~((table["batch"] == "b1") & (table["perturbation"] != "control")).to_numpy()

    assert_same(our_table(adata, tmp_path, 60, look), theirs)
    assert not our_table(adata, tmp_path, 60)["highly_variable"].equals(theirs["highly_variable"])


def test_fewer_genes_than_asked_for_keeps_all_and_says_so(tmp_path, caplog):
    adata = counts(7)
    adata.X = sp.csr_matrix(adata.X.toarray() * (np.arange(300) < 250))
    table = our_table(adata, tmp_path, 5000)
    assert table["highly_variable"].all()
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "data.num_hvgs is 5000 but there are 300 genes: all are kept"
    ]


def test_training_only_needs_a_split(counts_file, tmp_path):
    with pytest.raises(UserError, match="needs a split"):
        preprocess([counts_file], tmp_path / "store", DataConfig(hvg_cells="train"))
    assert not (tmp_path / "store").exists()


def test_held_out_cells_do_not_influence_genes_and_depth(counts_file, tmp_path):
    adata = ad.read_h5ad(counts_file)
    held_out = ((adata.obs["batch"] == "d2") & (adata.obs["perturbation"] == "p1")).to_numpy()
    split = adata.obs[["cell_type", "batch", "perturbation"]].astype(str).drop_duplicates()
    leave = (split["batch"] == "d2") & (split["perturbation"] == "p1")
    split["part"] = np.where(leave, "test", "train")
    split["n_cells"] = 1
    split.to_parquet(tmp_path / "split.parquet")
    config = DataConfig(num_hvgs=20, hvg_cells="train")
    stores = []
    for name, factor in (("a", 1), ("b", 7)):
        changed = adata.copy()
        changed.X = sp.csr_matrix(adata.X.toarray() * np.where(held_out, factor, 1)[:, None])
        changed.write_h5ad(tmp_path / f"{name}.h5ad")
        preprocess([tmp_path / f"{name}.h5ad"], tmp_path / name, config, split=tmp_path / "split.parquet")
        stores.append(Store(tmp_path / name))
    assert stores[0].genes == stores[1].genes
    assert stores[0].target_sum == stores[1].target_sum
    columns = ["means", "dispersions", "dispersions_norm"]
    pd.testing.assert_frame_equal(stores[0].var[columns], stores[1].var[columns])


def test_gene_list_keeps_its_order_and_reports_unknown(counts_file, tmp_path, caplog):
    (tmp_path / "genes.txt").write_text("# chosen\ng7\nother\ng3\n\ng50\n")
    store = Store(preprocess([counts_file], tmp_path / "store", DataConfig(), genes=tmp_path / "genes.txt"))
    assert store.genes == ["g7", "g3", "g50"]
    assert "1 genes are not in the data and left out (other)" in caplog.text
    cells = store.obs(["cell"])["cell"]
    expected = ad.read_h5ad(counts_file)[cells][:, store.genes].X
    assert (store.counts(slice(None)) != expected).nnz == 0


def test_genes_that_no_cell_expresses(counts_file, tmp_path):
    adata = ad.read_h5ad(counts_file)
    adata.X = sp.csr_matrix(adata.X.toarray() * (np.arange(80) != 7))
    adata.write_h5ad(tmp_path / "x.h5ad")
    (tmp_path / "genes.txt").write_text("g7\n")
    out = preprocess([tmp_path / "x.h5ad"], tmp_path / "one", DataConfig(), genes=tmp_path / "genes.txt")
    assert Store(out).expression(slice(None)).nnz == 0
    adata.X = sp.csr_matrix(adata.X.shape, dtype=np.float32)
    adata.write_h5ad(tmp_path / "x.h5ad")
    with pytest.raises(UserError, match="no gene is detected|has any counts"):
        preprocess([tmp_path / "x.h5ad"], tmp_path / "none", DataConfig())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x\ny\n", "none of its 2 genes is in the data"),
        ("", "none of its 0 genes"),
        ("a\na\n", "names a gene twice"),
    ],
)
def test_bad_gene_lists(tmp_path, text, message):
    (tmp_path / "genes.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_gene_list(tmp_path / "genes.txt", ["a", "b"])
