"""Parquet files of cells with lists of gene tokens: rows, labels, names of genes, and what is wrong with them."""

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from public_schemas import GENES, tahoe_parquet, tahoe_plate
from pyarrow import parquet

from perturbdiff.config.settings import DataConfig
from perturbdiff.io import token_parquet
from perturbdiff.io.columns import Texts
from perturbdiff.io.counts import CountsFile
from perturbdiff.runtime.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data set of two shards in small row groups, and its cells as AnnData."""
    folder = tmp_path_factory.mktemp("tahoe")
    plates = [tahoe_plate(folder / f"plate{k}.h5ad", plate=k, every=False) for k in (1, 2)]
    cells = [ad.read_h5ad(plate) for plate in plates]
    every = ad.concat([one[one.obs["pass_filter"] == "full"] for one in cells])
    return tahoe_parquet(folder / "hub", plates, row_group_size=7), every


def dense(file, start, stop):
    blocks = list(file.blocks(start, stop))
    assert [block.start for block in blocks][1:] == [block.stop for block in blocks][:-1]
    return np.concatenate([block.as_csr(GENES).toarray() for block in blocks])


@pytest.mark.parametrize("rows", [1, 5, 512])
def test_any_rows_are_read(made, tmp_path, monkeypatch, rows):
    monkeypatch.setattr(token_parquet, "_ROWS_PER_READ", rows)
    folder, cells = made
    file = CountsFile(folder, DataConfig(), tmp_path)
    assert (file.n_cells, file.genes) == (cells.n_obs, list(cells.var_names))
    assert file.matrix.num_values == cells.X.nnz + cells.n_obs  # markers
    for start, stop in ((0, None), (3, 5), (cells.n_obs // 2 - 2, cells.n_obs // 2 + 9), (40, 41)):
        np.testing.assert_array_equal(dense(file, start, stop), cells.X[start:stop].toarray())
    assert file.cell_names(44, 52).tolist() == cells.obs_names[44:52].tolist()


def test_labels_of_cells_and_of_their_samples(made, tmp_path):
    folder, cells = made
    file = CountsFile(folder, DataConfig(), tmp_path)
    assert file.columns[:3] == ["drug", "sample", "cell_line_id"]
    for name in ("drugname_drugconc", "plate"):
        assert file.column(name).astype(str).tolist() == cells.obs[name].astype(str).tolist()
    texts = Texts(["CVCL_0023"])
    codes = file.open_column("cell_line_id").codes(9, 31, texts)
    assert [texts.names[k] for k in codes] == cells.obs["cell_line"][9:31].tolist()
    assert set(file.open_column("canonical_smiles").codes(0, 20, Texts())) == {-1}


def test_one_shard_alone_and_names_of_genes(made, tmp_path):
    folder, cells = made
    shard = sorted((folder / "data").iterdir())[1]
    file = CountsFile(shard, DataConfig(gene_key="ensembl_id"), tmp_path)
    assert file.n_cells == cells.n_obs // 2
    assert file.genes[1] == "ENSG00000000001"
    with pytest.raises(UserError, match="no column 'symbol'"):
        CountsFile(shard, DataConfig(gene_key="symbol"), tmp_path)
    (tmp_path / "data").mkdir()
    alone = tmp_path / "data" / shard.name
    alone.write_bytes(shard.read_bytes())
    with pytest.raises(UserError, match=r"no gene_metadata.parquet"):
        CountsFile(alone, DataConfig(), tmp_path)


def written(folder, **columns):
    """Write one file of cells and a table of two genes."""
    path = folder / "cells.parquet"
    parquet.write_table(pa.table(columns), path)
    pd.DataFrame({"gene_symbol": ["A", "B"], "token_id": [3, 4]}).to_parquet(folder / "gene_metadata.parquet")
    return path


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"genes": [[1, 3, 9]], "expressions": [[-2.0, 1.0, 1.0]]}, "gene token 9 is not in"),
        (
            {"genes": [[3, 4], [4]], "expressions": [[1.0, 1.0], [1.0, 2.0]]},
            "row 1 has another number of genes",
        ),
        ({"genes": [[3, None]], "expressions": [[1.0, 1.0]]}, "an entry without a value"),
        ({"genes": [["A"]], "expressions": [[1.0]]}, "not lists of whole numbers"),
        ({"genes": [3], "expressions": [1.0]}, "column 'genes' is int64"),
    ],
)
def test_damage_is_told(tmp_path, columns, message):
    path = written(tmp_path, **columns)
    with pytest.raises(UserError, match=message):
        list(CountsFile(path, DataConfig(), tmp_path).blocks())


def test_cells_without_marker_names_or_values(tmp_path):
    path = written(tmp_path, genes=[[4, 3], [], None, [3]], expressions=[[1.0, 2.0], [], None, [7.0]])
    file = CountsFile(path, DataConfig(), tmp_path)
    (block,) = file.blocks()
    assert block.as_csr(2).toarray().tolist() == [[2, 1], [0, 0], [0, 0], [7, 0]]
    assert block.indices.tolist() == [0, 1, 0]
    assert file.cell_names(2, 4).tolist() == ["2", "3"]


def test_shards_of_two_data_sets_are_refused(made, tmp_path):
    folder, _ = made
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.parquet").write_bytes(next((folder / "data").iterdir()).read_bytes())
    written(tmp_path / "data", genes=[[3]], expressions=[[1.0]]).rename(tmp_path / "data" / "a.parquet")
    with pytest.raises(UserError, match=r"b.parquet: has other columns than a.parquet"):
        CountsFile(tmp_path, DataConfig(), tmp_path)


def test_a_cut_off_file_is_told(made, tmp_path):
    folder, _ = made
    whole = next((folder / "data").iterdir()).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError):
        CountsFile(tmp_path / "cut.parquet", DataConfig(), tmp_path)
