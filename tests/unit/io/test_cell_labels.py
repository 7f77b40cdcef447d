"""Labels in pieces: the same conditions as from whole columns, in few bytes per cell."""

import tracemalloc

import h5py
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_data import tiny_counts

from perturbdiff.conditions.condition import SORTED_BY
from perturbdiff.config.settings import DataConfig
from perturbdiff.io import columns as columns_module
from perturbdiff.io.cell_labels import extra_column, read_conditions, read_labels
from perturbdiff.io.columns import CategoricalColumn, Numbering, PlainColumn, Texts, joined
from perturbdiff.io.counts import Inputs
from perturbdiff.runtime.errors import UserError


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(columns_module, "ROWS_PER_READ", 13)


def opened(adata, tmp_path, **settings):
    adata.write_h5ad(tmp_path / "x.h5ad")
    return Inputs([tmp_path / "x.h5ad"], DataConfig(**settings), tmp_path / "s")


@pytest.mark.usefixtures("small_pieces")
def test_conditions_and_codes_do_not_depend_on_the_pieces(tmp_path):
    adata = tiny_counts()
    adata.obs["batch"] = adata.obs["batch"].astype(str).map({"d1": 1.0, "d2": 2.5})
    with opened(adata, tmp_path) as inputs:
        labels = read_labels(inputs)
    obs = adata.obs.assign(batch=adata.obs["batch"].map({1.0: "1", 2.5: "2.5"})).astype(str)
    own = labels.conditions.loc[labels.codes, list(SORTED_BY)].reset_index(drop=True)
    pd.testing.assert_frame_equal(own, obs[list(SORTED_BY)].reset_index(drop=True), check_names=False)
    assert labels.codes.dtype == np.int32
    np.testing.assert_array_equal(labels.conditions["n_cells"], np.bincount(labels.codes))
    order = list(zip(*(labels.conditions[c] for c in SORTED_BY), strict=True))
    controls_first = sorted(order, key=lambda key: (key[0], key[1], key[2] != "control", key[2]))
    assert order == controls_first


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["category", "text", "nullable"])
def test_missing_labels_are_counted_over_all_pieces(tmp_path, kind):
    adata = tiny_counts()
    values = adata.obs["cell_type"].astype(object)
    values.iloc[[20, 50, 100]] = None
    adata.obs["cell_type"] = pd.Categorical(values)
    with opened(adata, tmp_path) as inputs:
        pass
    if kind != "category":
        with h5py.File(tmp_path / "x.h5ad", "r+") as file:
            del file["obs/cell_type"]
            if kind == "text":
                column = file["obs"].create_dataset(
                    "cell_type", data=[v or "" for v in values], dtype=h5py.string_dtype()
                )
                column.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
            else:
                column = file["obs"].create_group("cell_type")
                column.attrs.update({"encoding-type": "nullable-string-array", "encoding-version": "0.1.0"})
                column.create_dataset("values", data=[v or "?" for v in values], dtype=h5py.string_dtype())
                column["mask"] = [v is None for v in values]
    inputs = Inputs([tmp_path / "x.h5ad"], DataConfig(), tmp_path)
    with inputs, pytest.raises(UserError, match=f"has 3 missing values .first: cell '{adata.obs_names[20]}'"):
        read_labels(inputs)


@pytest.mark.usefixtures("small_pieces")
def test_doses_in_texts_and_numbers_are_one_label(tmp_path):
    adata = tiny_counts()
    first, second = adata[:60].copy(), adata[60:].copy()
    first.obs["dose"] = 0.5
    second.obs["dose"] = "0.50"
    first.write_h5ad(tmp_path / "a.h5ad")
    second.write_h5ad(tmp_path / "b.h5ad")
    with Inputs([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], DataConfig(dose_key="dose"), tmp_path) as inputs:
        labels = read_labels(inputs)
    assert labels.perturbations["perturbation"].tolist() == ["control", "p1@0.5", "p2@0.5", "p3@0.5"]
    assert labels.perturbations["agent"].tolist() == ["control", "p1", "p2", "p3"]
    assert not labels.conditions.duplicated(list(SORTED_BY)).any()
    plain = [p if p == "control" else f"{p}@0.5" for p in adata.obs["perturbation"].astype(str)]
    assert labels.conditions.loc[labels.codes, "perturbation"].tolist() == plain


@pytest.mark.usefixtures("small_pieces")
def test_wrong_doses_are_counted_and_the_first_is_named(tmp_path):
    adata = tiny_counts()
    treated = np.flatnonzero((adata.obs["perturbation"] != "control").to_numpy())
    dose = np.full(adata.n_obs, "1", object)
    dose[treated[[9, 40]]] = "high", "low"
    dose[adata.obs["perturbation"] == "control"] = "none"
    adata.obs["dose"] = dose
    place = rf"2 treated cells \(first: 'high', cell '{adata.obs_names[treated[9]]}'\)"
    with opened(adata, tmp_path, dose_key="dose") as inputs, pytest.raises(UserError, match=place):
        read_labels(inputs)


@pytest.mark.usefixtures("small_pieces")
def test_extra_columns_take_few_bytes_and_keep_their_values(tmp_path):
    adata = tiny_counts()
    n = adata.n_obs
    adata.obs["plate"] = pd.Categorical([None if i == 30 else f"plate{i % 9}" for i in range(n)])
    adata.obs["age"] = np.arange(n, dtype=np.int64) % 90
    adata.obs["half"] = np.arange(n) / 2
    adata.obs["third"] = np.arange(n) / 3
    adata.obs["maybe"] = pd.array([None if i == 4 else i for i in range(n)], dtype="Int64")
    adata.obs["yes"] = np.arange(n) % 2 == 0
    names = ("plate", "age", "half", "third", "maybe", "yes")
    with opened(adata, tmp_path, extra_obs=names) as inputs:
        found = {name: extra_column(inputs, name) for name in names}
    assert found["plate"].cat.codes.dtype == np.int8
    assert found["plate"].tolist() == ["" if i == 30 else f"plate{i % 9}" for i in range(n)]
    assert found["yes"].tolist() == [str(i % 2 == 0) for i in range(n)]
    types = {name: str(found[name].dtype) for name in ("age", "half", "third", "maybe")}
    assert types == {"age": "uint8", "half": "float32", "third": "float64", "maybe": "float32"}
    for name in ("age", "half", "third"):
        np.testing.assert_array_equal(found[name], adata.obs[name])
    assert np.isnan(found["maybe"][4])
    assert found["maybe"][5] == 5
    table = read_conditions([tmp_path / "x.h5ad"], DataConfig(extra_obs=("plate", "age")))
    expected = adata.obs.astype({"plate": object}).fillna({"plate": ""}).astype(str)
    counts = expected.groupby([*SORTED_BY, "plate", "age"]).size()
    own = table.set_index([*SORTED_BY, "plate", "age"])["n_cells"]
    assert own.to_dict() == counts.to_dict()


def memory_of(tmp_path, n):
    """Return the conditions of ``n`` cells and the peak bytes per cell while they are read, beyond their codes."""
    adata = tiny_counts()
    path = tmp_path / f"{n}.h5ad"
    adata.write_h5ad(path)
    rng = np.random.default_rng(0)
    with h5py.File(path, "r+") as file:
        for name, num in (("cell_type", 20), ("batch", 4), ("perturbation", 40)):
            del file["obs"][name]
            group = file["obs"].create_group(name)
            group.attrs.update(
                {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
            )
            names = ["control", *(f"{name}{i}" for i in range(num - 1))]
            group.create_dataset("categories", data=names, dtype=h5py.string_dtype())
            group["categories"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
            group["codes"] = rng.integers(0, num, n).astype(np.int8)
        pointers = np.pad(file["X/indptr"][()], (0, n - adata.n_obs), mode="edge")
        del file["obs/_index"], file["X/indptr"]
        file["obs"].create_dataset("_index", data=np.full(n, "c", object), dtype=h5py.string_dtype())
        file["obs/_index"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
        file["X"].attrs["shape"] = (n, adata.n_vars)
        file["X"]["indptr"] = pointers
    with Inputs([path], DataConfig(), tmp_path) as inputs:
        read_labels(inputs)
        tracemalloc.start()
        labels = read_labels(inputs)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return labels, (peak - labels.codes.nbytes) / n


def test_labels_of_a_million_cells_take_few_bytes(tmp_path):
    labels, beyond = memory_of(tmp_path, 1_000_000)
    assert len(labels.codes) == labels.conditions["n_cells"].sum() == 1_000_000
    assert len(labels.conditions) == 20 * 4 * 40
    assert beyond < 12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 70_000)), min_size=1), max_size=5))
def test_pairs_are_numbered_without_gaps(batches):
    numbering, known = Numbering(), {}
    for batch in batches:
        first, second = np.array(batch, np.int32).T
        numbers = numbering(first, second)
        for pair, number in zip(batch, numbers.tolist(), strict=True):
            if min(pair) < 0:
                assert number == -1
            else:
                assert known.setdefault(pair, number) == number
    assert sorted(known.values()) == list(range(len(known)))
    assert {
        pair: k for k, pair in enumerate(zip(*(p.tolist() for p in numbering.pairs()), strict=True))
    } == known


def test_columns_of_files_join_to_the_smallest_codes():
    many = [f"x{i:03d}" for i in range(300)]
    first = CategoricalColumn(np.array([0, -1, 1], np.int8), ["b", "a"])
    second = PlainColumn(np.array([*many, "a"], object))
    series = joined([first, second], [3, 301])
    assert series.tolist() == ["b", "", "a", *many, "a"]
    assert series.cat.codes.dtype == np.int16
    texts = Texts(["a"])
    assert first.codes(0, 3, texts).tolist() == [1, -1, 0]
    assert second.codes(299, 301, texts).tolist() == [2, 0]


def test_a_category_that_is_not_there_is_damage():
    column = CategoricalColumn(np.array([0, 2]), ["a", "b"])
    with pytest.raises(ValueError, match="code without a category"):
        column.codes(0, 2, Texts())


def test_categories_of_old_files_are_a_reference(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        names = file.create_dataset("obs/__categories/batch", data=["u", "v"], dtype=h5py.string_dtype())
        names.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
        file["obs/batch"] = np.array([1, 0, -1], np.int8)
        file["obs/batch"].attrs["categories"] = names.ref
        column = columns_module.open_column(file["obs/batch"])
        assert column.values(0, 3).tolist() == ["v", "u", None]
    with pytest.raises(ValueError, match="unknown kind"):
        columns_module.open_column(Odd())


class Odd(dict):
    attrs = {"encoding-type": "odd"}  # noqa: RUF012


def unlabelled_counts(tmp_path):
    """A file whose first four cells lack a perturbation and whose cells 3 to 5 lack a batch."""
    adata = tiny_counts()
    adata.obs = adata.obs.astype(str)
    adata.obs.loc[adata.obs_names[:4], "perturbation"] = np.nan
    adata.obs.loc[adata.obs_names[3:6], "batch"] = np.nan
    adata.obs["line"] = adata.obs["cell_type"]
    adata.write_h5ad(tmp_path / "counts.h5ad")
    return adata, tmp_path / "counts.h5ad"


def test_cells_without_a_label_can_be_dropped(tmp_path, caplog):
    adata, path = unlabelled_counts(tmp_path)
    config = DataConfig(missing_labels="drop")
    with Inputs([path], config, tmp_path) as inputs:
        labels = read_labels(inputs)
    assert labels.without_label == 6
    assert (labels.codes[:6] == -1).all()
    assert (labels.codes[6:] >= 0).all()
    assert labels.conditions["n_cells"].sum() == adata.n_obs - 6
    assert "'perturbation' has 4 missing values; these cells are dropped" in caplog.text
    extra = DataConfig(missing_labels="drop", extra_obs=("line",))
    assert read_conditions([path], extra)["n_cells"].sum() == adata.n_obs - 6


def test_random_batches_are_the_same_each_time_and_of_similar_size(tmp_path):
    tiny_counts().write_h5ad(tmp_path / "counts.h5ad")
    config = DataConfig(batch_key=None, random_batches=3)
    tables = [read_conditions([tmp_path / "counts.h5ad"], config) for _ in range(2)]
    pd.testing.assert_frame_equal(*tables)
    sizes = tables[0].groupby("batch")["n_cells"].sum()
    assert list(sizes.index) == ["random_1", "random_2", "random_3"]
    assert sizes.min() > 0.2 * sizes.sum()
