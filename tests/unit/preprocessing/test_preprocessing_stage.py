"""The store that preprocessing makes: same cells, right order, bounded buckets, equal bytes, nothing half done."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tiny_data import tiny_counts

from perturbdiff.conditions.condition import condition_table
from perturbdiff.config.settings import DataConfig
from perturbdiff.preprocessing import passes, reordering, scan
from perturbdiff.preprocessing import preprocessing_stage as module
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.preprocessing.reordering import plan_buckets
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.store import store_writer
from perturbdiff.store.store import Store

KEYS = ["cell_type", "batch", "perturbation"]


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of about 40 cells, buckets of about 8, parts of about 130, shards of 64 rows."""
    monkeypatch.setattr(passes, "VALUES_PER_PIECE", 2000)
    monkeypatch.setattr(module.Machine, "crew", lambda *_: TaskRunner(1))
    monkeypatch.setattr(module, "BUCKET_VALUES", 400)
    monkeypatch.setattr(module, "CELLS_PER_PART", (130, 130))
    monkeypatch.setattr(store_writer, "ROWS_PER_CHUNK", 4)
    monkeypatch.setattr(store_writer, "ROWS_PER_SHARD", 16)


def contents(folder: Path) -> dict[str, bytes]:
    skip = {"run.json"}
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in skip
    }


def check_cells(store: Store, adata: ad.AnnData) -> None:
    """Every cell of ``adata`` is in the store once, with its labels and its counts."""
    obs = store.obs()
    assert sorted(obs["cell"]) == sorted(adata.obs_names)
    pd.testing.assert_frame_equal(
        obs[KEYS].astype(str),
        adata.obs.loc[obs["cell"], KEYS].astype(str).reset_index(drop=True),
        check_index_type=False,
    )
    assert (store.counts(slice(None)) != adata[obs["cell"], store.genes].X).nnz == 0
    depth = np.asarray(adata[obs["cell"]].X.sum(axis=1)).ravel()
    np.testing.assert_array_equal(obs["n_counts"], depth)


def check_order(store: Store) -> None:
    """Rows follow the table of conditions, which is sorted with controls first."""
    table, obs = store.conditions, store.obs(KEYS).astype(str)
    expected = condition_table(obs, store.control)
    pd.testing.assert_frame_equal(table.drop(columns="part"), expected.drop(columns="part"))
    for row in table.itertuples():
        own = obs.iloc[row.start : row.stop]
        assert (own == [row.cell_type, row.batch, row.perturbation]).all().all()
        control = table.loc[row.control]
        assert control["is_control"]
        assert (control["cell_type"], control["batch"]) == (row.cell_type, row.batch)


def test_cells_and_order(counts_file, tmp_path):
    store = Store(preprocess([counts_file], tmp_path / "store", DataConfig(num_hvgs=30)))
    assert store.n_genes == 30
    assert store.dtype == np.uint16
    check_cells(store, ad.read_h5ad(counts_file))
    check_order(store)


def test_several_parts_and_split_conditions_give_the_same_cells_in_the_same_order(
    counts_file, tmp_path, monkeypatch, small_pieces
):
    many = Store(preprocess([counts_file], tmp_path / "many", DataConfig()))
    monkeypatch.undo()
    one = Store(preprocess([counts_file], tmp_path / "one", DataConfig()))
    assert many.conditions["part"].nunique() == 2
    check_cells(many, ad.read_h5ad(counts_file))
    check_order(many)
    pd.testing.assert_frame_equal(many.obs(), one.obs())
    assert (many.counts(slice(None)) != one.counts(slice(None))).nnz == 0
    np.testing.assert_array_equal(many.max_value(), one.max_value())


def test_cells_are_shuffled_by_the_seed_within_conditions_only(counts_file, tmp_path):
    first, second = (
        Store(preprocess([counts_file], tmp_path / f"s{s}", DataConfig(), seed=s)).obs() for s in (0, 1)
    )
    pd.testing.assert_frame_equal(first[KEYS], second[KEYS])
    rows = first["source_row"].to_numpy()[:24]
    assert sorted(rows) == sorted(second["source_row"][:24])
    assert not np.array_equal(rows, second["source_row"][:24])
    assert not np.array_equal(rows, np.sort(rows))


def test_shuffle_is_uniform():
    from perturbdiff.store import row_kernels as kernels

    key = np.empty(200_000, np.uint64)
    kernels.shuffle_keys(3, 0, key)
    assert len(np.unique(key)) == len(key)
    order = np.argsort(key)
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.01
    shares = np.bincount((key >> np.uint64(60)).astype(int), minlength=16) / len(key)
    np.testing.assert_allclose(shares, 1 / 16, rtol=0.03)
    later = np.empty(1000, np.uint64)
    kernels.shuffle_keys(3, 5000, later)
    np.testing.assert_array_equal(later, key[5000:6000])  # does not depend on how rows are cut into blocks


@pytest.mark.parametrize("seed", range(20))
def test_plan_covers_all_conditions(seed):
    rng = np.random.default_rng(seed)
    obs = pd.DataFrame(
        {
            "cell_type": rng.choice(["a", "b", "c"], 3000),
            "batch": rng.choice(["x", "y"], 3000, p=[0.9, 0.1]),
            "perturbation": rng.choice(["control", "p", "q", "r"], 3000, p=[0.7, 0.1, 0.15, 0.05]),
        }
    )
    table = condition_table(obs, "control")
    plan = plan_buckets(table, 100, int(rng.choice([150, 700, 5000])))
    sizes = table["n_cells"].to_numpy()
    filled = np.zeros(len(plan.bucket_part))
    for c, size in enumerate(sizes):
        own = slice(plan.first_bucket[c], plan.first_bucket[c] + plan.num_buckets[c])
        filled[own] += size / plan.num_buckets[c]
        assert (plan.bucket_part[own] == plan.part[c]).all()
        assert plan.num_buckets[c] == max(1, -(-size // 100))
    assert (filled > 0).all()
    assert (filled <= 100).all()
    assert (np.diff(plan.bucket_part) >= 0).all()
    assert list(np.unique(plan.part)) == list(range(plan.part.max() + 1))


@pytest.mark.parametrize(
    ("largest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32), (2**32 - 1, np.uint32)]
)
def test_large_counts_are_stored_exactly(tmp_path, largest, dtype):
    adata = tiny_counts()
    adata.X = sp.csr_matrix(adata.X, dtype=np.float64)
    adata.X.data[7] = largest
    adata.write_h5ad(tmp_path / "x.h5ad")
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig()))
    assert store.dtype == dtype
    assert store.counts(slice(None)).max() == largest


def test_counts_beyond_uint32_are_refused(tmp_path):
    adata = tiny_counts()
    adata.X = sp.csr_matrix(adata.X, dtype=np.float64)
    adata.X.data[7] = 2.0**32
    adata.write_h5ad(tmp_path / "x.h5ad")
    with pytest.raises(UserError, match="these are no counts"):
        preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig())


def test_log1p_input_is_stored_as_it_is(tmp_path):
    adata = tiny_counts()
    adata.X.data = np.log1p(adata.X.data / 3).astype(np.float32)
    adata.write_h5ad(tmp_path / "x.h5ad")
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig(input_scale="log1p")))
    assert (store.input_scale, store.dtype) == ("log1p", np.float32)
    assert np.isnan(store.target_sum)
    obs = store.obs()
    expected = adata[obs["cell"], store.genes].X
    assert (store.expression(slice(None)) != expected).nnz == 0
    np.testing.assert_array_equal(store.dense(slice(None)), expected.toarray())
    np.testing.assert_array_equal(store.max_value(), expected.max(axis=0).toarray().ravel())
    np.testing.assert_allclose(obs["n_counts"], np.expm1(expected.toarray()).sum(axis=1), rtol=1e-5)
    with pytest.raises(UserError, match="min_counts needs counts"):
        preprocess([tmp_path / "x.h5ad"], tmp_path / "s2", DataConfig(input_scale="log1p", min_counts=5))


def test_filters_and_quality_table(counts_file, tmp_path):
    adata = ad.read_h5ad(counts_file)
    x = adata.X.toarray()
    depth, detected = x.sum(axis=1), (x > 0).sum(axis=1)
    low, few = np.quantile(depth, 0.2), np.quantile(detected, 0.3)
    config = DataConfig(min_counts=int(low), min_genes=int(few))
    store = Store(preprocess([counts_file], tmp_path / "store", config))
    keep = (depth >= config.min_counts) & (detected >= config.min_genes)
    assert 0 < keep.sum() < len(keep)
    check_cells(store, adata[keep])
    check_order(store)
    assert store.target_sum == np.median(depth[keep])
    quality = pd.read_csv(tmp_path / "store" / "qc.csv").set_index(["cell_type", "batch"])
    groups = adata.obs.assign(depth=depth, genes=detected, keep=keep, shallow=depth < config.min_counts)
    for key, group in groups.groupby(["cell_type", "batch"], observed=True):
        row, kept = quality.loc[key], group[group["keep"]]
        assert row["cells_read"] == len(group)
        assert row["dropped_min_counts"] == group["shallow"].sum()
        assert row["dropped_min_genes"] == (~group["keep"] & ~group["shallow"]).sum()
        assert row["cells_kept"] == len(kept)
        assert row["median_counts"] == kept["depth"].median()
        assert row["median_genes"] == kept["genes"].median()


def test_conditions_that_lose_all_cells_disappear(tmp_path):
    adata = tiny_counts()
    gone = ((adata.obs["cell_type"] == "B") & (adata.obs["perturbation"] == "p2")).to_numpy()
    adata.X = sp.csr_matrix(adata.X.toarray() * ~gone[:, None])
    adata.write_h5ad(tmp_path / "x.h5ad")
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig(min_counts=1)))
    check_cells(store, adata[~gone])
    check_order(store)
    assert len(store.conditions) == 14


def test_cells_without_counts_are_zero_rows(tmp_path):
    adata = tiny_counts()
    adata.X = sp.csr_matrix(adata.X.toarray() * (np.arange(adata.n_obs) != 5)[:, None])
    adata.write_h5ad(tmp_path / "x.h5ad")
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig()))
    row = int(np.flatnonzero(store.obs()["cell"] == adata.obs_names[5])[0])
    assert store.expression([row]).nnz == 0
    assert (store.dense([row]) == 0).all()
    assert np.isfinite(store.dense(slice(None))).all()


def test_extra_columns_and_dose_are_kept(tmp_path):
    adata = tiny_counts()
    rng = np.random.default_rng(0)
    adata.obs["plate"] = rng.choice(["x", "y"], adata.n_obs)
    adata.obs["age"] = rng.random(adata.n_obs)
    adata.obs["dose"] = 2.0
    adata.write_h5ad(tmp_path / "x.h5ad")
    config = DataConfig(extra_obs=("plate", "age"), dose_key="dose")
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "store", config))
    obs = store.obs(["cell", "plate", "age", "dose", "perturbation"])
    np.testing.assert_array_equal(obs["plate"], adata.obs.loc[obs["cell"], "plate"])
    np.testing.assert_array_equal(obs["age"], adata.obs.loc[obs["cell"], "age"])
    control = (obs["perturbation"] == "control").to_numpy()
    assert (obs["dose"].isna() == control).all()
    assert (obs["dose"][~control] == 2.0).all()


def test_unsorted_and_explicit_zero_entries(tmp_path):
    adata = tiny_counts()
    x = adata.X.tocsr()
    for i in range(x.shape[0]):
        x.indices[x.indptr[i] : x.indptr[i + 1]] = x.indices[x.indptr[i] : x.indptr[i + 1]][::-1]
        x.data[x.indptr[i] : x.indptr[i + 1]] = x.data[x.indptr[i] : x.indptr[i + 1]][::-1]
    x.data[::7] = 0
    x.has_sorted_indices = False
    adata.X = x
    adata.write_h5ad(tmp_path / "x.h5ad")
    store = Store(preprocess([tmp_path / "x.h5ad"], tmp_path / "store", DataConfig()))
    check_cells(store, adata)
    stored = store.counts(slice(None))
    assert (stored.data > 0).all()
    rows = np.repeat(np.arange(stored.shape[0]), np.diff(stored.indptr))
    assert (np.diff(rows * store.n_genes + stored.indices) > 0).all()


def test_equal_runs_have_equal_bytes_and_are_skipped(counts_file, tmp_path, small_pieces):
    config = DataConfig(num_hvgs=40)
    preprocess([counts_file], tmp_path / "a", config)
    preprocess([counts_file], tmp_path / "b", config)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    before = (tmp_path / "a" / "run.json").stat().st_mtime_ns
    preprocess([counts_file], tmp_path / "a", config)
    assert (tmp_path / "a" / "run.json").stat().st_mtime_ns == before
    preprocess([counts_file], tmp_path / "a", config, seed=1)
    assert contents(tmp_path / "a") != contents(tmp_path / "b")


@pytest.mark.parametrize("place", ["spill", "zarr"])
def test_after_a_full_disk_a_second_run_goes_on(counts_file, tmp_path, monkeypatch, place, small_pieces):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = (reordering._Buffer, "flush") if place == "spill" else (store_writer.ShardWriter, "append")
    with monkeypatch.context() as patch:
        patch.setattr(*target, full)
        with pytest.raises(UserError, match=r"disk full while writing .*run again.*\.store\.partial"):
            preprocess([counts_file], tmp_path / "store", DataConfig())
    assert not (tmp_path / "store").exists()
    with monkeypatch.context() as patch:  # what is done is not done again
        patch.setattr(scan, "scan_piece", full)
        preprocess([counts_file], tmp_path / "store", DataConfig())
    preprocess([counts_file], tmp_path / "undisturbed", DataConfig())
    assert contents(tmp_path / "store") == contents(tmp_path / "undisturbed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["counts.h5ad", "store", "undisturbed"]


def test_killed_while_the_scratch_folder_is_deleted(counts_file, tmp_path, monkeypatch, small_pieces):
    """What is left of it is not taken for results."""
    remove = files.remove

    def half(path: Path) -> None:
        if path.name.startswith(".scratch") and path.exists():
            for spilled in path.glob("spill-*.arrow"):
                spilled.unlink()
            raise KeyboardInterrupt
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", half)
        with pytest.raises(KeyboardInterrupt):
            preprocess([counts_file], tmp_path / "store", DataConfig(num_hvgs=40))
    shutil.rmtree(files.temporary_name(tmp_path / "store") / "store" / "part-0000.zarr")
    preprocess([counts_file], tmp_path / "store", DataConfig(num_hvgs=40))
    preprocess([counts_file], tmp_path / "undisturbed", DataConfig(num_hvgs=40))
    assert contents(tmp_path / "store") == contents(tmp_path / "undisturbed")


def test_other_settings_do_not_go_on_with_what_another_run_left(counts_file, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(reordering, "scatter_piece", fail)
        with pytest.raises(RuntimeError):
            preprocess([counts_file], tmp_path / "store", DataConfig(num_hvgs=40))
    preprocess([counts_file], tmp_path / "store", DataConfig(num_hvgs=40, min_counts=120))
    preprocess([counts_file], tmp_path / "undisturbed", DataConfig(num_hvgs=40, min_counts=120))
    assert contents(tmp_path / "store") == contents(tmp_path / "undisturbed")


def test_an_input_that_changes_while_it_is_read_is_refused(counts_file, tmp_path, monkeypatch):
    once = reordering.scatter

    def meanwhile(*given):
        found = once(*given)
        os.utime(counts_file, ns=(0, 0))
        return found

    monkeypatch.setattr(reordering, "scatter", meanwhile)
    with pytest.raises(UserError, match="counts.h5ad: changed while it was read"):
        preprocess([counts_file], tmp_path / "store", DataConfig())
    assert [p.name for p in tmp_path.iterdir()] == ["counts.h5ad"]


def test_too_little_memory_is_said_before_anything_is_read():
    with pytest.raises(UserError, match="too little for 4 jobs"):
        module.Machine(jobs=4, memory_limit=1 << 30).bucket_values(4)
    assert module.Machine(jobs=2, memory_limit=1 << 30).bucket_values(2) < module.BUCKET_VALUES


def test_workers_and_little_memory_give_the_same_bytes(counts_file, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "VALUES_PER_PIECE", 2000)
    monkeypatch.setattr(module, "CELLS_PER_PART", (130, 130))
    alone, together = module.Machine(jobs=1), module.Machine(jobs=2)
    preprocess([counts_file], tmp_path / "alone", DataConfig(num_hvgs=40), machine=alone)
    monkeypatch.setattr(module, "BUCKET_VALUES", 300)
    preprocess([counts_file], tmp_path / "together", DataConfig(num_hvgs=40), machine=together)
    assert contents(tmp_path / "alone") == contents(tmp_path / "together")


def slow_preprocess(source: Path, out: Path) -> None:
    """Preprocess in about a second, in many small steps."""
    read, write = reordering.read_bucket, passes.save

    def slowly(function: Callable, *given: Any) -> Any:
        time.sleep(0.01)
        return function(*given)

    reordering.read_bucket = partial(slowly, read)
    passes.save = partial(slowly, write)
    preprocess([source], out, DataConfig(num_hvgs=40))


def test_ten_kills_and_the_same_bytes(counts_file, tmp_path, small_pieces):
    """SIGKILL at random moments; every run goes on with what the ones before left."""
    out, rng = tmp_path / "killed", random.Random(0)
    preprocess([counts_file], tmp_path / "undisturbed", DataConfig(num_hvgs=40))
    kills = left = 0
    while kills < 10:
        process = multiprocessing.get_context("fork").Process(target=slow_preprocess, args=(counts_file, out))
        process.start()
        process.join(rng.uniform(0, 0.6))
        if process.exitcode is not None:  # it was finished: begin again
            assert contents(out) == contents(tmp_path / "undisturbed")
            files.remove(out)
            continue
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        kills += 1
        if not out.exists():  # else it was killed after its last step
            unfinished = files.temporary_name(out)
            left += unfinished.exists()
            with pytest.raises(UserError, match="store not found|not a finished store"):
                Store(unfinished)
    assert left > 5
    preprocess([counts_file], out, DataConfig(num_hvgs=40))
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert not files.temporary_name(out).exists()
