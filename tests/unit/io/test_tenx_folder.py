"""Folders of Cell Ranger's text files are read like its h5 file."""

import gzip

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.io.counts import CountsFile
from perturbdiff.runtime.errors import UserError


def written(folder, *, prefix="", packed=True, features="features", types=True):
    """The tiny counts as text files; the last gene is an antibody if there are types."""
    adata = tiny_counts()
    folder.mkdir()
    kinds = ["Gene Expression"] * (adata.n_vars - 1) + ["Antibody Capture"]
    rows = [f"ENSG{k}\tSYMBOL{k}" + (f"\t{kinds[k]}" if types else "") for k in range(adata.n_vars)]
    texts = {"barcodes": list(adata.obs_names), features: rows}
    end, opened = (".gz", gzip.open) if packed else ("", open)
    for name, lines in texts.items():
        with opened(folder / f"{prefix}{name}.tsv{end}", "wt") as handle:
            handle.writelines(f"{line}\n" for line in lines)
    with opened(folder / f"{prefix}matrix.mtx{end}", "wb") as handle:
        scipy.io.mmwrite(handle, sp.coo_matrix(adata.X.T.astype(np.int32)))
    return adata


@pytest.mark.parametrize(
    "form", [{}, {"prefix": "GSM1_"}, {"packed": False, "features": "genes", "types": False}], ids=str
)
def test_values_genes_and_cells_are_those_of_the_files(tmp_path, form):
    adata = written(tmp_path / "sample", **form)
    file = CountsFile(tmp_path / "sample", DataConfig(), tmp_path / "scratch")
    genes = adata.n_vars if form.get("types") is False else adata.n_vars - 1
    assert file.genes == [f"SYMBOL{k}" for k in range(genes)]
    assert dict(file.left_out) == ({} if genes == adata.n_vars else {"Antibody Capture": 1})
    assert list(file.cell_names(0, 3)) == list(adata.obs_names[:3])
    file.prepare()
    found = sp.vstack([block.as_csr(genes) for block in file.blocks()])
    np.testing.assert_array_equal(found.toarray(), adata.X[:, :genes].toarray())
    other = CountsFile(tmp_path / "sample", DataConfig(gene_key="id"), tmp_path / "scratch")
    assert other.genes[0] == "ENSG0"


def test_a_missing_file_is_named(tmp_path):
    written(tmp_path / "sample")
    (tmp_path / "sample" / "features.tsv.gz").unlink()
    with pytest.raises(UserError, match=r"sample: has no features.tsv"):
        CountsFile(tmp_path / "sample", DataConfig(), tmp_path)


def test_two_samples_in_a_folder_are_refused(tmp_path):
    written(tmp_path / "sample")
    for file in list((tmp_path / "sample").iterdir()):
        (tmp_path / "sample" / f"second_{file.name}").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="several files of one kind"):
        CountsFile(tmp_path / "sample", DataConfig(), tmp_path)


def test_files_of_different_samples_are_refused(tmp_path):
    written(tmp_path / "sample")
    with gzip.open(tmp_path / "sample" / "barcodes.tsv.gz", "wt") as handle:
        handle.write("cell0\n")
    with pytest.raises(UserError, match="barcodes.tsv.gz has 1"):
        CountsFile(tmp_path / "sample", DataConfig(), tmp_path)


@pytest.mark.parametrize(
    "text", [b"", b"%%MatrixMarket matrix coordinate integer general\n80 108 99999999\n", b"%%\nno numbers\n"]
)
def test_a_damaged_matrix_is_told_in_one_line(tmp_path, text):
    written(tmp_path / "sample")
    with gzip.open(tmp_path / "sample" / "matrix.mtx.gz", "wb") as handle:
        handle.write(text)
    with pytest.raises(UserError, match="damaged or incomplete"):
        CountsFile(tmp_path / "sample", DataConfig(), tmp_path)
