"""Opening inputs: every layout gives the same matrix, and each mistake is one line with its remedy."""

import logging

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.io import matrices
from perturbdiff.io.cell_labels import read_conditions, read_labels
from perturbdiff.io.counts import Inputs
from perturbdiff.io.derived_matrices import CscMatrix
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store

KEYS = ["cell_type", "batch", "perturbation"]


@pytest.fixture(autouse=True)
def _heard(monkeypatch):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)


def read_all(path, layer="X", scratch=None):
    with Inputs([path], DataConfig(layer=layer), scratch or path.parent / "scratch") as inputs:
        file = inputs.files[0]
        file.prepare()
        rows, stop = [], 0
        for block in file.blocks(limit=1000):
            assert block.start == stop
            stop = block.stop
            shape = (block.stop - block.start, len(file.genes))
            rows.append(sp.csr_matrix((block.data, block.indices, block.indptr), shape=shape).toarray())
    return np.vstack(rows)


def write(adata, path, layout):
    adata = adata.copy()
    adata.X = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": lambda x: x.toarray()}[layout](adata.X)
    if path.suffix == ".h5ad":
        adata.write_h5ad(path)
    else:
        with ad.settings.override(zarr_write_format=2 if "v2" in path.stem else 3):
            adata.write_zarr(path)
    return path


@pytest.mark.parametrize("layout", ["csr", "csc", "dense"])
@pytest.mark.parametrize("name", ["x.h5ad", "v2.zarr", "v3.zarr"])
def test_every_layout_reads_alike(tmp_path, monkeypatch, layout, name):
    adata = tiny_counts()
    monkeypatch.setattr(matrices, "VALUES_PER_BLOCK", 1000)
    monkeypatch.setattr(matrices, "_POINTERS_PER_READ", 50)
    for kind in (matrices.CsrMatrix, matrices.DenseMatrix, CscMatrix):
        monkeypatch.setattr(kind.blocks, "__defaults__", (0, None, 1000))
    path = write(adata, tmp_path / name, layout)
    np.testing.assert_array_equal(read_all(path), adata.X.toarray())


def test_raw_and_layers(tmp_path):
    adata = tiny_counts()
    full = adata.copy()
    adata = adata[:, :30].copy()
    adata.raw = full
    adata.layers["counts"] = adata.X * 2
    adata.X = adata.X.astype(np.float32).multiply(0.5).tocsr()
    adata.write_h5ad(tmp_path / "x.h5ad")
    np.testing.assert_array_equal(read_all(tmp_path / "x.h5ad", "raw"), full.X.toarray())
    np.testing.assert_array_equal(
        read_all(tmp_path / "x.h5ad", "layers/counts"), full.X[:, :30].toarray() * 2
    )
    with pytest.raises(UserError, match=r"no 'layers/count'.*did you mean 'counts'"):
        read_all(tmp_path / "x.h5ad", "layers/count")


def change_nothing(adata):
    pass


def drop_column(adata):
    adata.obs = adata.obs.rename(columns={"batch": "batches"})


def no_control(adata):
    adata.obs["perturbation"] = adata.obs["perturbation"].astype(str).replace("control", "Control")


def negative(adata):
    adata.X.data[5] = -1


def not_finite(adata):
    adata.X.data[5] = np.nan


def logged(adata):
    adata.X.data = np.log1p(adata.X.data)


def fractional(adata):
    adata.X.data = adata.X.data * 10.5


def twice(adata):
    adata.var_names = ["g0", "g0", *adata.var_names[2:]]


def missing_label(adata):
    adata.obs["cell_type"] = adata.obs["cell_type"].astype(object)
    adata.obs.iloc[3, adata.obs.columns.get_loc("cell_type")] = None
    adata.obs["cell_type"] = adata.obs["cell_type"].astype("category")


def empty_label(adata):
    adata.obs["batch"] = ["" if i == 4 else "d1" for i in range(adata.n_obs)]


def bad_dose(adata):
    adata.obs["dose"] = "high"


MISTAKES = [
    (drop_column, {}, r"no obs column 'batch' \(--batch-col or data.batch_key.*did you mean 'batches'"),
    (no_control, {}, "no control cells, 'control'.*did you mean 'Control'"),
    (change_nothing, {"control": "vehicle"}, "its labels are control, p1, p2, p3"),
    (negative, {}, r"negative values \(-1, gene 'g\d+', cell 'cell\d+'\)"),
    (not_finite, {}, r"missing or infinite value \(gene 'g\d+', cell"),
    (logged, {}, "looks log-transformed.*data.input_scale=log1p"),
    (fractional, {}, "not whole numbers.*data.layer"),
    (change_nothing, {"input_scale": "log1p"}, "these are counts; set data.input_scale=counts"),
    (twice, {}, r"gene names are not unique \(g0\).*var_names_make_unique"),
    (missing_label, {}, "obs column 'cell_type' has 1 missing values.*first: cell 'cell"),
    (empty_label, {}, "obs column 'batch' has 1 missing values.*first: cell 'cell"),
    (bad_dose, {"dose_key": "dose"}, "obs column 'dose' is not a number for .* treated cells .*'high'"),
    (change_nothing, {"dose_key": "dosage"}, "no obs column 'dosage'"),
    (change_nothing, {"min_genes": 1000}, "no cell passes data.min_counts=0 and data.min_genes=1000"),
    (change_nothing, {"layer": "raw"}, "has no raw"),
    (change_nothing, {"extra_obs": ("plate",)}, "no obs column 'plate'"),
]


@pytest.mark.parametrize(("mistake", "settings", "message"), MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, mistake, settings, message):
    adata = tiny_counts()
    adata.X.data[0] = 40
    mistake(adata)
    path = tmp_path / "input.h5ad"
    adata.write_h5ad(path)
    with pytest.raises(UserError, match=message) as error:
        preprocess([path], tmp_path / "store", DataConfig(**settings))
    assert "\n" not in str(error.value)
    assert "input.h5ad" in str(error.value) or "min_genes" in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["input.h5ad"]


def truncated(path):
    tiny_counts().write_h5ad(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def corrupt_values(path):
    adata = tiny_counts()
    adata.write_h5ad(path, compression="gzip")
    with h5py.File(path) as file:
        place, size = (
            file["X/data"].id.get_chunk_info(0).byte_offset,
            file["X/data"].id.get_chunk_info(0).size,
        )
    content = bytearray(path.read_bytes())
    content[place : place + size] = b"\x55" * size
    path.write_bytes(content)


def plain_hdf5(path):
    with h5py.File(path, "w") as file:
        file["x"] = [1, 2]


def entry_outside(path):
    tiny_counts().write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file["X/indices"][100] = 5000


def descending_pointers(path):
    tiny_counts().write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file["X/indptr"][10] = 3


def too_few_values(path):
    tiny_counts().write_h5ad(path)
    with h5py.File(path, "r+") as file:
        short = file["X/data"][:-50]
        del file["X/data"]
        file["X/data"] = short


def no_cells(path):
    tiny_counts()[:0].copy().write_h5ad(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (truncated, "damaged or incomplete"),
        (corrupt_values, "damaged or incomplete"),
        (entry_outside, "damaged.*outside its shape"),
        (descending_pointers, "damaged.*descending row pointers"),
        (too_few_values, "damaged.*fewer values"),
        (lambda path: path.write_bytes(b""), r"is empty \(0 bytes\)"),
        (lambda path: path.write_text("gene,count\n"), "is not an h5ad file"),
        (plain_hdf5, "is not an AnnData file"),
        (no_cells, "has 0 cells"),
        (lambda path: path.mkdir(), "is not an AnnData"),
        (lambda path: None, "not found"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, make, message):
    path = tmp_path / "input.h5ad"
    make(path)
    with pytest.raises(UserError, match=message) as error:
        preprocess([path], tmp_path / "store", DataConfig())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "store").exists()


def test_several_files_are_aligned_by_gene_name(tmp_path, caplog):
    adata = tiny_counts()
    first, second = adata[:50, :60].copy(), adata[50:, ::-1].copy()
    first.write_h5ad(tmp_path / "a.h5ad")
    second.write_h5ad(tmp_path / "b.h5ad")
    store = Store(preprocess([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], tmp_path / "store", DataConfig()))
    assert "the 60 that all have are used, 20 are left out" in caplog.text
    assert store.genes == list(adata.var_names[:60])
    obs = store.obs()
    expected = adata[obs["cell"], :60].X
    assert (store.counts(slice(None)) != expected).nnz == 0
    np.testing.assert_array_equal(obs["n_counts"], np.asarray(expected.sum(axis=1)).ravel())
    assert dict(obs["source_file"].value_counts()) == {"a.h5ad": 50, "b.h5ad": adata.n_obs - 50}
    of_b = obs[obs["source_file"] == "b.h5ad"]
    np.testing.assert_array_equal(second.obs_names[of_b["source_row"]], of_b["cell"])


def test_a_file_given_twice(counts_file, tmp_path):
    with pytest.raises(UserError, match="given twice"):
        preprocess([counts_file, counts_file], tmp_path / "store", DataConfig())


def test_extra_columns_of_several_files(tmp_path):
    adata = tiny_counts()
    adata.obs["plate"] = pd.Categorical(np.where(np.arange(adata.n_obs) % 3, "x", None))
    adata[:50].copy().write_h5ad(tmp_path / "a.h5ad")
    adata.obs["plate"] = np.arange(adata.n_obs) % 2 == 0
    adata[50:].copy().write_h5ad(tmp_path / "b.h5ad")
    table = read_conditions([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], DataConfig(extra_obs=("plate",)))
    counts = table.groupby("plate")["n_cells"].sum().to_dict()
    of_a = np.arange(50) % 3
    of_b = np.arange(50, adata.n_obs) % 2
    assert counts == {
        "": (of_a == 0).sum(),
        "x": (of_a > 0).sum(),
        "True": (of_b == 0).sum(),
        "False": (of_b == 1).sum(),
    }


def test_extra_columns_with_taken_names(tmp_path):
    adata = tiny_counts()
    adata.obs["donor"] = adata.obs["batch"]
    adata.obs["condition"] = adata.obs["perturbation"]
    adata.obs["age"] = np.where(adata.obs["batch"] == "d1", 31.0, np.nan)
    adata.write_h5ad(tmp_path / "a.h5ad")
    config = DataConfig(extra_obs=("batch", "condition", "age"))
    table = read_conditions([tmp_path / "a.h5ad"], config)
    assert list(table.columns) == [*KEYS, "condition", "age", "n_cells"]
    assert (table["condition"] == table["perturbation"]).all()
    assert table["n_cells"].sum() == adata.n_obs
    store = Store(preprocess([tmp_path / "a.h5ad"], tmp_path / "store", config))
    assert {"condition", "age"} <= set(store.obs().columns)
    with pytest.raises(UserError, match=r"data.extra_obs: the store has a column 'batch' of its own"):
        read_conditions([tmp_path / "a.h5ad"], DataConfig(batch_key="donor", extra_obs=("batch",)))


def test_files_without_common_genes(tmp_path):
    adata = tiny_counts()
    adata[:, :40].copy().write_h5ad(tmp_path / "a.h5ad")
    adata[:, 40:].copy().write_h5ad(tmp_path / "b.h5ad")
    with pytest.raises(UserError, match="no gene in common"):
        preprocess([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], tmp_path / "store", DataConfig())


def test_conditions_of_reads_obs_alone(tmp_path):
    adata = tiny_counts()
    adata.obs["plate"] = ["x" if b == "d1" else "y" for b in adata.obs["batch"]]
    adata.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["X/indices"][:] = 1_000_000
    table = read_conditions([tmp_path / "a.h5ad"], DataConfig(extra_obs=("plate",)))
    assert list(table.columns) == [*KEYS, "plate", "n_cells"]
    assert table["n_cells"].sum() == adata.n_obs
    assert list(table["perturbation"][:4]) == ["control", "p1", "p2", "p3"]
    assert (table["plate"] == table["batch"].map({"d1": "x", "d2": "y"})).all()


def test_doses_make_labels_and_the_control_keeps_its_own(tmp_path):
    adata = tiny_counts()
    adata.obs["dose"] = np.where(np.arange(adata.n_obs) % 2, 0.5, 10.0)
    adata.obs.loc[adata.obs["perturbation"] == "control", "dose"] = np.nan
    adata.write_h5ad(tmp_path / "a.h5ad")
    with Inputs([tmp_path / "a.h5ad"], DataConfig(dose_key="dose"), tmp_path) as inputs:
        labels = read_labels(inputs)
    table = labels.perturbations.set_index("perturbation")
    assert sorted(table.index) == [
        "control",
        *(f"{p}@{d}" for p in ("p1", "p2", "p3") for d in ("0.5", "10")),
    ]
    assert table.loc["p2@0.5", "agent"] == "p2"
    assert table.loc["p2@0.5", "dose"] == 0.5
    assert np.isnan(table.loc["control", "dose"])
    own = labels.conditions.loc[labels.codes, "perturbation"].to_numpy()
    plain, dose = adata.obs["perturbation"].astype(str).to_numpy(), adata.obs["dose"].to_numpy()
    expected = [p if p == "control" else f"{p}@{d:g}" for p, d in zip(plain, dose, strict=True)]
    assert list(own) == expected


def test_labels_of_other_types_become_text(tmp_path):
    adata = tiny_counts()
    adata.obs["batch"] = np.where(adata.obs["batch"] == "d1", 1.0, 2.5)
    adata.obs["cell_type"] = pd.Series(np.arange(adata.n_obs) % 2, adata.obs_names)
    adata.write_h5ad(tmp_path / "a.h5ad")
    table = read_conditions([tmp_path / "a.h5ad"], DataConfig())
    assert set(table["batch"]) == {"1", "2.5"}
    assert set(table["cell_type"]) == {"0", "1"}


def test_without_cell_type_and_batch_all_cells_are_one_context(counts_file):
    table = read_conditions([counts_file], DataConfig(cell_type_key=None, batch_key=None))
    assert set(table["cell_type"]) == set(table["batch"]) == {"all"}
    assert list(table["perturbation"]) == ["control", "p1", "p2", "p3"]


def test_an_atlas_without_perturbations_is_all_controls(tmp_path):
    tiny_counts().write_h5ad(tmp_path / "atlas.h5ad")
    config = DataConfig(perturbation_key=None, control="unperturbed", batch_key=None)
    found = read_conditions([tmp_path / "atlas.h5ad"], config)
    assert found["perturbation"].tolist() == ["unperturbed"] * 2
    assert found["cell_type"].tolist() == ["B", "T"]
    assert found["n_cells"].sum() == tiny_counts().n_obs
