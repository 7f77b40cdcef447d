"""Reading: disk and memory agree with the counts and with scanpy, in any order of rows."""

import json
import shutil
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from parts_store import parts_store

from perturbdiff.runtime import outputs
from perturbdiff.runtime.errors import UserError
from perturbdiff.store import row_blocks, stored_rows
from perturbdiff.store import store as store_module
from perturbdiff.store.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store of four parts with many small shards."""
    folder = tmp_path_factory.mktemp("store")
    parts_store(folder)
    return folder


@pytest.fixture(params=["disk", "memory"])
def store(folder, request, monkeypatch):
    monkeypatch.setattr(stored_rows, "CACHE_BYTES", 1)  # requests are cut into batches
    monkeypatch.setattr(row_blocks, "_BITS", 5)  # and blocks of positions and depths end within a part
    opened = Store(folder / "store")
    return opened if request.param == "disk" else opened.in_memory()


@pytest.fixture(scope="module")
def expected(folder):
    """Log1p of the store's cells and genes by scanpy, dense."""
    adata = ad.read_h5ad(folder / "counts.h5ad")
    store = Store(folder / "store")
    sc.pp.normalize_total(adata, target_sum=store.target_sum)
    sc.pp.log1p(adata)
    return adata[store.obs(["cell"])["cell"], store.genes].X.toarray()


def test_expression_equals_scanpy(store, expected):
    got = store.expression(slice(None))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got.toarray(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["random", "repeated", "ordered", "one", "none", "slice", "list"])
def test_rows_in_any_order(store, expected, kind):
    rng = np.random.default_rng(0)
    rows = {
        "random": rng.permutation(store.n_cells)[:50],
        "repeated": rng.integers(0, store.n_cells, 300),
        "ordered": np.arange(3, 90, 7),
        "one": np.array([store.n_cells - 1]),
        "none": np.array([], int),
        "slice": slice(20, 170, 3),
        "list": [5, 4, 5],
    }[kind]
    got = store.expression(rows)
    np.testing.assert_allclose(got.toarray(), expected[rows], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(store.dense(rows), got.toarray())
    assert store.counts(rows).dtype == np.uint16
    factor = store.target_sum / store.n_counts[rows][:, None]
    np.testing.assert_allclose(np.log1p(store.counts(rows).toarray() * factor), got.toarray(), rtol=1e-5)


def test_dense_fills_a_given_buffer(store):
    out = np.full((3, store.n_genes), 7, np.float32)
    assert store.dense([1, 5, 9], out) is out
    np.testing.assert_array_equal(out, store.expression([1, 5, 9]).toarray())


def test_blocks_cover_the_store(store, expected):
    starts, blocks = zip(*store.blocks(37), strict=True)
    assert list(starts) == list(range(0, store.n_cells, 37))
    np.testing.assert_allclose(np.vstack([b.toarray() for b in blocks]), expected, rtol=1e-6, atol=1e-7)


def test_largest_values(store, expected):
    np.testing.assert_allclose(store.max_value(), expected.max(axis=0), rtol=1e-6)


def test_rows_outside_the_store(store):
    for rows in ([-1], [store.n_cells]):
        with pytest.raises(IndexError):
            store.expression(rows)


def test_positions_and_depths_are_read_where_rows_are_asked_for(folder, expected, monkeypatch):
    monkeypatch.setattr(row_blocks, "_BITS", 4)
    read = []
    fill = row_blocks.RowBlocks._fill
    monkeypatch.setattr(row_blocks.RowBlocks, "_fill", lambda self, w: read.append(w.sum()) or fill(self, w))
    store = Store(folder / "store")
    rows = np.arange(store.n_cells - 20, store.n_cells)
    np.testing.assert_allclose(store.expression(rows).toarray(), expected[rows], rtol=1e-6, atol=1e-7)
    assert max(read) <= 3
    missing = store._pointers._blocks._missing, store._depths._missing
    assert all(one.sum() >= store.n_cells // 16 - 3 for one in missing)
    np.testing.assert_array_equal(store.n_counts[rows], store.depths(rows))


def test_memory_needed_is_told(folder):
    store = Store(folder / "store").in_memory()
    held = store._data.nbytes + store._indices.nbytes + store._pointers.places.nbytes + store.n_counts.nbytes
    assert abs(store.nbytes_in_memory - held) <= 4 * 4  # each of four parts has one pointer more


def test_parts_open_in_anndata_and_scanpy_without_this_package(folder):
    store = Store(folder / "store")
    parts = sorted((folder / "store").glob("part-*.zarr"))
    assert len(parts) == 4
    rows = 0
    for path in parts:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            part = ad.read_zarr(path)
        assert (store.counts(slice(rows, rows + part.n_obs)) != part.X).nnz == 0
        facts = part.uns["perturbdiff"]
        assert facts["control"] == "control"
        assert facts["target_sum"] == store.target_sum
        table = facts["conditions"]
        for row in table.itertuples():
            assert (part.obs["perturbation"].iloc[row.start : row.stop] == row.perturbation).all()
            assert (part.obs["batch"].iloc[row.start : row.stop] == row.batch).all()
        assert list(part.obs["perturbation"].cat.categories) == ["control", "p1", "p2", "p3"]
        # normalised by the depth over all genes, as the store's own view
        part.X = part.X.astype(np.float32)
        factor = store.target_sum / part.obs["n_counts"].to_numpy()
        part.X = part.X.multiply(factor[:, None]).tocsr()
        sc.pp.log1p(part)
        view = store.expression(slice(rows, rows + part.n_obs)).toarray()
        np.testing.assert_allclose(part.X.toarray(), view, rtol=1e-5)
        sc.pp.pca(part, n_comps=5)
        rows += part.n_obs
    assert rows == store.n_cells


def test_obs_columns(folder):
    store = Store(folder / "store")
    obs = store.obs(["perturbation", "cell"])
    assert list(obs.columns) == ["perturbation", "cell"]
    assert list(obs.index) == list(range(store.n_cells))
    with pytest.raises(UserError, match="no obs column 'perturbations', did you mean 'perturbation'"):
        store.obs(["perturbations"])


def test_obs_in_pieces_is_obs(folder, monkeypatch):
    monkeypatch.setattr(store_module, "_ROWS_PER_PIECE", 7)
    store = Store(folder / "store")
    pieces = list(store.obs_pieces())
    assert [first for first, _ in pieces] == np.cumsum([0, *(len(piece) for _, piece in pieces)])[
        :-1
    ].tolist()
    pd.testing.assert_frame_equal(pd.concat([piece for _, piece in pieces], ignore_index=True), store.obs())


def test_what_is_not_a_store(folder, tmp_path):
    with pytest.raises(UserError, match="store not found"):
        Store(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a finished store"):
        Store(tmp_path)
    with pytest.raises(UserError, match="this is an h5ad file of cells, not a store"):
        Store(folder / "counts.h5ad")


@pytest.mark.parametrize("gone", ["X/indptr", "X/indptr/c", "X/data", "obs/n_counts", "obs"])
def test_damaged_parts(folder, tmp_path, gone):
    copy = tmp_path / "copy"
    shutil.copytree(folder / "store", copy)
    shutil.rmtree(copy / "part-0001.zarr" / gone)
    with pytest.raises(UserError, match="is missing|are damaged"):
        store = Store(copy)
        store.expression(slice(None))
        store.obs()


def test_other_format_and_missing_parts(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder / "store", copy)
    manifest = copy / "manifest.json"
    text = manifest.read_text()
    record = json.loads(text)
    record["results"]["store"]["format"] = 99
    manifest.write_text(json.dumps(outputs.sealed(record)))
    with pytest.raises(UserError, match="store format 99"):
        Store(copy)
    manifest.write_text(text)
    shutil.rmtree(copy / "part-0002.zarr")
    with pytest.raises(UserError, match=r"parts are missing \(part-0002.zarr\)"):
        Store(copy)
