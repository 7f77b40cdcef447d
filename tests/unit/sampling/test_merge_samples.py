"""Parts of a sampling joined: the file of a single run, whatever the number of parts; and parts that do not fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perturbdiff import predictions, sampling
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config.settings import SampleConfig
from perturbdiff.predictions import read_predictions
from perturbdiff.runtime import outputs
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.provenance import read_manifest
from perturbdiff.sampling import shards as merging
from perturbdiff.sampling.shards import merge
from perturbdiff.store.store import Store

CONFIG = SampleConfig(num_steps=2, sets_per_batch=1, guidance=0.5)
LABELS = ["cell_type", "batch", "perturbation"]


def asked(folder, numbers=None):
    """All conditions of the store, in an order that is not the store's."""
    path = folder / "wanted.csv"
    types, batches = ["T", "B", "B", "T", "T", "B"], ["d2", "d1", "d2", "d1", "d2", "d1"]
    table = pd.DataFrame(
        {"cell_type": types, "batch": batches, "perturbation": ["p1", "p2"] * 2 + ["p3"] * 2}
    )
    table.assign(n_cells=numbers or [40, 7, 20, 3, 17, 1]).to_csv(path, index=False)
    return path


def draw(trained, wanted, out, shard=(0, 1), **options):
    given = {"config": CONFIG, "device": "cpu", **options}
    sampling.sample(trained / "bundle", trained / "store", out, conditions=wanted, shard=shard, **given)
    return out


def bytes_of(path):
    """Everything that was written but how the run went."""
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.is_file() and p.name != "run.json"]
        return {str(p.relative_to(path)): p.read_bytes() for p in files}
    return {"": path.read_bytes(), "manifest": path.with_name(f"{path.name}.manifest.json").read_bytes()}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return asked(tmp_path_factory.mktemp("wanted"))


@pytest.fixture(scope="module")
def parts(trained, wanted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return [draw(trained, wanted, folder / f"{i}.h5ad", (i, 3)) for i in range(3)]


@pytest.mark.parametrize(("suffix", "number"), [(".h5ad", 1), (".h5ad", 9), (".zarr", 2)])
def test_any_number_of_parts_makes_the_file_of_a_single_run(
    trained, wanted, tmp_path, monkeypatch, suffix, number
):
    monkeypatch.setattr(predictions, "_ROWS_PER_WRITE", 16)  # several pieces, and a rest
    monkeypatch.setattr(merging, "_VALUES", 200)
    whole = draw(trained, wanted, tmp_path / f"whole{suffix}")
    made = [draw(trained, wanted, tmp_path / f"{i}{suffix}", (i, number)) for i in range(number)]
    cells = [read_manifest(p)["results"]["cells"] for p in made]
    assert sum(cells) == 88
    assert (0 in cells) == (number > 6), "more parts than blocks of conditions: some are empty"
    out = merge(made[::-1], tmp_path / f"out{suffix}")
    assert bytes_of(out) == bytes_of(whole)
    adata = read_predictions(out)
    controls = adata.obs[adata.obs["source"] == "control"]
    assert adata.obs["source"].tolist() == ["predicted"] * 88 + ["control"] * len(controls)
    assert adata.obs_names.is_unique
    assert controls["cell"].is_unique
    size = Bundle.load(trained / "bundle").config.train.set_size
    sets = adata.obs["set"].to_numpy()
    assert (sets[88:] == -1).all()
    sizes = [min(size, n - k) for n in (40, 7, 20, 3, 17, 1) for k in range(0, n, size)]
    assert sets[:88].tolist() == np.repeat(range(len(sizes)), sizes).tolist()
    known = Store(trained / "store").conditions
    assert len(controls) == known.loc[known["is_control"], "n_cells"].sum()


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(1, 8),
    numbers=st.lists(st.integers(1, 30), min_size=6, max_size=6),
    sets=st.integers(1, 4),
)
def test_the_cells_do_not_depend_on_the_number_of_parts(trained, tmp_path_factory, number, numbers, sets):
    folder = tmp_path_factory.mktemp("any")
    options = {"config": SampleConfig(num_steps=1, sets_per_batch=sets)}
    table = asked(folder, numbers)
    whole = draw(trained, table, folder / "whole.h5ad", **options)
    made = [draw(trained, table, folder / f"{i}.h5ad", (i, number), **options) for i in range(number)]
    assert bytes_of(merge(made, folder / "out.h5ad")) == bytes_of(whole)


def test_an_equal_merge_has_nothing_to_do_and_the_command_finds_out_what_the_parts_are(
    parts, tmp_path, run_cli
):
    done = run_cli("merge", *parts, "--out", tmp_path / "p.h5ad")
    assert (done.code, done.out.strip()) == (0, str(tmp_path / "p.h5ad"))
    stamp = (tmp_path / "p.h5ad").stat().st_mtime_ns
    assert run_cli("merge", *parts, "--out", tmp_path / "p.h5ad").code == 0
    assert (tmp_path / "p.h5ad").stat().st_mtime_ns == stamp
    merge(parts, tmp_path / "p.zarr")
    np.testing.assert_array_equal(
        read_predictions(tmp_path / "p.zarr").X.toarray(), read_predictions(tmp_path / "p.h5ad").X.toarray()
    )


def copied(part, folder):
    """A part as of an earlier version, whose manifest has no checksums."""
    return changed(part, folder, lambda manifest: [manifest.pop(key) for key in ("files", "sha256")])


def changed(part, folder, change):
    """A part whose manifest is another one, with nothing that tells of it."""
    for path in part.parent.glob(f"{part.name}*"):
        shutil.copy(path, folder)
    path = folder / f"{part.name}.manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(outputs.sealed(manifest) if "files" in manifest else manifest))
    return folder / part.name


def flipped(part, folder, name=""):
    for path in part.parent.glob(f"{part.name}*"):
        shutil.copy(path, folder)
    path = folder / f"{part.name}{name}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)
    return folder / part.name


def without_manifest(part, folder):
    return shutil.copy(part, folder / part.name)


def cut(part, folder):
    copy = copied(part, folder)
    with copy.open("r+b") as handle:
        handle.truncate(copy.stat().st_size // 2)
    return copy


def written_again(part, folder, declared=True):
    copy = copied(part, folder)
    adata = ad.read_h5ad(copy)
    if not declared:
        adata.uns.clear()
    adata.write_h5ad(copy)
    return copy


def more(manifest):
    manifest["results"]["cells"] += 1


def other_genes(part, folder):
    copy = copied(part, folder)
    with h5py.File(copy, "r+") as file:
        file["var/_index"][0] = "another"
    return copy


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p, f: p[:2], "is one of 3 parts, but 2/3 are not given; run them"),
        (lambda p, f: [*p, copied(p[1], f)], "is part 1/3, as .*1.h5ad is; give each part once"),
        (lambda p, f: [p[0], without_manifest(p[1], f), p[2]], "1.h5ad: is not a part .*must lie beside it"),
        (lambda p, f: [p[0], changed(p[1], f, lambda m: m.update(seed=5)), p[2]], "its seed is 5, not 0"),
        (
            lambda p, f: [p[0], changed(p[1], f, lambda m: m["config"]["sample"].update(eta=1.0)), p[2]],
            "not of the same run as .*: its config differ in sample",
        ),
        (lambda p, f: [p[0], changed(p[1], f, lambda m: m["versions"].update(torch="0")), p[2]], "differ in torch"),
        (lambda p, f: [p[0], changed(p[1], f, lambda m: m["config"].update(shard=[1, 4]))], "one of 4 parts, not of 3"),
        (lambda p, f: [p[0], changed(p[1], f, lambda m: m.update(stage="baseline")), p[2]], "is not a part"),
        (lambda p, f: [p[0], f / "none.h5ad"], "not found: .*none.h5ad"),
        (lambda p, f: [p[0], cut(p[1], f), p[2]], "1.h5ad: cannot be read, it is damaged .*make the file again"),
        (lambda p, f: [p[0], written_again(p[1], f, declared=False), p[2]], "predictions that .*sample' wrote"),
        (lambda p, f: [p[0], changed(p[1], f, more), p[2]], "1.h5ad: does not have the .* predicted cells"),
        (lambda p, f: [p[0], other_genes(p[1], f), p[2]], "1.h5ad: has other genes than .*0.h5ad"),
        (lambda p, f: [p[0], flipped(p[1], f), p[2]], "1.h5ad: was changed since it was made"),
        (lambda p, f: [p[0], flipped(p[1], f, ".manifest.json"), p[2]], r"1.h5ad: is not a part|manifest\.json"),
        (lambda p, f: [], "no part to merge"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together(parts, tmp_path, build, message):
    (tmp_path / "given").mkdir()
    with pytest.raises(UserError, match=message) as told:
        merge(build(parts, tmp_path / "given"), tmp_path / "out.h5ad")
    assert "\n" not in str(told.value)
    assert [p.name for p in tmp_path.iterdir()] == ["given"], "nothing is left behind"


def test_a_part_that_anndata_wrote_again_gives_the_same_cells(parts, tmp_path):
    again = merge([parts[0], written_again(parts[1], tmp_path), parts[2]], tmp_path / "again.h5ad")
    assert again.read_bytes() == merge(parts, tmp_path / "out.h5ad").read_bytes()


MANY = """
import resource, sys
from pathlib import Path
import numpy as np, pandas as pd
from scipy import sparse
from perturbdiff import predictions; from perturbdiff.runtime import provenance
from perturbdiff.sampling.shards import merge

folder, blocks = Path(sys.argv[1]), int(sys.argv[2])
obs = pd.DataFrame({"perturbation": "p", "cell_type": "T", "batch": "b"}, index=range(1000))
block = sparse.random(1000, 2000, 0.5, "csr", dtype=np.float32, random_state=0)
for i in range(2):
    path, facts = folder / f"{i}.h5ad", {"method": "m", "control": "c", "target_sum": 1e4}
    config = {"shard": [i, 2]}
    with provenance.stage("sample", path, config=config, inputs={}) as stage:
        with predictions.PredictionWriter(stage.path, [f"g{k}" for k in range(2000)], **facts) as writer:
            for _ in range(blocks):
                writer.append(block, obs)
        stage.results |= {"conditions": 1, "cells": 1000 * blocks}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge([folder / "0.h5ad", folder / "1.h5ad"], folder / "out.h5ad")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_cells(tmp_path):
    grown = subprocess.run(
        [sys.executable, "-c", MANY, tmp_path, "10"], capture_output=True, text=True, check=True
    )
    assert int(grown.stdout) / 1024 < 60, "MiB; the values of the merged file take 160"
