"""The fused first pass does what its plain loops do, and lets no bad value through."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbdiff.config.settings import DataConfig
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store


def counts(seed: int, num_cells: int, num_genes: int) -> ad.AnnData:
    rng = np.random.default_rng(seed)
    matrix = sp.random(num_cells, num_genes, 0.4, "csr", random_state=rng)
    matrix.data = rng.poisson(2, len(matrix.data)).astype(np.float32)  # with stored zeros
    obs = pd.DataFrame(
        {
            "perturbation": rng.choice(["control", "a", "b"], num_cells),
            "batch": rng.choice(["x", "y"], num_cells),
            "cell_type": "t",
        },
        index=[f"c{i}" for i in range(num_cells)],
    )
    obs.iloc[:2, 0] = "control"
    var = pd.DataFrame(index=[f"g{i}" for i in range(num_genes)])
    return ad.AnnData(matrix.astype(np.float32), obs, var)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 999),
    num_cells=st.integers(6, 40),
    num_genes=st.integers(3, 30),
    by_batch=st.booleans(),
    flavor=st.sampled_from(["seurat", "cell_ranger"]),
    least=st.integers(0, 3),
)
def test_counts_of_any_type_make_the_same_store(
    tmp_path_factory, seed, num_cells, num_genes, by_batch, flavor, least
):
    """float32 goes through the fused loop, float64 through the plain ones."""
    folder = tmp_path_factory.mktemp("scan")
    config = DataConfig(num_hvgs=None, hvg_by_batch=by_batch, hvg_flavor=flavor, min_genes=least)
    stores = []
    for dtype in (np.float32, np.float64):
        adata = counts(seed, num_cells, num_genes)
        adata.X = sp.csr_matrix(adata.X, dtype=dtype)
        if not adata.X.data.any():
            return
        adata.write_h5ad(folder / f"{np.dtype(dtype).name}.h5ad")
        try:
            stores.append(
                Store(preprocess([folder / f"{np.dtype(dtype).name}.h5ad"], folder / f"{dtype}", config))
            )
        except UserError as error:  # no cell passes
            stores.append(str(error))
    one, two = stores
    if isinstance(one, str):
        assert one.replace("float32", "float64") == two
        return
    pd.testing.assert_frame_equal(one.var, two.var)
    pd.testing.assert_frame_equal(
        one.obs().drop(columns="source_file"), two.obs().drop(columns="source_file")
    )
    assert (one.counts(slice(None)) != two.counts(slice(None))).nnz == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1.0, "negative values"),
        (np.nan, "missing or infinite"),
        (np.inf, "missing or infinite"),
        (-np.inf, "missing or infinite"),
        (0.5, "looks log-transformed"),
        (70.5, "not whole numbers"),
        (2.0**33, "more than 2"),
    ],
)
def test_a_bad_value_is_named_wherever_it_stands(tmp_path, value, message):
    for place in (0, -1):
        adata = counts(0, 30, 20)
        adata.X.data[place] = value
        adata.write_h5ad(tmp_path / "x.h5ad")
        gene = adata.var_names[adata.X.indices[place]]
        with pytest.raises(UserError, match=message) as raised:
            preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig())
        assert f"gene '{gene}'" in str(raised.value) or "more than 2" in message
        assert not list(tmp_path.glob(".store*"))


@pytest.mark.parametrize("largest", [2**24, 2**24 + 2, 2**31])
def test_very_large_counts_are_exact(tmp_path, largest):
    adata = counts(0, 30, 20)
    adata.X.data[3] = largest
    adata.write_h5ad(tmp_path / "x.h5ad")
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig()))
    assert store.counts(slice(None)).max() == largest
    depth = pd.Series(np.asarray(adata.X.sum(axis=1, dtype=np.float64)).ravel(), adata.obs_names)
    obs = store.obs(["cell", "n_counts"])
    np.testing.assert_array_equal(obs["n_counts"], depth[obs["cell"]].astype(np.float32))
