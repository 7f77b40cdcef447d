"""Checksums, facts and the checks of a sound store; damage of every kind is in tests/fault."""

import hashlib
import importlib.metadata
import json
import pickle
import shutil
import subprocess

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from parts_store import parts_store
from tiny_data import tiny_counts

from perturbdiff.config.settings import DataConfig
from perturbdiff.runtime.errors import UserError
from perturbdiff.store import checksums, store_check
from perturbdiff.store.store import Store
from perturbdiff.store.store_check import check_store, row_faults
from perturbdiff.store.store_head import describe, render


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return parts_store(tmp_path_factory.mktemp("integrity"))


def test_checksums_are_those_of_sha256sum(store):
    done = subprocess.run(
        ["sha256sum", "-c", "--strict", checksums.CHECKSUMS], cwd=store, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listed = [line.rpartition(":")[0] for line in done.stdout.splitlines()]
    assert listed == sorted(listed)
    there = {str(p.relative_to(store)) for p in store.rglob("*") if p.is_file()}
    assert set(listed) == there - checksums.NOT_COVERED
    manifest = json.loads((store / "manifest.json").read_text())
    digest = hashlib.sha256((store / checksums.CHECKSUMS).read_bytes()).hexdigest()
    assert manifest["results"]["checksums"] == digest


def test_names_are_escaped_as_sha256sum_does(tmp_path):
    for name in ("plain", "two  spaces", "back\\slash", "line\nbreak", "a\\nb"):
        (tmp_path / name).write_text(name)
    checksums.write_checksums(tmp_path, {"plain": hashlib.sha256(b"plain").hexdigest()})
    subprocess.run(["sha256sum", "-c", "--strict", checksums.CHECKSUMS], cwd=tmp_path, check=True)
    recorded = checksums.read_checksums(tmp_path)
    assert recorded == {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in tmp_path.iterdir()
        if p.name != checksums.CHECKSUMS
    }


def test_known_checksums_are_not_computed_again(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / ".hidden").write_text("a")
    checksums.write_checksums(tmp_path, {"a": "0" * 64})
    assert checksums.read_checksums(tmp_path) == {"a": "0" * 64}


def test_what_is_not_a_list_of_checksums(tmp_path):
    (tmp_path / checksums.CHECKSUMS).write_text("hello\n")
    with pytest.raises(UserError, match="is not a list of checksums"):
        checksums.read_checksums(tmp_path)


def test_a_sound_store_has_no_problem(store):
    assert check_store(store) == []


def test_parts_are_checked_by_other_processes(store):
    task = store_check._Part(store, "part-0001.zarr", 54, 114)
    function, argument = pickle.loads(pickle.dumps((store_check.check_cells, task)))
    content = pickle.loads(pickle.dumps(function(argument)))
    assert content.problems == []
    assert content.largest.max() > 0


@pytest.mark.parametrize("kind", ["log1p", "large", "empty rows", "dose"])
def test_other_sound_stores(tmp_path, kind):
    adata, settings = tiny_counts(), {"num_hvgs": 40}
    if kind == "log1p":
        adata.X.data = np.log1p(adata.X.data)
        settings["input_scale"] = "log1p"
    elif kind == "large":
        adata.X.data[::7] += 70_000
    elif kind == "empty rows":
        adata.X = sp.csr_matrix(sp.diags((np.arange(adata.n_obs) % 3 > 0).astype("f4")) @ adata.X)
        settings |= {"min_counts": 0, "min_genes": 0}
    else:
        adata.obs["dose"] = np.where(adata.obs["perturbation"] == "control", 0.0, 0.5)
        settings["dose_key"] = "dose"
    path = parts_store(tmp_path, DataConfig(**settings), adata)
    assert check_store(path) == []
    if kind == "large":  # counts above 65,535 are exact
        store = Store(path)
        assert store.dtype == np.uint32
        original = ad.read_h5ad(tmp_path / "counts.h5ad")[store.obs(["cell"])["cell"], store.genes].X
        assert original.max() > 70_000
        assert (store.counts(slice(None)) != original).nnz == 0
        for part in sorted(path.glob("part-*")):
            assert ad.read_zarr(part).X.dtype == np.uint32


def test_faults_of_rows():
    indptr = np.array([0, 2, 4, 6, 8])
    columns = np.array([0, 3, 1, 2, 0, 4, 0, 1], np.int16)
    data = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.uint16)
    totals = np.empty(4)
    assert row_faults(indptr, columns, data, 5, False, totals) == (-1, -1)
    np.testing.assert_array_equal(totals, [3, 7, 11, 15])
    for wrong in ([3, 0], [1, 1], [-1, 1], [2, 5]):
        changed = columns.copy()
        changed[4:6] = wrong
        assert row_faults(indptr, changed, data, 5, False, totals) == (2, -1)
    zero = data.copy()
    zero[3] = 0
    assert row_faults(indptr, columns, zero, 5, False, totals) == (-1, 1)
    for value in (np.nan, np.inf, -1.0):
        changed = data.astype(np.float32)
        changed[7] = value
        assert row_faults(indptr, columns, changed, 5, True, totals) == (-1, 3)


def test_facts(store):
    facts, opened = describe(store), Store(store)
    assert facts["cells"] == opened.n_cells == 228
    assert facts["genes"] == 40
    assert (facts["parts"], facts["conditions"], facts["control_conditions"]) == (4, 16, 4)
    assert (facts["smallest_condition"], facts["largest_condition"]) == (10, 24)
    assert facts["bytes"] == sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    assert facts["data_files"] == sum(
        len(list((p / "X" / n / "c").iterdir())) for p in store.glob("part*") for n in ("data", "indices")
    )
    assert facts["inputs"]["input 0"]["name"] == "counts.h5ad"
    assert facts["versions"]["anndata"] == importlib.metadata.version("anndata")
    text = render(facts)
    for word in ("228 x 40 genes", "4 parts", "seurat", facts["checksums"], "counts.h5ad  sha256"):
        assert word in text


def test_command_line(store, run_cli, tmp_path):
    outcome = run_cli("store", "info", store, "--json")
    assert json.loads(outcome.out)["cells"] == 228
    assert "228 x 40 genes" in run_cli("store", "info", store).out
    assert "no problem found" in run_cli("store", "check", store, "--quick").out
    out = tmp_path / "x.h5ad"
    arguments = ["--perturbation", "p1", "--batch", "d1", "--scale", "counts"]
    assert run_cli("store", "export", store, "--out", out, *arguments).code == 0
    found = ad.read_h5ad(out)
    assert found.n_obs == 20
    assert found.X.dtype == np.uint16
    for command in (("check",), ("info",), ("export", "--out", tmp_path / "y.h5ad")):
        outcome = run_cli("store", command[0], tmp_path / "nowhere", *command[1:])
        assert outcome.code == 2
        assert "store not found" in outcome.err


def test_a_copy_elsewhere_is_sound_too(store, tmp_path):
    shutil.copytree(store, tmp_path / "copy")
    assert check_store(tmp_path / "copy", quick=True) == []
