"""From inputs of several kinds to a store: the store does not tell what the counts came in."""

import numpy as np
import pandas as pd
import scipy.sparse as sp
from tenx import write_tenx
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.preprocessing.preprocessing_stage import Machine, preprocess
from perturbdiff.store.store import Store

HERE = Machine(jobs=1)


def cells_of(store):
    """Return the counts by cell name and gene, and the labels."""
    obs = store.obs().set_index("cell").sort_index()
    counts = pd.DataFrame(store.counts(slice(None)).toarray(), store.obs()["cell"], store.genes).sort_index()
    return counts, obs[["cell_type", "batch", "perturbation", "n_counts", "n_genes"]].astype(
        {"n_counts": float}
    )


def test_tenx_with_a_table_makes_the_same_store(tmp_path):
    adata = tiny_counts()
    adata.X.data[17] = 70_001
    adata.write_h5ad(tmp_path / "plain.h5ad")
    write_tenx(tmp_path / "raw.h5", adata)
    adata.obs.to_csv(tmp_path / "labels.csv.gz")
    one = preprocess([tmp_path / "plain.h5ad"], tmp_path / "one", DataConfig(num_hvgs=30), machine=HERE)
    other = preprocess(
        [tmp_path / "raw.h5"],
        tmp_path / "other",
        DataConfig(num_hvgs=30),
        obs=[tmp_path / "labels.csv.gz"],
        machine=HERE,
    )
    one, other = Store(one), Store(other)
    assert one.genes == other.genes
    assert (one.counts(slice(None)) != other.counts(slice(None))).nnz == 0
    drop = ["source_file"]
    pd.testing.assert_frame_equal(
        one.obs().drop(columns=drop), other.obs().drop(columns=drop), check_dtype=False
    )
    assert one.counts(slice(None)).max() <= 70_001


def test_union_of_a_csc_and_a_tenx_file(tmp_path):
    adata = tiny_counts()
    first, second = adata[:60, :50].copy(), adata[60:, 79:19:-1].copy()
    first.X = sp.csc_matrix(first.X)
    first.write_h5ad(tmp_path / "a.h5ad")
    write_tenx(tmp_path / "b.h5", second)
    adata.obs.rename_axis("barcode").to_csv(tmp_path / "labels.tsv", sep="\t")
    made = preprocess(
        [tmp_path / "a.h5ad", tmp_path / "b.h5"],
        tmp_path / "store",
        DataConfig(num_hvgs=None, join_genes="union"),
        obs=[tmp_path / "labels.tsv"],
        machine=HERE,
    )
    counts, obs = cells_of(Store(made))
    expected = pd.DataFrame(adata.X.toarray(), adata.obs_names, adata.var_names)
    expected.iloc[:60, 50:] = 0
    expected.iloc[60:, :20] = 0
    expected = expected.sort_index()
    assert set(counts.columns) <= set(expected.columns)
    left_out = expected.drop(columns=counts.columns)
    assert (left_out == 0).all(axis=None)
    np.testing.assert_array_equal(counts, expected[counts.columns])
    np.testing.assert_array_equal(obs["n_counts"], expected.sum(axis=1))
    labels = adata.obs.astype(str).sort_index()
    assert (obs[labels.columns].astype(str).to_numpy() == labels.to_numpy()).all()
