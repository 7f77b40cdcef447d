"""The sets of a store: which cells were a set, from the input's column to the reader; a store without is unchanged."""

import numpy as np
import pandas as pd
import pytest
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.store import check_store
from perturbdiff.store.checksums import read_checksums
from perturbdiff.store.store import Store

SETTINGS = {"num_hvgs": 30}


def made(folder, adata, name="store", **settings):
    folder.mkdir(parents=True, exist_ok=True)
    adata.write_h5ad(folder / "counts.h5ad")
    config = DataConfig(**SETTINGS, **settings)
    return preprocess([folder / "counts.h5ad"], folder / name, config, machine=Machine(jobs=1))


def with_wells(number=5):
    adata = tiny_counts()
    adata.obs["well"] = np.random.default_rng(7).integers(number, size=adata.n_obs) * 2.0
    return adata


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder, adata = tmp_path_factory.mktemp("sets"), with_wells()
    return adata, made(folder, adata, set_key="well"), made(folder, adata, "plain")


def test_a_store_knows_the_set_of_every_cell(stores):
    adata, path, _ = stores
    for store in (Store(path), Store(path).in_memory()):
        assert store.set_key == "well"
        assert store.sets == ["0", "2", "4", "6", "8"], "numbers are labels, as for a batch"
        expected = adata.obs.loc[store.obs(["cell"])["cell"], "well"].astype(int).astype(str).tolist()
        assert np.array(store.sets)[store.set_of(slice(None))].tolist() == expected
        assert store.set_of([5, 3, 5]).tolist() == store.set_of(slice(None))[[5, 3, 5]].tolist()
    assert store.obs(["set"])["set"].tolist() == expected
    assert check_store(path) == []


def test_nothing_else_of_a_store_changes_and_without_a_column_no_byte_does(stores):
    _, path, plain = stores
    one, other = read_checksums(path), read_checksums(plain)
    assert set(one) - set(other) == {name for name in one if "/obs/set/" in name}
    described = {"part-0000.zarr/zarr.json", "part-0000.zarr/obs/zarr.json"}  # they list the columns
    assert {name for name in other if one[name] != other[name]} == described
    assert "set_key" not in (plain / "manifest.json").read_text()
    assert Store(plain).sets is None
    with pytest.raises(ValueError, match="does not know sets"):
        Store(plain).set_of([0])


def test_cells_without_a_set_are_refused_or_dropped(tmp_path):
    adata = with_wells()
    adata.obs.loc[adata.obs_names[[3, 8]], "well"] = np.nan
    with pytest.raises(UserError, match="'well' has 2 missing values"):
        made(tmp_path, adata, set_key="well")
    store = Store(made(tmp_path, adata, set_key="well", missing_labels="drop"))
    assert store.n_cells == adata.n_obs - 2
    assert not set(adata.obs_names[[3, 8]]) & set(store.obs(["cell"])["cell"])


def test_columns_that_cannot_be_sets_are_refused(tmp_path):
    adata = with_wells()
    adata.obs["set"] = pd.Categorical(["x"] * adata.n_obs)
    with pytest.raises(UserError, match="is the perturbation"):
        made(tmp_path, adata, set_key="perturbation")
    with pytest.raises(UserError, match="no obs column 'wells'.*did you mean"):
        made(tmp_path, adata, set_key="wells")
    with pytest.raises(UserError, match="a column 'set' of its own"):
        made(tmp_path, adata, set_key="well", extra_obs=("set",))
    store = Store(made(tmp_path, adata, set_key="set", extra_obs=("set", "well")))
    assert store.sets == ["x"], "a column of that name is not kept twice"
    assert {"set", "well"} < set(store.obs().columns)
