"""What a file or folder is, told from its record or its content."""

import shutil

import anndata as ad
import pytest
from fault.user_mistakes import make_members

from perturbdiff.io.recognise import confusion, what_is


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("store", "a store"),
        ("bundle", "a model bundle"),
        ("split.parquet", "a split"),
        ("counts.h5ad", "an h5ad file of cells"),
        ("predictions.h5ad", "a predictions file"),
        ("nothing", ""),
    ],
)
def test_by_record_and_by_content(trained, tmp_path, name, kind):
    make_members(trained)
    assert what_is(trained / name) == kind
    if not kind:
        return
    copy = tmp_path / name  # a file's record lies beside it, and is not copied
    if (trained / name).is_file():
        shutil.copy2(trained / name, copy)
    else:
        shutil.copytree(trained / name, copy, ignore=shutil.ignore_patterns("manifest.json"))
    assert what_is(copy) == kind


def test_zarr_tables_and_texts(trained, tmp_path):
    make_members(trained)
    cells = ad.read_h5ad(trained / "predictions.h5ad")
    cells.write_zarr(tmp_path / "p.zarr")
    assert what_is(tmp_path / "p.zarr") == "a predictions file"
    del cells.uns["perturbdiff"]
    cells.write_zarr(tmp_path / "c.zarr")
    assert what_is(tmp_path / "c.zarr") == "a Zarr file of cells"
    cells.obs.to_parquet(tmp_path / "t.parquet")
    assert what_is(tmp_path / "t.parquet") == "a parquet table"
    (tmp_path / "r.yaml").write_text("train: {}")
    assert what_is(tmp_path / "r.yaml") == "a recipe"
    (tmp_path / "broken.h5ad").write_bytes((trained / "predictions.h5ad").read_bytes()[:4000])
    assert what_is(tmp_path / "broken.h5ad") == ""


def test_what_will_do_is_no_confusion(trained):
    assert confusion(trained / "counts.h5ad", "a file of counts", "an h5ad file of cells") == ""
    assert "this is a store, not a split" in confusion(trained / "store", "a split")
