import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from scipy import sparse
from small_store import small_store

from perturbdiff import predictions
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import read_split


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("predictions"))


def block(n, genes, seed=0):
    return sparse.random(n, genes, 0.4, "csr", dtype=np.float32, random_state=seed)


def labels(n, perturbation="p2", cell_type="T", batch="d2", **more):
    return pd.DataFrame(
        {"perturbation": perturbation, "cell_type": cell_type, "batch": batch, **more}, index=range(n)
    )


def writer(path, genes, **kwargs):
    facts = {"method": "m", "control": "control", "target_sum": 1e4, "dataset": "d"}
    return predictions.PredictionWriter(path, genes, **(facts | kwargs))


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_blocks_come_back_as_anndata(small, tmp_path, suffix):
    store, out = small.opened, tmp_path / f"p{suffix}"
    wanted = predictions.requests(store, read_split(small.split))
    first, second = block(5, store.n_genes), block(3, store.n_genes, 1).toarray()
    with (
        files.writing(out, folder=suffix == ".zarr") as partial,
        writer(partial, store.genes) as made,
    ):
        made.append(first, labels(5))
        made.append(second, labels(3, "p1", "B", cell=["x", "y", "z"], set=[4, 4, 2]))
        assert predictions.append_controls(made, store, wanted) == 48
    adata = predictions.read_predictions(out)
    assert adata.X.dtype == np.float32
    assert sparse.isspmatrix_csr(adata.X)
    np.testing.assert_array_equal(adata.X[:8].toarray(), np.vstack([first.toarray(), second]))
    assert list(adata.var_names) == store.genes
    assert adata.obs_names.is_unique
    assert isinstance(adata.obs["perturbation"].dtype, pd.CategoricalDtype)
    assert adata.obs["perturbation"].astype(str).tolist()[:8] == ["p2"] * 5 + ["p1"] * 3
    assert adata.obs["cell"].tolist()[4:8] == ["", "x", "y", "z"]
    assert adata.obs["set"].tolist()[4:9] == [-1, 4, 4, 2, -1], "-1: in no set that is known"
    controls = adata[adata.obs["source"] == "control"]
    assert set(controls.obs["batch"]) == {"d2"}
    cells = pd.Index(store.obs(["cell"])["cell"])
    rows = cells.get_indexer(controls.obs["cell"])
    np.testing.assert_array_equal(controls.X.toarray(), store.expression(rows).toarray())
    facts = adata.uns["perturbdiff"]
    assert facts["scale"] == "log1p"
    assert facts["method"] == "m"
    assert facts["target_sum"] == 1e4
    sc.pp.pca(adata, n_comps=3)


def test_many_small_blocks_equal_one(tmp_path):
    genes = [f"g{i}" for i in range(30)]
    whole = block(40, 30)
    names = np.array(["b", "a", "c"])[np.arange(40) % 3]
    for name, step in (("one", 40), ("many", 3)):
        with writer(tmp_path / f"{name}.h5ad", genes) as made:
            for i in range(0, 40, step):
                made.append(whole[i : i + step], labels(len(names[i : i + step]), names[i : i + step]))
    one, many = (ad.read_h5ad(tmp_path / f"{n}.h5ad") for n in ("one", "many"))
    np.testing.assert_array_equal(one.X.toarray(), many.X.toarray())
    pd.testing.assert_frame_equal(one.obs, many.obs)
    assert one.obs["perturbation"].cat.categories.tolist() == ["a", "b", "c"]


def test_more_values_than_int32_counts_get_wide_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "_FEW_VALUES", 10)
    for suffix in (".h5ad", ".zarr"):
        path = tmp_path / f"p{suffix}"
        with writer(path, ["a", "b", "c"]) as made:
            made.append(block(9, 3), labels(9))
        matrix = predictions.read_predictions(path).X
        assert matrix.indices.dtype == matrix.indptr.dtype == np.int64
        np.testing.assert_array_equal(matrix.toarray(), block(9, 3).toarray())


def test_backed_reading(tmp_path):
    with writer(tmp_path / "p.h5ad", ["a", "b"]) as made:
        made.append(block(4, 2), labels(4))
    adata = predictions.read_predictions(tmp_path / "p.h5ad", backed=True)
    assert adata.isbacked
    assert adata[:2].to_memory().shape == (2, 2)
    adata.file.close()


def test_an_error_leaves_nothing(tmp_path):
    out = tmp_path / "p.h5ad"
    with (
        pytest.raises(ValueError, match="not finite"),
        files.writing(out) as partial,
        writer(partial, ["a", "b"]) as made,
    ):
        made.append(np.array([[np.nan, 1.0]]), labels(1))
    assert list(tmp_path.iterdir()) == []


def test_wrong_shapes_are_refused(tmp_path):
    made = writer(tmp_path / "p.h5ad", ["a", "b"])
    with pytest.raises(ValueError, match="2 cells and 2 genes"):
        made.append(np.zeros((3, 2)), labels(2))


def test_requests_are_the_perturbed_conditions_of_a_part(small):
    store, split = small.opened, read_split(small.split)
    wanted = predictions.requests(store, split, "test")
    expected = split[split["part"] == "test"]
    assert wanted["perturbation"].tolist() == expected["perturbation"].tolist()
    assert wanted["n_cells"].tolist() == expected["n_cells"].tolist()
    assert (store.conditions["perturbation"].to_numpy()[wanted["condition"]] == wanted["perturbation"]).all()
    assert "control" not in set(predictions.requests(store, split, "train")["perturbation"])
    with pytest.raises(UserError, match="no perturbed conditions in part 'unused'"):
        predictions.requests(store, split, "unused")


def test_controls_fit_the_models_genes(small, tmp_path):
    store = small.opened
    genes = [store.genes[3], "elsewhere", store.genes[0]]
    wanted = predictions.requests(store, read_split(small.split))
    with writer(tmp_path / "p.h5ad", genes, control="ctrl") as made:
        predictions.append_controls(made, store, wanted)
    adata = predictions.read_predictions(tmp_path / "p.h5ad")
    assert set(adata.obs["perturbation"]) == {"ctrl"}
    row = pd.Index(store.obs(["cell"])["cell"]).get_loc(adata.obs["cell"].iloc[0])
    expected = store.expression([row]).toarray()[0]
    np.testing.assert_array_equal(adata.X[0].toarray()[0], [expected[3], 0, expected[0]])


def damage(path, kind):
    adata = ad.read_h5ad(path)
    if kind == "scale":
        adata.uns["perturbdiff"]["scale"] = "cpm"
    elif kind == "kind":
        del adata.uns["perturbdiff"]
    elif kind == "column":
        del adata.obs["batch"]
    else:
        adata.obs["source"] = "real"
    adata.write_h5ad(path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scale", "declared as 'cpm'"),
        ("kind", "does not declare itself"),
        ("column", "obs lacks batch"),
        ("source", "obs 'source' has 'real'"),
    ],
)
def test_files_that_are_not_ours_are_refused(tmp_path, kind, message):
    with writer(tmp_path / "p.h5ad", ["a", "b"]) as made:
        made.append(block(4, 2), labels(4))
    damage(tmp_path / "p.h5ad", kind)
    with pytest.raises(UserError, match=message):
        predictions.read_predictions(tmp_path / "p.h5ad")


def test_unreadable_files_and_names(tmp_path):
    with pytest.raises(UserError, match="not found"):
        predictions.read_predictions(tmp_path / "no.h5ad")
    (tmp_path / "x.h5ad").write_text("no")
    with pytest.raises(UserError, match="is not an h5ad file"):
        predictions.read_predictions(tmp_path / "x.h5ad")
    with pytest.raises(UserError, match="one of these endings"):
        predictions.format_of(tmp_path / "x.csv")


def test_values_are_compressed_and_chunked(tmp_path):
    profile = np.tile(np.linspace(0.1, 3, 500, dtype=np.float32), (400, 1))
    with writer(tmp_path / "p.h5ad", [f"g{i}" for i in range(500)]) as made:
        made.append(profile, labels(400))
    with h5py.File(tmp_path / "p.h5ad") as file:
        assert file["X/data"].chunks is not None
        assert file["X/data"].id.get_storage_size() < profile.nbytes / 5


def test_cell_names_are_read_in_pieces(small):
    store = small.opened
    names = store.obs(["cell"])["cell"].astype(str).tolist()
    assert store.cell_names(0, store.n_cells).tolist() == names
    assert store.cell_names(5, 9).tolist() == names[5:9]
    assert store.cell_names(4, 4).tolist() == []
