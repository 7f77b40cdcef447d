"""A store as AnnData and as dask array: the same numbers in memory, lazily, and by scanpy."""

import warnings

import anndata as ad
import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from parts_store import parts_store
from scipy import sparse
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.runtime.errors import UserError
from perturbdiff.store import Store, to_anndata, to_dask
from perturbdiff.store.views import CSRRows

ROWS = 50


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(parts_store(tmp_path_factory.mktemp("views")))


@pytest.fixture(scope="module")
def dense(store):
    return store.expression(slice(None)).toarray()


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="synchronous"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def test_in_memory(store, dense):
    adata = to_anndata(store)
    assert isinstance(adata.X, sparse.csr_matrix)
    np.testing.assert_array_equal(adata.X.toarray(), dense)
    expected = store.obs()
    assert list(adata.obs_names) == list(expected.pop("cell"))
    pd.testing.assert_frame_equal(adata.obs.reset_index(drop=True), expected)
    pd.testing.assert_frame_equal(adata.var, store.var, check_index_type=False)
    assert adata.uns["perturbdiff"]["scale"] == "log1p"
    assert adata.uns["perturbdiff"]["target_sum"] == store.target_sum
    assert list(to_anndata(store, columns=["batch"]).obs) == ["batch"]


def test_scales(store, dense):
    np.testing.assert_array_equal(
        to_anndata(store, scale="counts").X.toarray(), store.counts(slice(None)).toarray()
    )
    assert to_dask(store, scale="counts").dtype == np.uint16
    for x in (to_anndata(store, scale="model").X, to_dask(store, scale="model").compute()):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x.toarray(), dense / 10, rtol=1e-6)
    with pytest.raises(UserError, match="scale 'raw': choose one of"):
        to_anndata(store, scale="raw")


def test_a_store_of_log1p_values_has_no_counts(tmp_path):
    adata = tiny_counts()
    adata.X.data = np.log1p(adata.X.data)
    store = Store(parts_store(tmp_path, DataConfig(input_scale="log1p", num_hvgs=40), adata))
    assert to_anndata(store, lazy=True).X.compute().nnz == store.n_values
    assert "target_sum" not in to_anndata(store).uns["perturbdiff"]
    with pytest.raises(UserError, match="holds log1p values, no counts"):
        to_dask(store, scale="counts")


def test_dask_blocks(store, dense):
    x = to_dask(store, rows_per_block=ROWS)
    assert x.chunks == ((50, 50, 50, 50, store.n_cells - 200), (40,))
    assert x.dtype == np.float32
    assert isinstance(x.blocks[1].compute(), sparse.csr_matrix)
    np.testing.assert_array_equal(x.compute().toarray(), dense)
    full = to_dask(store, rows_per_block=ROWS, dense=True)
    np.testing.assert_array_equal(full.compute(), dense)
    np.testing.assert_array_equal(
        to_dask(store, dense=True, scale="counts").compute(), store.counts(slice(None)).toarray()
    )
    assert to_dask(store).name != to_dask(store, scale="model").name


@pytest.mark.parametrize(
    "rows", [slice(20, 170), slice(170, 20), slice(3, 99, 7), [5, 3, 3, 150], np.array([], int)]
)
def test_some_rows(store, dense, rows):
    expected = dense[rows]
    np.testing.assert_array_equal(to_dask(store, rows=rows, rows_per_block=40).compute().toarray(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one cell twice
        for lazy in (False, True):
            adata = to_anndata(store, rows=rows, lazy=lazy)
            assert list(adata.obs_names) == list(store.obs(["cell"])["cell"].iloc[rows])
            x = adata.X.compute() if lazy else adata.X
            np.testing.assert_array_equal(x.toarray(), expected)


REDUCTIONS = {
    "sum of genes": lambda x: x.sum(axis=0),
    "sum of cells": lambda x: x.sum(axis=1),
    "sum of all": lambda x: x.sum(),
    "sum kept": lambda x: x.sum(axis=0, keepdims=True),
    "mean": lambda x: x.mean(axis=0),
    "mean of all": lambda x: x.mean(),
    "largest": lambda x: x.max(axis=0),
    "smallest of cells": lambda x: x.min(axis=1),
    "variance": lambda x: x.var(axis=0),
    "deviation": lambda x: x.std(axis=1),
    "positive": lambda x: (x > 0).sum(axis=0),
    "some genes": lambda x: x[:, [1, 4]].sum(axis=0),
    "some cells": lambda x: x[np.arange(x.shape[0]) % 3 == 0].sum(axis=0),
    "a window": lambda x: x[10:130].mean(axis=0),
    "double": lambda x: (x * 2).sum(axis=0),
    "expm1": lambda x: np.expm1(x).sum(axis=0),
    "float64": lambda x: x.astype(np.float64).sum(axis=1),
    "product": lambda x: x.dot(np.ones((40, 3), np.float32)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_equal_numpy(store, dense, name):
    got = REDUCTIONS[name](to_dask(store, rows_per_block=ROWS))
    expected = np.asarray(REDUCTIONS[name](dense))
    assert got.shape == expected.shape
    np.testing.assert_allclose(np.asarray(got.compute()), expected, rtol=1e-4, atol=1e-6)


def test_blocks_joined_differently(store, dense):
    x = to_dask(store, rows_per_block=ROWS)
    for chunks in ((33, -1), (40, 16)):
        np.testing.assert_allclose(x.rechunk(chunks).sum(axis=0).compute(), dense.sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(da.concatenate([x, x]).mean(axis=0).compute(), dense.mean(axis=0), rtol=1e-5)


def test_matrix_methods_stay_scipys(dense):
    rows, plain = CSRRows(dense), sparse.csr_matrix(dense)
    for axis in (None, 0, 1):
        for method in ("sum", "mean", "max", "min"):
            got, expected = getattr(rows, method)(axis=axis), getattr(plain, method)(axis=axis)
            assert type(got) is type(expected)
    assert (rows - plain).nnz == 0


def test_threads_share_a_store(store, dense):
    with dask.config.set(scheduler="threads", num_workers=4):
        got = to_dask(store, rows_per_block=7).sum(axis=1).compute()
    np.testing.assert_allclose(got, dense.sum(axis=1), rtol=1e-5)


def test_graph_does_not_grow_with_cells(store):
    import pickle

    small = to_dask(store, rows_per_block=ROWS)
    assert len(pickle.dumps(small)) < 20_000
    assert len(small.__dask_graph__()) <= 4 * small.npartitions + 4


def test_scanpy_on_a_lazy_view_equals_scanpy_in_memory(store):
    lazy, plain = (to_anndata(store, lazy=z, rows_per_block=ROWS, scale="counts") for z in (True, False))
    for adata in (lazy, plain):
        adata.X = adata.X.astype(np.float32)
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
        sc.pp.highly_variable_genes(adata, n_top_genes=10)
        sc.pp.pca(adata, n_comps=4, svd_solver="covariance_eigh", mask_var=None)
        sc.pp.calculate_qc_metrics(adata, inplace=True, percent_top=None)
    np.testing.assert_allclose(lazy.X.compute().toarray(), plain.X.toarray(), rtol=1e-5)
    for column in ("means", "dispersions", "dispersions_norm"):  # ties at the cut are rounding's
        np.testing.assert_allclose(lazy.var[column], plain.var[column], rtol=1e-4)
    components = np.abs(np.asarray(lazy.obsm["X_pca"]))
    np.testing.assert_allclose(components, np.abs(plain.obsm["X_pca"]), atol=1e-3)


def test_subsets_and_copies_of_a_lazy_view(store, dense):
    adata = to_anndata(store, lazy=True, rows_per_block=ROWS)
    own = (adata.obs["perturbation"] == "p1").to_numpy()
    np.testing.assert_allclose(adata[own].X.sum(axis=0).compute(), dense[own].sum(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(adata[own].to_memory().X.toarray(), dense[own])


@pytest.mark.parametrize("kind", ["h5ad", "zarr"])
def test_a_lazy_view_can_be_written(store, dense, tmp_path, kind):
    adata = to_anndata(store, lazy=True, rows_per_block=ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (adata.write_h5ad if kind == "h5ad" else adata.write_zarr)(tmp_path / "x")
        found = ad.read_h5ad(tmp_path / "x") if kind == "h5ad" else ad.read_zarr(tmp_path / "x")
    np.testing.assert_array_equal(found.X.toarray(), dense)
    pd.testing.assert_frame_equal(found.obs, adata.obs, check_index_type=False)
