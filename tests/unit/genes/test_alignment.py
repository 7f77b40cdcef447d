"""Alignment of data to a gene list: the report by hand, the written file, other spellings, mistakes."""

import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
from small_store import small_store

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes import aligned_file
from perturbdiff.genes.alignment import align_genes
from perturbdiff.runtime.errors import UserError

CONFIG = DataConfig()


@pytest.fixture
def data(tmp_path):
    """Three cells, four genes, several kinds of obs columns."""
    x = np.array([[1, 0, 2, 3], [0, 4, 0, 0], [5, 0, 0, 6]], np.float32)
    obs = pd.DataFrame(
        {"type": pd.Categorical(["a", "b", "a"]), "size": [1.5, 2.0, 3.0], "note": ["x", None, "z"]},
        index=["c1", "c2", "c3"],
    )
    made = ad.AnnData(sp.csr_matrix(x), obs, pd.DataFrame(index=["A", "b", "C.1", "D"]))
    made.write_h5ad(tmp_path / "data.h5ad")
    return made


@pytest.fixture
def genes(tmp_path):
    path = tmp_path / "genes.txt"
    path.write_text("D\nB\nE\nA\n")
    return path


def test_report_by_hand(data, genes, tmp_path):
    out = align_genes(tmp_path / "data.h5ad", genes, tmp_path / "report", CONFIG)
    table = pd.read_csv(out / "alignment.csv").fillna("")
    assert table["gene"].tolist() == ["D", "B", "E", "A", "b", "C.1"]
    assert table["status"].tolist() == ["shared", "missing", "missing", "shared", "extra", "extra"]
    assert table["place"].tolist() == [0, 1, 2, 3, -1, -1]
    assert table["column"].tolist() == [3, -1, -1, 0, 1, 2]
    assert table["total"].tolist() == [9, 0, 0, 6, 4, 2]
    assert table["cells"].tolist() == [2, 0, 0, 2, 1, 1]
    assert table["possible_synonym"].tolist() == ["", "b (case)", "", "", "", ""]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["share_kept"] == pytest.approx(15 / 21, abs=1e-6)
    assert (summary["shared"], summary["missing"], summary["extra"]) == (2, 2, 2)
    assert (summary["share_of_list"], summary["share_of_data"]) == (0.5, 0.5)


@pytest.mark.parametrize("kind", ["csr", "csc", "dense", "zarr"])
def test_written_file(data, genes, tmp_path, kind):
    source = tmp_path / ("other.zarr" if kind == "zarr" else "other.h5ad")
    if kind == "zarr":
        data.write_zarr(source)
    else:
        data.X = data.X.toarray() if kind == "dense" else data.X.asformat(kind)
        data.write_h5ad(source)
    before = set(tmp_path.iterdir())
    align_genes(source, genes, tmp_path / "report", CONFIG, write=tmp_path / "aligned.h5ad")
    made = {p.name for p in set(tmp_path.iterdir()) - before}
    assert made == {"report", "aligned.h5ad", "aligned.h5ad.manifest.json", "aligned.h5ad.run.json"}
    aligned = ad.read_h5ad(tmp_path / "aligned.h5ad")
    assert aligned.X.dtype == np.float32
    assert aligned.X.toarray().tolist() == [[3, 0, 0, 1], [0, 0, 0, 0], [6, 0, 0, 5]]
    assert aligned.var_names.tolist() == ["D", "B", "E", "A"]
    assert aligned.var["in_source"].tolist() == [True, False, False, True]
    assert aligned.obs_names.tolist() == ["c1", "c2", "c3"]
    assert aligned.obs["type"].tolist() == ["a", "b", "a"]
    assert aligned.obs["size"].tolist() == [1.5, 2.0, 3.0]
    assert aligned.obs["note"].isna().tolist() == [False, True, False]
    assert aligned.obs[aligned_file.DEPTH].tolist() == [6, 4, 11]
    sc.pp.normalize_total(aligned)


def test_values_that_need_more_than_float32(genes, tmp_path, monkeypatch):
    monkeypatch.setattr(aligned_file, "_CHUNK", 2)
    x = np.array([[1.0, 2.0], [3.0, 2.0**24 + 1]])
    made = ad.AnnData(sp.csr_matrix(x), var=pd.DataFrame(index=["A", "D"]))
    made.write_h5ad(tmp_path / "large.h5ad")
    monkeypatch.setattr("perturbdiff.io.matrices.VALUES_PER_BLOCK", 2)
    align_genes(tmp_path / "large.h5ad", genes, tmp_path / "r", CONFIG, write=tmp_path / "w.h5ad")
    written = ad.read_h5ad(tmp_path / "w.h5ad")
    assert written.X.dtype == np.float64
    assert written[:, ["A", "D"]].X.toarray().tolist() == x.tolist()


def test_a_store(tmp_path):
    made = small_store(tmp_path)
    store = made.opened
    wanted = [*store.genes[::-1][:20], "absent"]
    (tmp_path / "list.txt").write_text("\n".join(wanted))
    aligned = tmp_path / "aligned.h5ad"
    out = align_genes(made.store, tmp_path / "list.txt", tmp_path / "report", CONFIG, write=aligned)
    found = ad.read_h5ad(aligned)
    rows = store.counts(slice(0, store.n_cells)).toarray()
    columns = [store.genes.index(g) for g in wanted[:-1]]
    np.testing.assert_array_equal(found.X.toarray(), np.c_[rows[:, columns], np.zeros(len(rows))])
    obs = store.obs()
    assert found.obs_names.tolist() == obs["cell"].tolist()
    assert found.obs["perturbation"].tolist() == obs["perturbation"].tolist()
    assert found.obs["n_counts"].tolist() == obs["n_counts"].tolist()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["share_kept"] == pytest.approx(rows[:, columns].sum() / rows.sum(), abs=1e-6)


def test_it_is_done_once(data, genes, tmp_path, monkeypatch):
    arguments = (tmp_path / "data.h5ad", genes, tmp_path / "report", CONFIG)
    align_genes(*arguments, write=tmp_path / "w.h5ad")
    monkeypatch.setattr("perturbdiff.genes.alignment.open_cells", None)
    align_genes(*arguments, write=tmp_path / "w.h5ad")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "B", "c.1", "d"], "2 differ in spelling only"),
        ([f"ENSG{i:011d}" for i in range(4)], r"gene ids.*data\.gene_key .*gene names"),
        (["w", "x", "y", "z"], r"no gene in common \(data.h5ad|no gene in common"),
    ],
)
def test_nothing_shared(data, genes, tmp_path, names, message):
    data.var_names = names
    data.write_h5ad(tmp_path / "data.h5ad")
    genes.write_text("A\nD\n")
    with pytest.raises(UserError, match=message):
        align_genes(tmp_path / "data.h5ad", genes, tmp_path / "report", CONFIG)
    assert not (tmp_path / "report").exists()


def test_other_mistakes(data, genes, tmp_path):
    with pytest.raises(UserError, match="ends in .h5ad"):
        align_genes(tmp_path / "data.h5ad", genes, tmp_path / "r", CONFIG, write=tmp_path / "x.zarr")
    with pytest.raises(UserError, match="gene list not found"):
        align_genes(tmp_path / "data.h5ad", tmp_path / "no.txt", tmp_path / "r", CONFIG)
    (tmp_path / "vocab").mkdir()
    with pytest.raises(UserError, match=r"folder without genes\.txt"):
        align_genes(tmp_path / "data.h5ad", tmp_path / "vocab", tmp_path / "r", CONFIG)
    genes.write_text("A\nA\n")
    with pytest.raises(UserError, match="names a gene twice"):
        align_genes(tmp_path / "data.h5ad", genes, tmp_path / "r", CONFIG)
    genes.write_text("# nothing\n")
    with pytest.raises(UserError, match="names no gene"):
        align_genes(tmp_path / "data.h5ad", genes, tmp_path / "r", CONFIG)
