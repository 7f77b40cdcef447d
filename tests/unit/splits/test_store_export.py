"""An exported file is the store's AnnData in memory, whatever was chosen and however it was cut."""

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from small_store import small_store

from perturbdiff.runtime.errors import UserError
from perturbdiff.splits import store_export
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.splits.store_export import export
from perturbdiff.store.store import Store
from perturbdiff.store.views import to_anndata


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perturbdiff.preprocessing.preprocessing_stage.CELLS_PER_PART", (60, 60))
        return small_store(tmp_path_factory.mktemp("export"), ["data.extra_obs=[]"])


def read(path):
    return ad.read_h5ad(path) if path.suffix == ".h5ad" else ad.read_zarr(path)


def equal(found, expected):
    assert found.X.dtype == expected.X.dtype
    assert (found.X != expected.X).nnz == 0
    pd.testing.assert_frame_equal(found.obs, expected.obs, check_index_type=False)
    pd.testing.assert_frame_equal(found.var, expected.var, check_index_type=False)
    assert found.uns["perturbdiff"] == expected.uns["perturbdiff"]


@pytest.mark.parametrize("scale", ["log1p", "counts", "model"])
@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_round_trip(made, tmp_path, monkeypatch, suffix, scale):
    monkeypatch.setattr(store_export, "_ROWS", 32)
    monkeypatch.setattr(store_export, "_ROWS_PER_BLOCK", 23)
    out = export(made.store, tmp_path / f"x{suffix}", scale=scale)
    found = read(out)
    equal(found, to_anndata(made.opened, scale=scale))
    found.X = found.X.astype(np.float32)
    sc.pp.pca(found, n_comps=3)


def test_chosen_labels(made, tmp_path):
    labels = {"perturbation": ["p1", "control"], "batch": ["d2"], "cell_type": []}
    found = read(export(made.store, tmp_path / "x.h5ad", labels=labels))
    obs = made.opened.obs()
    rows = np.flatnonzero(obs["perturbation"].isin(["p1", "control"]) & (obs["batch"] == "d2"))
    assert 0 < len(rows) < len(obs)
    equal(found, to_anndata(made.opened, rows=rows))


def test_a_part_of_a_split(made, tmp_path):
    found = read(export(made.store, tmp_path / "x.zarr", split=made.split, part="test"))
    table = made.opened.conditions
    own = table[parts(table, read_split(made.split)) == "test"]
    rows = np.concatenate([np.arange(a, b) for a, b in zip(own["start"], own["stop"], strict=True)])
    equal(found, to_anndata(made.opened, rows=rows))


@pytest.mark.parametrize("compression", ["gzip", "lzf", "none"])
def test_compression(made, tmp_path, compression):
    out = export(made.store, tmp_path / "x.h5ad", compression=compression)
    with h5py.File(out) as file:
        assert file["X/data"].compression == (None if compression == "none" else compression)


def test_equal_exports_are_equal_and_not_repeated(made, tmp_path):
    first = export(made.store, tmp_path / "x.h5ad")
    before = first.stat().st_mtime_ns
    assert export(made.store, first).stat().st_mtime_ns == before
    export(made.store, first, scale="counts")
    assert first.stat().st_mtime_ns != before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": {"perturbation": ["p11"]}}, "no perturbation 'p11', did you mean 'p1'"),
        ({"part": "test"}, "--part and --split belong together"),
        ({"scale": "raw"}, "scale 'raw'"),
    ],
)
def test_what_cannot_be_exported(made, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        export(made.store, tmp_path / "x.h5ad", **settings)
    assert list(tmp_path.iterdir()) == []


def test_more_that_cannot_be_exported(made, tmp_path):
    with pytest.raises(UserError, match="give the output the ending"):
        export(made.store, tmp_path / "x.csv")
    with pytest.raises(UserError, match="no condition is in part 'unused'"):
        export(made.store, tmp_path / "x.h5ad", split=made.split, part="unused")
    with pytest.raises(UserError, match="store not found"):
        export(tmp_path / "nowhere", tmp_path / "x.h5ad")
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_values(tmp_path):
    """Cells whose counts are all in genes that were not kept."""
    made = small_store(tmp_path)
    store = Store(made.store)
    reader = store_export.ObsReader(store)
    assert reader.count_values(np.arange(store.n_cells)) == store.n_values
    assert reader.count_values(np.array([], np.int64)) == 0
    writer = store_export.H5Writer(
        tmp_path / "e.h5ad", (2, store.n_genes), 0, np.dtype("u2"), np.dtype("i4"), "gzip"
    )
    writer.append(reader.take(np.arange(2)), np.zeros(3, int), np.empty(0, int), np.empty(0, int))
    writer.close(store.var, {})
    assert ad.read_h5ad(tmp_path / "e.h5ad").X.nnz == 0
