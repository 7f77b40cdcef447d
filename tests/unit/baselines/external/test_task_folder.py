"""What reaches an adapter: training cells and controls, the cells to predict, nothing of a held-out cell."""

import hashlib
import importlib.util
import json
import tracemalloc

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from noisy_store import noisy_store
from small_store import small_store
from tiny_data import tiny_counts

from perturbdiff.baselines.baseline_task import open_task
from perturbdiff.baselines.external import task_folder
from perturbdiff.baselines.external.task_folder import ADAPTERS
from perturbdiff.config.settings import DataConfig
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.splits.splits import parts, read_split
from perturbdiff.store.store import Store

OVERRIDES = ["split.valid_fraction=0.3", "split.train_fraction=0.34"]
LABELS = ["perturbation", "cell_type", "batch"]
ODD = {"p1": "a, b", "p2": 'say "x"+β', "p3": "NA"}


def adapters_module():
    spec = importlib.util.spec_from_file_location("perturbdiff_adapter", ADAPTERS / "perturbdiff_adapter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Task = adapters_module().Task


def written(store, split, folder, seed=0, part="test"):
    task, wanted = open_task(Store(store), read_split(split), part, seed)
    folder.mkdir()
    facts = task_folder.write_task(folder, task, wanted["n_cells"].to_numpy(), method="m", settings={"epochs": 3},
                                   threads=2, device="cpu")  # fmt: skip
    return facts, wanted


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("task"), OVERRIDES)


@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "task"
    facts, wanted = written(small.store, small.split, folder)
    return folder, facts, wanted


def test_files_are_the_same_to_the_bit_when_held_out_cells_are_noise(small, made, tmp_path):
    written(noisy_store(small, tmp_path / "noisy"), small.split, tmp_path / "task")
    for path in made[0].iterdir():
        other = tmp_path / "task" / path.name
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()


def test_training_cells_are_those_of_the_split_and_all_controls(small, made):
    folder, facts, _ = made
    store, train = small.opened, ad.read_h5ad(folder / "train.h5ad")
    part = np.repeat(parts(store.conditions, read_split(small.split)), store.conditions["n_cells"])
    is_control = np.repeat(store.conditions["is_control"].to_numpy(), store.conditions["n_cells"])
    rows = np.flatnonzero((part == "train") | is_control)
    assert facts.n_cells == len(rows) == train.n_obs
    assert {"valid", "test"} <= set(part)  # something was left out
    obs = store.obs([*LABELS, "cell", "n_counts"]).iloc[rows]
    assert train.obs_names.tolist() == obs["cell"].astype(str).tolist()
    for name in LABELS:
        assert train.obs[name].astype(str).tolist() == obs[name].astype(str).tolist()
        assert train.obs[name].cat.categories.tolist() == sorted(set(obs[name].astype(str)))
    np.testing.assert_array_equal(train.X.toarray(), store.expression(rows).toarray())
    np.testing.assert_array_equal(train.obs["is_control"], is_control[rows])
    np.testing.assert_array_equal(train.obs["n_counts"], obs["n_counts"])
    np.testing.assert_array_equal(facts.maxima, train.X.max(axis=0).toarray()[0])
    assert train.var_names.tolist() == store.genes


def test_a_query_for_each_real_cell_with_a_control_of_its_own_cell_type_and_batch(small, made):
    folder, _, wanted = made
    task = Task(folder)
    expected = wanted.loc[wanted.index.repeat(wanted["n_cells"]), LABELS].astype(str).reset_index(drop=True)
    pd.testing.assert_frame_equal(task.queries[LABELS], expected, check_dtype=False)
    controls = task.train.obs.iloc[task.queries["control_row"]]
    assert controls["is_control"].all()
    for name in LABELS[1:]:
        assert controls[name].astype(str).tolist() == task.queries[name].tolist()
    for _, rows in task.queries.groupby(LABELS)["control_row"]:
        assert rows.is_unique  # 24 controls, at most 12 cells


def test_the_matched_controls_depend_on_the_seed_and_nothing_else_does(small, made, tmp_path):
    written(small.store, small.split, tmp_path / "one", seed=1)
    first, second = Task(made[0]), Task(tmp_path / "one")
    assert (first.seed, second.seed) == (0, 1)
    pd.testing.assert_frame_equal(first.queries[LABELS], second.queries[LABELS])
    assert (first.queries["control_row"] != second.queries["control_row"]).any()
    np.testing.assert_array_equal(first.dense(), second.dense())


def test_task_says_what_an_adapter_must_know(small, made):
    facts = json.loads((made[0] / "task.json").read_text())
    assert facts == {
        "contract": task_folder.CONTRACT, "method": "m", "control": "control", "seed": 0, "threads": 2,
        "target_sum": small.opened.target_sum, "has_counts": True, "device": "cpu", "device_required": True,
        "settings": {"epochs": 3},
    }  # fmt: skip
    assert Task(made[0]).settings.epochs == 3


def test_labels_keep_their_characters(tmp_path):
    adata = tiny_counts()
    adata.obs["perturbation"] = adata.obs["perturbation"].cat.rename_categories(ODD)
    adata.obs["cell_type"] = adata.obs["cell_type"].cat.rename_categories({"B": "1", "T": "nan"})
    small = small_store(tmp_path, ["split.valid_fraction=0"], adata)
    written(small.store, small.split, tmp_path / "task")
    task = Task(tmp_path / "task")
    assert set(task.queries["perturbation"]) <= set(ODD.values())
    assert "NA" in set(task.queries["perturbation"]) | set(task.labels("perturbation"))
    assert set(task.labels("perturbation")) | set(task.queries["perturbation"]) == {"control", *ODD.values()}
    assert set(task.queries["cell_type"]) <= {"1", "nan"} == set(task.labels("cell_type"))
    task.require_seen()


def test_counts_are_the_raw_counts(small, made):
    task = Task(made[0])
    raw = ad.read_h5ad(small.counts)[task.train.obs_names.tolist(), task.genes].X.toarray()
    np.testing.assert_array_equal(task.counts(), raw)
    rows = np.array([5, 2, 2])
    np.testing.assert_array_equal(task.counts(rows), raw[rows])


def test_large_counts_come_back_exactly(tmp_path):
    adata = tiny_counts()
    adata.X = sp.csr_matrix(adata.X.toarray() * np.random.default_rng(0).integers(1, 3000, adata.shape))
    adata.X = adata.X.astype(np.float32)
    assert adata.X.max() > 20_000
    small = small_store(tmp_path, ["split.valid_fraction=0"], adata)
    written(small.store, small.split, tmp_path / "task")
    task = Task(tmp_path / "task")
    np.testing.assert_array_equal(task.counts(), adata[task.train.obs_names.tolist(), task.genes].X.toarray())


def test_without_counts_an_adapter_that_needs_them_refuses(small, tmp_path, capsys):
    adata = tiny_counts()
    adata.X = sp.csr_matrix(np.log1p(adata.X.toarray() / 3)).astype(np.float32)
    adata.write_h5ad(tmp_path / "log.h5ad")
    store = preprocess([tmp_path / "log.h5ad"], tmp_path / "store", DataConfig(input_scale="log1p"))
    written(store, small.split, tmp_path / "task")
    task = Task(tmp_path / "task")
    assert not task.has_counts
    with pytest.raises(SystemExit) as stop:
        task.counts()
    assert stop.value.code == 3
    assert "refused: needs raw counts" in capsys.readouterr().err


def test_unseen_perturbations_can_be_refused(small, tmp_path, capsys):
    table = read_split(small.split)
    table.loc[table["perturbation"] == "p3", "part"] = "test"
    table.to_parquet(tmp_path / "split.parquet")
    written(small.store, tmp_path / "split.parquet", tmp_path / "task")
    task = Task(tmp_path / "task")
    assert "p3" not in task.train.obs["perturbation"].cat.categories
    with pytest.raises(SystemExit):
        task.require_seen()
    assert "do not occur in training: 1 (p3)" in capsys.readouterr().err


def test_cells_are_copied_in_blocks(small, made, tmp_path, monkeypatch):
    sizes, read = [], task_folder.read_rows
    monkeypatch.setattr(task_folder, "_ROWS_PER_BLOCK", 7)
    monkeypatch.setattr(
        task_folder, "read_rows", lambda s, rows, scale: sizes.append(len(rows)) or read(s, rows, scale)
    )
    written(small.store, small.split, tmp_path / "task")
    assert max(sizes) == 7
    one, many = ad.read_h5ad(made[0] / "train.h5ad"), ad.read_h5ad(tmp_path / "task" / "train.h5ad")
    np.testing.assert_array_equal(one.X.toarray(), many.X.toarray())
    pd.testing.assert_frame_equal(one.obs, many.obs)


def test_memory_grows_by_far_less_than_the_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(task_folder, "_ROWS_PER_BLOCK", 64)
    monkeypatch.setattr("perturbdiff.store.stored_rows.CACHE_BYTES", 1)
    monkeypatch.setattr("perturbdiff.conditions.control_matching.SLICE", 16)
    peaks, cells = [], []
    for number in (4, 32):
        wide = tiny_counts(genes=400)
        adata = ad.concat([wide] * number, index_unique="-")
        small = small_store(tmp_path / str(number), ["split.valid_fraction=0", "data.num_hvgs=400"], adata)
        written(small.store, small.split, tmp_path / f"warm{number}")
        tracemalloc.start()
        facts, _ = written(small.store, small.split, tmp_path / f"task{number}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        cells.append(facts.n_cells)
    per_cell = (peaks[1] - peaks[0]) / (cells[1] - cells[0])
    assert per_cell < 400, per_cell  # labels and row numbers; a cell's values take some 2,000 bytes


def test_a_method_without_gpu_support_goes_on_unless_the_user_insists(made, capsys):
    task = Task(made[0])
    task.device, task.device_required = "cuda", False
    task.without_gpu("JAX finds none")
    assert task.device == "cpu"
    assert task.facts["no_gpu"] == "JAX finds none"
    task.device_required = True
    with pytest.raises(SystemExit):
        task.without_gpu("JAX finds none")
    assert "refused: JAX finds none; --device cpu works" in capsys.readouterr().err
