"""AnnData as input: whatever its format, layout and number type, the same cells come out, in bounded memory."""

from __future__ import annotations

import gc
import tempfile
import tracemalloc

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from evaluation_pair import GENES, pair_side

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.readers.cell_sources import read_labelled_rows
from perturbdiff.evaluation.readers.inputs import open_predictions, open_truth
from perturbdiff.io import row_file
from perturbdiff.io.row_file import RowFile
from perturbdiff.runtime.errors import UserError

LAYOUTS = {
    "csr": lambda x: x,
    "csc": lambda x: x.tocsc(),
    "dense": lambda x: x.toarray(),
    "float16": lambda x: x.toarray().astype(np.float16),
    "float64": lambda x: x.astype(np.float64),
}
CASES = [("h5ad", layout, way) for layout in LAYOUTS for way in ("held", "disk", "sorted copy")]
CASES += [(kind, layout, "disk") for kind in ("zarr2", "zarr3") for layout in ("csr", "csc", "dense")]
CONFIG = EvaluateConfig()


def written(adata, folder, kind):
    """Write ``adata`` in the format ``kind``."""
    if kind == "h5ad":
        adata.write_h5ad(folder / "x.h5ad", compression="gzip")
        return folder / "x.h5ad"
    with ad.settings.override(zarr_write_format=int(kind[-1])):
        adata.write_zarr(folder / "x.zarr")
    return folder / "x.zarr"


def from_disk(monkeypatch, *, scattered):
    """Make readers hold nothing, and see rows as scattered or not."""
    monkeypatch.setattr(row_file, "HELD_VALUES", 0)
    monkeypatch.setattr(row_file, "scattered", lambda *_: scattered)
    monkeypatch.setattr(row_file, "_PIECE", 300)


@pytest.mark.parametrize(("kind", "layout", "way"), CASES)
@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_every_layout_and_way_gives_the_same_cells(tmp_path, monkeypatch, kind, layout, way):
    if way != "held":
        from_disk(monkeypatch, scattered=way == "sorted copy")
    adata = pair_side(1)
    shuffled = adata[np.random.default_rng(3).permutation(len(adata))].copy()
    expected = shuffled.X.toarray()
    shuffled.X = LAYOUTS[layout](shuffled.X)
    cells = open_predictions(written(shuffled, tmp_path, kind), CONFIG)
    assert len(cells.rows) == 12
    assert len(cells.controls) == 4
    tolerance = 1e-3 if layout == "float16" else 0
    for (p, t, b), rows in [*cells.rows.items(), *((("control", *g), r) for g, r in cells.controls.items())]:
        o = shuffled.obs
        mine = np.flatnonzero((o["cell_type"] == t) & (o["batch"] == b) & (o["perturbation"] == p))
        np.testing.assert_array_equal(rows, mine)
        for wanted in (rows, rows[::-2], np.repeat(rows[:2], 2), rows[:0]):
            found = cells.reader.expression(wanted)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found.toarray(), expected[wanted], atol=tolerance)
    np.testing.assert_allclose(cells.reader.depths(), expected.sum(axis=1), rtol=1e-3)
    assert cells.reader.cell_name(7) == shuffled.obs_names[7]


def test_temporary_copies_go_with_their_reader(tmp_path, monkeypatch):
    from_disk(monkeypatch, scattered=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    adata = pair_side(1)
    adata.X = adata.X.tocsc()
    cells = open_predictions(written(adata, tmp_path, "h5ad"), CONFIG)
    assert list((tmp_path / "scratch").iterdir())
    del cells
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())


def test_scattered_rows_are_those_whose_chunks_would_be_decoded_again_and_again():
    ends = np.arange(100_001) * 100  # 100 values a row
    together = np.split(np.arange(100_000), 100)
    apart = [np.arange(k, 100_000, 100) for k in range(100)]
    few = [np.arange(k, k + 3) for k in range(0, 1000, 10)]
    assert not row_file.scattered(together, ends, 1 << 16)
    assert row_file.scattered(apart, ends, 1 << 16)
    assert not row_file.scattered(few, ends, 1 << 16)


def test_stored_zeros_unsorted_and_repeated_entries_are_tidied(tmp_path):
    adata = pair_side(1)
    x = adata.X.tolil()
    row = sp.csr_matrix((np.float32([0.0, 1.5, 0.25, 0.25]), [9, 3, 1, 1], [0, 4]), shape=(1, len(GENES)))
    adata.X = sp.vstack([row, x[1:].tocsr()], format="csr")
    first = open_predictions(written(adata, tmp_path, "h5ad"), CONFIG).reader.expression(np.array([0]))
    assert first.indices.tolist() == [1, 3]
    assert first.data.tolist() == [0.5, 1.5]


def test_a_million_labels_in_little_time_and_memory(tmp_path):
    n, rng = 1_000_000, np.random.default_rng(0)
    codes = rng.integers(0, 1001, n)
    names = ["control", *(f"p{k}" for k in range(1000))]
    obs = pd.DataFrame(
        {"perturbation": pd.Categorical.from_codes(codes, names)}, index=np.arange(n).astype("S7")
    )
    obs.index = obs.index.astype(str)
    adata = ad.AnnData(sp.csr_matrix((n, 3), dtype=np.float32), obs)
    adata.write_h5ad(tmp_path / "big.h5ad")
    reader = RowFile(tmp_path / "big.h5ad")
    columns = {"perturbation": "perturbation", "cell_type": None, "batch": None}
    tracemalloc.start()
    labelled = read_labelled_rows(reader, columns)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(labelled.rows) == 1001
    assert kept < 8.5 * n  # bytes
    assert peak < 24 * n
    np.testing.assert_array_equal(labelled.rows["p7", "all", "all"], np.flatnonzero(codes == 8))


def test_columns_by_option_for_both_sides_and_our_own_for_predictions(tmp_path):
    adata = pair_side(0)
    ours = open_predictions(
        written(adata, tmp_path, "h5ad"), EvaluateConfig(perturbation_key="guide", batch_key="lane")
    )
    adata.obs = adata.obs.rename(columns={"perturbation": "guide", "batch": "lane", "cell_type": "line"})
    config = EvaluateConfig(
        perturbation_key="guide", batch_key="lane", cell_type_key="line", context_column="line"
    )
    path = written(adata, tmp_path, "zarr3")
    theirs, truth = open_predictions(path, config), open_truth(path, config)
    assert ours.rows.keys() == theirs.rows.keys() == truth.rows.keys()
    assert truth.contexts["p1", "B", "d1"] == "B"
    without = open_truth(path, EvaluateConfig(perturbation_key="guide", batch_key=None))
    assert set(without.rows) == {(p, "all", "all") for p in ("p1", "p2", "p3")}
    assert without.covariates == frozenset()
    assert without.contexts == {}
    with pytest.raises(UserError, match="no obs column 'lan', did you mean 'lane'"):
        open_truth(path, EvaluateConfig(perturbation_key="guide", batch_key="lan"))


def test_labels_may_be_texts_numbers_or_categories(tmp_path):
    adata = pair_side(0)
    known = open_truth(written(adata, tmp_path, "h5ad"), CONFIG)
    adata.obs["perturbation"] = adata.obs["perturbation"].astype(str)
    adata.obs["batch"] = adata.obs["batch"].map({"d1": 1, "d2": 2}).astype(int)
    found = open_truth(written(adata, tmp_path, "zarr3"), CONFIG)
    assert set(found.rows) == {(p, t, b[1:]) for p, t, b in known.rows}
    np.testing.assert_array_equal(found.rows["p2", "T", "2"], known.rows["p2", "T", "d2"])


def test_contexts_are_cell_types_unless_said_and_constant_in_a_condition(tmp_path):
    adata = pair_side(0)
    adata.obs["donor"] = np.where(adata.obs["batch"] == "d1", "x", "y")
    adata.obs["lane"] = np.arange(len(adata)) % 2
    path = written(adata, tmp_path, "h5ad")
    assert set(open_truth(path, CONFIG).contexts.values()) == {"B", "T"}
    assert open_truth(path, EvaluateConfig(context_column="donor")).contexts["p1", "T", "d2"] == "y"
    with pytest.raises(UserError, match="several contexts of 'lane'"):
        open_truth(path, EvaluateConfig(context_column="lane"))


def test_a_declared_control_is_not_overridden(tmp_path):
    path = written(pair_side(0), tmp_path, "h5ad")
    with pytest.raises(UserError, match="declares its control to be 'control', not 'p1'"):
        open_truth(path, EvaluateConfig(control="p1"))


def test_a_control_may_be_called_none(tmp_path):
    adata = pair_side(1)
    labels = adata.obs["perturbation"].astype(str).replace("control", "None")
    adata.obs["perturbation"] = labels.to_numpy()
    del adata.uns["perturbdiff"]["control"]
    path = written(adata, tmp_path, "h5ad")
    with pytest.raises(UserError, match="--control"):
        open_predictions(path, CONFIG)
    cells = open_predictions(path, EvaluateConfig(control="None"))
    assert cells.control == "None"
    assert len(cells.controls) == 4
