"""Gene selection against scanpy, in memory, with the same recipe, for all flavors."""

import logging
import pickle
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
from memory_passes import choose, compare_by_batch
from published import published

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_sums import GeneSums
from perturbdiff.genes.selection import check_flavor, choose_genes, read_gene_list
from perturbdiff.preprocessing import passes
from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store

FLAVORS = ("seurat", "cell_ranger", "seurat_v3")


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


def transcriptome(cells=2000, genes=20_000):
    """Counts of about 1,000 genes per cell: draws from the profiles of 30 states, shifted by batch."""
    rng = np.random.default_rng(0)
    mean, dispersion = rng.lognormal(0, 1.9, genes), rng.gamma(2, 0.5, genes)
    states = mean * rng.gamma(1 / dispersion, dispersion, (30, genes))
    batch, state = rng.integers(0, 3, cells), rng.integers(0, 30, cells)
    shift = rng.lognormal(0, 0.25, (3, genes))
    rows, columns = [], []
    for cell in range(cells):
        weights = np.cumsum(states[state[cell]] * shift[batch[cell]])
        drawn = np.searchsorted(weights, rng.random(int(2500 * rng.lognormal(0, 0.35))) * weights[-1])
        rows.append(np.full(len(drawn), cell))
        columns.append(drawn)
    place = np.concatenate(rows), np.concatenate(columns)
    x = sp.coo_matrix((np.ones(len(place[0]), np.float32), place), shape=(cells, genes)).tocsr()
    obs = pd.DataFrame({"batch": [f"b{k}" for k in batch]}, index=[f"c{i}" for i in range(cells)])
    return ad.AnnData(x, obs, pd.DataFrame(index=[f"g{i}" for i in rng.permutation(genes)]))


def real():
    cells = ad.read_h5ad(published("kang18-ifnb"))
    cells = cells[np.sort(np.random.default_rng(0).choice(cells.n_obs, 420, replace=False))]
    obs = pd.DataFrame({"batch": cells.obs["donor"].to_numpy(str)}, index=[f"c{i}" for i in range(420)])
    values = sp.csr_matrix(cells.X, dtype=np.float32)
    return ad.AnnData(values, obs, pd.DataFrame(index=cells.var_names.astype(object)))


def scanpy_table(adata, num, batch_key=None, target_sum=None, flavor="seurat"):
    if batch_key:
        compare_by_batch(flavor)
    adata = adata.copy()
    if flavor != "seurat_v3":
        sc.pp.normalize_total(adata, target_sum=target_sum)
        sc.pp.log1p(adata)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sc.pp.highly_variable_genes(adata, n_top_genes=num, flavor=flavor, batch_key=batch_key)
    return adata.var


def our_table(adata, scratch, num, *, flavor="seurat", by_batch=False, scale="counts", **how):
    config = DataConfig(num_hvgs=num, hvg_flavor=flavor, hvg_by_batch=by_batch, input_scale=scale)
    return choose(adata.X, list(adata.var_names), adata.obs["batch"], config, scratch, **how)


def assert_same(ours, theirs):
    assert list(ours.index) == list(theirs.index)
    np.testing.assert_array_equal(ours["highly_variable"], theirs["highly_variable"])
    left_out = {"highly_variable_intersection"}  # of no use to a choice of the top genes
    assert set(theirs.columns) - left_out == set(ours.columns)
    for column in set(ours.columns) - {"highly_variable"}:
        np.testing.assert_allclose(
            ours[column].astype(float), theirs[column].astype(float), rtol=2e-3, atol=5e-4, err_msg=column
        )


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("target_sum", [None, 1e4])
def test_choice_equals_scanpy(tmp_path, flavor, by_batch, target_sum):
    adata = counts(1)
    ours = our_table(adata, tmp_path, 60, flavor=flavor, by_batch=by_batch, target_sum=target_sum)
    theirs = scanpy_table(adata, 60, "batch" if by_batch else None, target_sum, flavor)
    assert_same(ours, theirs)
    assert ours["highly_variable"].sum() == 60


@pytest.fixture(scope="module")
def full():
    return transcriptome()


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_full_transcriptome_equals_scanpy(full, tmp_path, flavor, by_batch):
    assert full.shape[1] == 20_000
    assert 700 < full.X.nnz / full.n_obs < 1500
    assert (full.X.sum(axis=0) == 0).any()
    ours = our_table(full, tmp_path, 2000, flavor=flavor, by_batch=by_batch, pieces=4, block_rows=300)
    theirs = scanpy_table(full, 2000, "batch" if by_batch else None, None, flavor)
    np.testing.assert_array_equal(ours["highly_variable"], theirs["highly_variable"])
    assert ours["highly_variable"].sum() == 2000


@pytest.mark.parametrize("num", [100, 500])
@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_real_counts_equal_scanpy(tmp_path, flavor, by_batch, num):
    adata = real()
    ours = our_table(adata, tmp_path, num, flavor=flavor, by_batch=by_batch)
    assert_same(ours, scanpy_table(adata, num, "batch" if by_batch else None, None, flavor))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_pieces_and_blocks_do_not_change_the_choice(tmp_path, flavor):
    adata = counts(2)
    once = our_table(adata, tmp_path, 60, flavor=flavor, by_batch=True, pieces=1, block_rows=10_000)
    for pieces, rows in ((2, 50), (7, 13), (240, 1)):
        again = our_table(adata, tmp_path, 60, flavor=flavor, by_batch=True, pieces=pieces, block_rows=rows)
        if flavor == "seurat_v3":  # sums of whole numbers are exact
            pd.testing.assert_frame_equal(again, once, check_exact=True)
        else:
            pd.testing.assert_frame_equal(again, once, rtol=1e-9)


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("flavor", ["seurat", "seurat_v3"])
def test_ties_and_undetected_genes_equal_scanpy(tmp_path, flavor, by_batch):
    adata = counts(4)
    x = adata.X.toarray()
    x[:, 100:200] = x[:, :100]  # every one of these genes has a twin, so that the cut falls within a pair
    x[:, 290:] = 0
    x[:, 280:290] = 0
    x[np.arange(10), np.arange(280, 290)] = 1  # detected once
    adata.X = sp.csr_matrix(x)
    for num in (42, 43):
        theirs = scanpy_table(adata, num, "batch" if by_batch else None, None, flavor)
        ours = our_table(adata, tmp_path, num, flavor=flavor, by_batch=by_batch)
        np.testing.assert_array_equal(ours["highly_variable"], theirs["highly_variable"])
        if flavor == "seurat":
            assert_same(ours, theirs)


@pytest.mark.parametrize("by_batch", [False, True])
def test_cell_ranger_with_ties_and_a_few_undetected_genes(tmp_path, by_batch):
    adata = counts(4)
    x = adata.X.toarray()
    x[:, 100:200] = x[:, :100]
    x[:, 290:] = 0
    adata.X = sp.csr_matrix(x)
    for num in (42, 43):
        theirs = scanpy_table(adata, num, "batch" if by_batch else None, None, "cell_ranger")
        assert_same(our_table(adata, tmp_path, num, flavor="cell_ranger", by_batch=by_batch), theirs)


def test_cell_ranger_takes_many_undetected_genes_where_scanpy_fails(tmp_path):
    adata = counts(4)
    adata.X = sp.csr_matrix(adata.X.toarray() * (np.arange(300) < 200))
    with pytest.raises(ValueError, match="must be unique"):
        scanpy_table(adata, 40, flavor="cell_ranger")
    table = our_table(adata, tmp_path, 40, flavor="cell_ranger")
    assert table["highly_variable"].sum() == 40
    assert not table["highly_variable"].to_numpy()[200:].any()


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("flavor", ["seurat", "cell_ranger"])
def test_log1p_input_equals_scanpy(tmp_path, flavor, by_batch):
    adata = counts(5)
    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)
    theirs = adata.copy()
    sc.pp.highly_variable_genes(
        theirs, n_top_genes=50, flavor=flavor, batch_key="batch" if by_batch else None
    )
    assert_same(our_table(adata, tmp_path, 50, flavor=flavor, by_batch=by_batch, scale="log1p"), theirs.var)


def test_seurat_v3_needs_counts():
    check_flavor(DataConfig(hvg_flavor="cell_ranger", input_scale="log1p"))
    with pytest.raises(UserError, match=r"hvg_flavor=seurat_v3 needs raw counts.*input_scale is log1p"):
        check_flavor(DataConfig(hvg_flavor="seurat_v3", input_scale="log1p"))


def test_seurat_v3_with_too_few_genes_for_the_fit(tmp_path):
    adata = counts(5)[:, :4]
    with pytest.raises(
        UserError, match=r"fit of variance on mean fails in the data \(4 varying genes, 240 cells\)"
    ):
        our_table(adata, tmp_path, 2, flavor="seurat_v3")


def test_seurat_v3_clips_counts(tmp_path):
    adata = counts(8)
    x = adata.X.toarray()
    x[0, :40] += 5000
    adata.X = sp.csr_matrix(x)
    assert_same(
        our_table(adata, tmp_path, 60, flavor="seurat_v3"), scanpy_table(adata, 60, flavor="seurat_v3")
    )


@pytest.mark.parametrize("flavor", FLAVORS)
def test_training_cells_only(tmp_path, flavor):
    adata = counts(6)
    held_out = ((adata.obs["batch"] == "b1") & (adata.obs["perturbation"] != "control")).to_numpy()
    for by_batch in (False, True):
        theirs = scanpy_table(adata[~held_out], 60, "batch" if by_batch else None, None, flavor)
        ours = our_table(adata, tmp_path, 60, flavor=flavor, by_batch=by_batch, hidden=held_out)
        assert_same(ours, theirs)
    assert not our_table(adata, tmp_path, 60, flavor=flavor)["highly_variable"].equals(
        theirs["highly_variable"]
    )


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_batch_of_one_cell_and_an_empty_one_choose_nothing(tmp_path, flavor, caplog):
    adata = counts(9)
    adata.obs["batch"] = np.where(np.arange(240) == 5, "alone", "many")
    how = {"flavor": flavor, "by_batch": True, "target_sum": 1000.0}
    table = our_table(adata, tmp_path, 60, **how)
    assert table["highly_variable"].sum() == 60
    assert table["highly_variable_nbatches"].max() == 1
    assert ("a single cell or without variance" in caplog.text) == (flavor == "seurat_v3")
    hidden = (adata.obs["batch"] == "alone").to_numpy()
    again = our_table(adata, tmp_path, 60, hidden=hidden, **how)
    assert again["highly_variable_nbatches"].equals(table["highly_variable_nbatches"])


@pytest.mark.parametrize("flavor", FLAVORS)
def test_fewer_genes_than_asked_for_keeps_all_and_says_so(tmp_path, caplog, flavor):
    adata = counts(7)
    adata.X = sp.csr_matrix(adata.X.toarray() * (np.arange(300) < 250))
    table = our_table(adata, tmp_path, 5000, flavor=flavor)
    assert table["highly_variable"].all()
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "data.num_hvgs is 5000 but there are 300 genes: all are kept"
    ]


def test_sums_travel_as_arrays():
    rng = np.random.default_rng(0)
    parts = []
    for batch in (0, 2):
        part = GeneSums(4, 5)
        part.values[batch], part.cells[batch] = rng.random((5, 3)), 7
        parts.append(part)
    arrays = parts[0].arrays()
    assert arrays["sums_values"].shape == (1, 5, 3)  # the other three batches have no cells
    whole = GeneSums.from_arrays(p.arrays() for p in parts)
    np.testing.assert_array_equal(whole.values, parts[0].values + parts[1].values)
    assert whole.cells.tolist() == [7, 0, 7, 0]
    np.testing.assert_array_equal(whole.pooled().values[0], whole.values.sum(axis=0))


def test_nothing_to_choose_by():
    with pytest.raises(UserError, match="no gene is detected in any cell that gene selection may look at"):
        choose_genes(GeneSums(1, 3), ["a", "b", "c"], 1.0, 2, by_batch=False)


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_store_has_the_genes_scanpy_chooses(tmp_path, monkeypatch, flavor, by_batch):
    monkeypatch.setattr(passes, "VALUES_PER_PIECE", 10_000)
    adata = counts(3)
    adata.write_h5ad(tmp_path / "x.h5ad")
    config = DataConfig(num_hvgs=50, hvg_flavor=flavor, hvg_by_batch=by_batch)
    out = preprocess([tmp_path / "x.h5ad"], tmp_path / "store", config, machine=Machine(jobs=1))
    theirs = scanpy_table(adata, 50, "batch" if by_batch else None, None, flavor)
    assert Store(out).genes == list(adata.var_names[theirs["highly_variable"]])


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
        ("", "names no gene"),
        ("a\na\n", "names a gene twice"),
    ],
)
def test_bad_gene_lists(tmp_path, text, message):
    (tmp_path / "genes.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_gene_list(tmp_path / "genes.txt", ["a", "b"])


def test_a_pickled_gene_list_is_not_opened(tmp_path):
    (tmp_path / "genes.pkl").write_bytes(pickle.dumps(["a", "b"]))
    with pytest.raises(UserError, match=r"genes\.pkl: is a pickle, which is not read here; give a text file"):
        read_gene_list(tmp_path / "genes.pkl", ["a", "b"])
