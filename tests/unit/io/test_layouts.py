"""10x h5 and the ways AnnData is stored: the same cells, genes and counts; gene names by any var column."""

import logging
import subprocess
import sys

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from tenx import write_tenx
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.io.counts import CountsFile, Inputs
from perturbdiff.runtime.errors import UserError


@pytest.fixture(autouse=True)
def _heard(monkeypatch):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)


def dense(path, scratch, start=0, stop=None, **settings):
    """Return genes and the dense counts of a range of rows."""
    file = CountsFile(path, DataConfig(**settings), scratch)
    try:
        file.prepare()
        rows = [
            sp.csr_matrix((b.data, b.indices, b.indptr), (b.stop - b.start, len(file.genes))).toarray()
            for b in file.blocks(start, stop, limit=700)
        ]
        return file.genes, np.vstack(rows)
    finally:
        file.close()


@pytest.mark.parametrize("version", [2, 3])
def test_tenx_is_cells_by_genes(tmp_path, version):
    adata = tiny_counts()
    path = write_tenx(tmp_path / "x.h5", adata, version=version)
    genes, counts = dense(path, tmp_path)
    assert genes == list(adata.var_names)
    np.testing.assert_array_equal(counts, adata.X.toarray())
    ids, part = dense(path, tmp_path, 7, 50, gene_key="id")
    assert ids[3] == "ENSG00000000003"
    np.testing.assert_array_equal(part, adata.X.toarray()[7:50])
    with Inputs([path], DataConfig(), tmp_path) as inputs:
        assert inputs.files[0].cell_names(2, 4).tolist() == list(adata.obs_names[2:4])


def test_tenx_features_that_are_not_genes_are_left_out(tmp_path, caplog):
    adata = tiny_counts()
    types = ["Gene Expression"] * adata.n_vars
    types[4] = types[70] = "Antibody Capture"
    types[9] = "CRISPR Guide Capture"
    adata.var_names = [
        *adata.var_names[:70],
        "g0",
        *adata.var_names[71:],
    ]  # an antibody with the name of a gene
    path = write_tenx(tmp_path / "x.h5", adata, types=types)
    kept = np.array(types) == "Gene Expression"
    genes, counts = dense(path, tmp_path)
    assert genes == list(adata.var_names[kept])
    np.testing.assert_array_equal(counts, adata.X.toarray()[:, kept])
    with Inputs([path], DataConfig(), tmp_path):
        assert "not genes are left out (2 Antibody Capture, 1 CRISPR Guide Capture)" in caplog.text


def test_tenx_mistakes(tmp_path):
    adata = tiny_counts()
    config = DataConfig()
    one = write_tenx(tmp_path / "one.h5", adata, version=2)
    with pytest.raises(UserError, match="one matrix, not 'raw'; set data.layer=X"):
        CountsFile(one, DataConfig(layer="raw"), tmp_path)
    with pytest.raises(UserError, match=r"no 'ids' of genes \(data.gene_key\), did you mean 'id'"):
        CountsFile(one, DataConfig(gene_key="ids"), tmp_path)
    with pytest.raises(UserError, match=r"no obs column 'batch' \(data.batch_key\).*--obs"):
        CountsFile(one, config, tmp_path).open_column("batch", "data.batch_key")
    write_tenx(one, adata, version=2, genome="mm10", mode="a")
    with pytest.raises(UserError, match=r"several genomes \(GRCh38, mm10\)"):
        CountsFile(one, config, tmp_path)
    adata.var_names = ["g1", *adata.var_names[1:]]
    twice = write_tenx(tmp_path / "twice.h5", adata)
    with pytest.raises(UserError, match=r"not unique \(g1\); set data.gene_key=id"):
        CountsFile(twice, config, tmp_path)
    assert CountsFile(twice, DataConfig(gene_key="id"), tmp_path).n_cells == adata.n_obs


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("layout", ["csr", "csc", "dense"])
@pytest.mark.parametrize("dtype", ["u1", "i4", "i8", "f4", "f8"])
def test_compressions_and_types(tmp_path, compression, layout, dtype):
    adata = tiny_counts()
    expected = adata.X.toarray()
    if dtype != "u1":
        expected[3, 5] = 70_001  # does not fit 16 bits
        expected[60, 7] = 1 << 20
    matrix = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": np.asarray}[layout](expected.astype(dtype))
    if dtype in ("i8", "f8") and layout != "dense":
        matrix.indices, matrix.indptr = matrix.indices.astype(np.int64), matrix.indptr.astype(np.int64)
    adata.X = matrix
    adata.write_h5ad(tmp_path / "x.h5ad", compression=compression)
    np.testing.assert_array_equal(dense(tmp_path / "x.h5ad", tmp_path / "s")[1], expected)
    np.testing.assert_array_equal(dense(tmp_path / "x.h5ad", tmp_path / "s", 11, 97)[1], expected[11:97])


@pytest.mark.parametrize("layout", ["csr", "csc", "dense"])
def test_sharded_zarr_layers_and_raw(tmp_path, layout):
    adata = tiny_counts()
    expected = adata.X.toarray()
    kind = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": np.asarray}[layout]
    adata.raw = ad.AnnData(kind(expected), adata.obs, adata.var)
    adata.layers["counts"] = kind(expected * 2)

    def shard(write, store, key, element, dataset_kwargs, **_):
        array = isinstance(element, np.ndarray) and element.dtype.kind == "f" and element.size > 1000
        if array or sp.issparse(element):
            chunks, shards = ((16, 20), (64, 40)) if array and element.ndim == 2 else ((128,), (1024,))
            dataset_kwargs = {**dataset_kwargs, "chunks": chunks, "shards": shards}
        write(store, key, element, dataset_kwargs=dataset_kwargs)

    with ad.settings.override(zarr_write_format=3):
        root = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=3)
        ad.experimental.write_dispatched(root, "/", adata, callback=shard)
    stored = root["layers/counts"]
    assert (stored if layout == "dense" else stored["data"]).shards is not None
    np.testing.assert_array_equal(dense(tmp_path / "x.zarr", tmp_path / "a", layer="raw")[1], expected)
    part = dense(tmp_path / "x.zarr", tmp_path / "b", 30, 71, layer="layers/counts")[1]
    np.testing.assert_array_equal(part, expected[30:71] * 2)


def test_genes_by_a_var_column(tmp_path):
    adata = tiny_counts()
    adata.var["gene_ids"] = [f"ENSG{i}" for i in range(adata.n_vars)]
    adata.var["symbol"] = pd.Categorical([f"s{i}" for i in range(adata.n_vars)])
    adata.var["kind"] = "coding"
    adata.var["holes"] = [None if i == 6 else f"h{i}" for i in range(adata.n_vars)]
    adata.raw = adata.copy()
    adata.var_names = ["g1", *adata.var_names[1:]]
    adata.write_h5ad(tmp_path / "x.h5ad")

    def genes(**settings):
        file = CountsFile(tmp_path / "x.h5ad", DataConfig(**settings), tmp_path)
        file.close()
        return file.genes

    assert genes(gene_key="gene_ids")[:2] == ["ENSG0", "ENSG1"]
    assert genes(gene_key="symbol")[:2] == ["s0", "s1"]
    assert genes(gene_key="symbol", layer="raw")[:2] == ["s0", "s1"]
    assert genes(layer="raw")[:2] == ["g0", "g1"]
    with pytest.raises(
        UserError, match=r"not unique \(g1\); set data.gene_key=gene_ids.*symbol.*var_names_make"
    ):
        genes()
    with pytest.raises(UserError, match=r"not unique \(coding\)"):
        genes(gene_key="kind")
    with pytest.raises(
        UserError, match=r"var column 'holes' \(data.gene_key\) has no name for 1 genes.*gene 'g6'"
    ):
        genes(gene_key="holes")
    with pytest.raises(
        UserError, match=r"no var column 'gene_id' \(data.gene_key\), did you mean 'gene_ids'"
    ):
        genes(gene_key="gene_id")


def test_union_and_intersection_of_genes(tmp_path, caplog):
    adata = tiny_counts()
    first, second = adata[:40, 10:60].copy(), adata[40:, 79:29:-1].copy()
    first.write_h5ad(tmp_path / "a.h5ad")
    second.write_h5ad(tmp_path / "b.h5ad")
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    with Inputs(paths, DataConfig(join_genes="union"), tmp_path) as inputs:
        assert inputs.genes == [f"g{i}" for i in [*range(10, 60), *range(79, 59, -1)]]
        columns = inputs.columns_of(inputs.files[1], inputs.genes)
    assert [inputs.genes[k] for k in columns] == list(second.var_names)
    assert "a.h5ad: lacks 20 of the 70 genes" in caplog.text
    assert "b.h5ad: lacks 20 of the 70 genes" in caplog.text
    with Inputs(paths, DataConfig(), tmp_path) as inputs:
        assert inputs.genes == [f"g{i}" for i in range(30, 60)]


@pytest.mark.parametrize("how", ["union", "intersection"])
def test_ids_in_one_file_and_symbols_in_the_other(tmp_path, how):
    adata = tiny_counts()
    adata.write_h5ad(tmp_path / "a.h5ad")
    adata.var_names = [f"ENSG{i}" for i in range(adata.n_vars)]
    adata.write_h5ad(tmp_path / "b.h5ad")
    with pytest.raises(UserError, match=r"no gene in common \(b.h5ad: ENSG0.*a.h5ad: g0, g1.*data.gene_key"):
        Inputs([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], DataConfig(join_genes=how), tmp_path)


def test_a_worker_opens_one_file_alone(tmp_path):
    adata = tiny_counts()
    adata.X = sp.csc_matrix(adata.X)
    adata.write_h5ad(tmp_path / "x.h5ad")
    with Inputs([tmp_path / "x.h5ad"], DataConfig(), tmp_path / "s") as inputs:
        file = inputs.files[0]
        with pytest.raises(RuntimeError, match="prepare"):
            next(file.blocks())
        file.prepare()
        given = file.path, file.config, file.scratch
    other = CountsFile(*given)
    block = next(other.blocks(5, 9))
    other.close()
    assert (block.start, block.stop) == (5, 9)


def test_a_folder_in_place_of_a_zarr_group_s_description_is_told_in_one_line(tmp_path):
    group = zarr.open_group(str(tmp_path / "counts.zarr"), mode="w", zarr_format=2)
    group.create_group("obs")
    description = tmp_path / "counts.zarr" / "obs" / ".zgroup"
    description.unlink()
    description.mkdir()
    line = [
        sys.executable,
        "-m",
        "perturbdiff",
        "--quiet",
        "preprocess",
        str(tmp_path / "counts.zarr"),
        "--out",
    ]
    done = subprocess.run([*line, str(tmp_path / "store")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_layer_needs_no_prefix(tmp_path):
    adata = tiny_counts()
    adata.layers["counts"] = adata.X * 2
    adata.raw = adata
    adata.write_h5ad(tmp_path / "a.h5ad")
    for name, sum_ in (("counts", 2), ("layers/counts", 2), ("raw.X", 1), ("raw/X", 1), ("raw", 1), ("X", 1)):
        with Inputs([tmp_path / "a.h5ad"], DataConfig(layer=name), tmp_path) as inputs:
            block = next(inputs.files[0].blocks())
            assert block.data.sum() == sum_ * adata.X.sum()
    with pytest.raises(
        UserError, match="has no 'count', did you mean 'counts'. data.layer can be X, raw, counts"
    ):
        Inputs([tmp_path / "a.h5ad"], DataConfig(layer="count"), tmp_path)
