"""A store that was damaged: `store check` names the file, and reading raises a named error or is right."""

import errno
import json
import shutil
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import zarr
from parts_store import parts_store

from perturbdiff.runtime import outputs
from perturbdiff.runtime.errors import UserError
from perturbdiff.store import checksums, store_check
from perturbdiff.store.store import Store


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return parts_store(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def right(sound):
    """What a sound store gives: values and obs."""
    store = Store(sound)
    return store.expression(slice(None)), store.obs()


@pytest.fixture
def store(sound, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(sound, tmp_path / "store")


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place if place >= 0 else len(content) + place] ^= 0x10
    path.write_bytes(content)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def swap(store, first, second):
    (store / first).rename(store / "aside")
    (store / second).rename(store / first)
    (store / "aside").rename(store / second)


def edit(store, name, change):
    frame = pd.read_parquet(store / f"{name}.parquet")
    change(frame)
    frame.to_parquet(store / f"{name}.parquet")


def other_cell(frame):
    frame.loc[3, "n_cells"] += 1


def other_gene(frame):
    frame["max_log1p"] = frame["max_log1p"] * 2


def other_label(frame):
    frame.loc[1, "perturbation"] = "p7"


P1 = "part-0001.zarr"
HARM = {
    "a bit of the values": (lambda s: flip(s / P1 / "X/data/c/2", 40), f"{P1}/X/data"),
    "a bit of the column numbers": (lambda s: flip(s / P1 / "X/indices/c/1", 70), f"{P1}/X/indices"),
    "a bit of the row pointers": (lambda s: flip(s / P1 / "X/indptr/c/0", 30), f"{P1}/X/indptr"),
    "a bit of the labels": (
        lambda s: flip(s / P1 / "obs/perturbation/codes/c/0", 20),
        f"{P1}/obs/perturbation",
    ),
    "a bit of the depths": (lambda s: flip(s / P1 / "obs/n_counts/c/0", 25), f"{P1}/obs/n_counts"),
    "a bit of the names": (lambda s: flip(s / P1 / "obs/_index/c/0", 25), f"{P1}/obs/_index"),
    "a bit of a shard's index": (lambda s: flip(s / P1 / "X/data/c/0", -40), f"{P1}/X/data"),
    "a short shard": (lambda s: cut(s / P1 / "X/data/c/1", 100), f"{P1}/X/data"),
    "an empty shard": (lambda s: cut(s / P1 / "X/indices/c/0", 0), f"{P1}/X/indices"),
    "a missing shard": (lambda s: (s / P1 / "X/data/c/1").unlink(), f"{P1}/X/data"),
    "missing depths": (lambda s: (s / P1 / "obs/n_counts/c/0").unlink(), f"{P1}/obs/n_counts"),
    "missing labels": (lambda s: (s / P1 / "obs/perturbation/codes/c/0").unlink(), f"{P1}/obs/perturbation"),
    "missing names": (lambda s: (s / P1 / "obs/_index/c/0").unlink(), f"{P1}/obs/_index"),
    "a part cut short": (lambda s: shutil.rmtree(s / P1 / "obs"), f"{P1}/obs"),
    "cut metadata": (lambda s: cut(s / P1 / "zarr.json", 500), f"{P1}/zarr.json"),
    "a missing part": (lambda s: shutil.rmtree(s / P1), P1),
    "swapped parts": (lambda s: swap(s, "part-0000.zarr", P1), P1),
    "other conditions": (lambda s: edit(s, "conditions", other_cell), "conditions.parquet"),
    "other genes": (lambda s: edit(s, "genes", other_gene), "genes.parquet"),
    "other perturbations": (lambda s: edit(s, "perturbations", other_label), "perturbations.parquet"),
    "a cut table": (lambda s: cut(s / "conditions.parquet", 200), "conditions.parquet"),
    "missing genes": (lambda s: (s / "genes.parquet").unlink(), "genes.parquet"),
    "no checksums": (lambda s: (s / checksums.CHECKSUMS).unlink(), checksums.CHECKSUMS),
    "other checksums": (lambda s: flip(s / checksums.CHECKSUMS, 5), checksums.CHECKSUMS),
}


def older(store):
    """Make the store one of a version without checksums."""
    (store / checksums.CHECKSUMS).unlink(missing_ok=True)
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["results"].pop("checksums")
    plain = {key: value for key, value in manifest.items() if key not in ("sha256", "files")}
    (store / "manifest.json").write_text(json.dumps(plain))


def everything(store):
    """Read all of a store."""
    opened = Store(store)
    return opened.expression(slice(None)), opened.obs()


@pytest.mark.parametrize("harm", HARM)
def test_check_names_the_file_and_reading_says_so(store, right, harm):
    damage, name = HARM[harm]
    damage(store)
    problems = store_check.check_store(store, quick=True)
    assert any(name in line for line in problems), problems
    assert all(len(line.splitlines()) == 1 and str(store) in line for line in problems)
    with pytest.raises(UserError, match=r"damaged|was changed|missing|cannot be read|depth 0") as raised:
        everything(store)
    assert str(store) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


CONTENT = [h for h in HARM if "checksums" not in h]


@pytest.mark.parametrize("harm", CONTENT)
def test_content_alone_tells_without_checksums(store, harm, caplog):
    damage, name = HARM[harm]
    damage(store)
    older(store)
    problems = store_check.check_store(store)
    assert problems, harm
    assert "has no checksums" in caplog.text
    part = name.split("/")[0]
    assert any(part in line or "part" in line for line in problems), problems


def rewrite(store, array, change):
    """Change an array of a part and keep every checksum right, as a faulty program would."""
    stored = zarr.open_array(store / P1 / array, mode="r+")
    values = stored[:]
    change(values)
    stored[:] = values
    (store / checksums.CHECKSUMS).unlink()
    digest = checksums.write_checksums(store)
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["results"]["checksums"] = digest
    (store / "manifest.json").write_text(json.dumps(outputs.sealed(manifest)))


def put(place, value):
    def change(values):
        values[place] = value

    return change


def exchange(values):
    values[10], values[11] = values[11], values[10]


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        ("X/data", put(17, 0), "row 1 holds a value that is not positive|row 0 holds a value"),
        ("X/data", put(17, 60_000), "below the sum"),
        ("X/indices", exchange, "columns of row 0 do not ascend within 0 to 39"),
        ("X/indices", put(-1, 40), "do not ascend within 0 to 39"),
        ("X/indptr", put(3, 0), "row pointers do not ascend from 0"),
        (
            "obs/perturbation/codes",
            put(2, 3),
            "obs/perturbation: row 2 is 'p3', the table of conditions has 'control'; 1",
        ),
        ("obs/cell_type/codes", put(slice(None), 1), "obs/cell_type: row 0 is 'T'"),
        ("obs/n_counts", put(5, 1.0), "obs/n_counts: row 5 has a depth of 1, below the sum"),
    ],
)
def test_wrong_content_with_right_checksums(store, array, change, message):
    rewrite(store, array, change)
    problems = store_check.check_store(store)
    assert problems
    assert pd.Series(problems).str.contains(message).any(), problems


def test_wrong_tables_with_right_checksums(store):
    older(store)
    edit(store, "genes", other_gene)
    assert any("max_log1p of 'g" in line for line in store_check.check_store(store))
    edit(store, "conditions", lambda f: f.__setitem__("control", -1))
    assert any(
        "column 'control' is wrong from condition 0 on (-1, expected 0)" in p
        for p in store_check.check_store(store)
    )
    swapped = pd.read_parquet(store / "conditions.parquet")
    swapped.loc[[1, 2], "perturbation"] = swapped.loc[[2, 1], "perturbation"].to_numpy()
    swapped.to_parquet(store / "conditions.parquet")
    problems = store_check.check_store(store)
    assert any("column 'perturbation' is wrong from condition 1 on" in line for line in problems)
    assert any(
        "obs/perturbation: row 24 is 'p1', the table of conditions has 'p2'" in line for line in problems
    )


def test_swapped_shards_are_seen_by_their_checksums(store):
    swap(store, f"{P1}/X/data/c/0", f"{P1}/X/data/c/1")
    assert store_check.check_store(store, quick=True) == [
        f"{store / P1 / 'X/data/c' / n}: was changed since the store was made" for n in "01"
    ]


def test_a_file_too_many(store):
    (store / P1 / "X" / "data" / "c" / "99").write_text("x")
    (store / ".notes").write_text("hidden files are nobody's business")
    assert store_check.check_store(store, quick=True) == [
        f"{store / P1 / 'X/data/c/99'}: is not part of the store; delete it"
    ]


def test_command_line_lists_every_problem(store, run_cli):
    HARM["a bit of the values"][0](store)
    HARM["a missing shard"][0](store)
    outcome = run_cli("store", "check", store, "--quick")
    assert outcome.code == 2
    assert outcome.out.splitlines() == [
        f"{store / P1 / 'X/data/c/1'}: is missing",
        f"{store / P1 / 'X/data/c/2'}: was changed since the store was made",
    ]
    assert "2 problems found" in outcome.err
    assert "Traceback" not in outcome.err


def test_full_disk_while_exporting(sound, tmp_path, monkeypatch, run_cli):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("perturbdiff.splits.store_export.H5Writer.append", full)
    outcome = run_cli("store", "export", sound, "--out", tmp_path / "x.h5ad")
    assert outcome.code == 2
    assert "disk full while writing" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
def test_every_part_works_in_scanpy(sound):
    for path in sorted(sound.glob("part-*")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            part = ad.read_zarr(path)
        part.X = part.X.astype(np.float32)
        sc.pp.normalize_total(part, target_sum=1e4)
        sc.pp.log1p(part)
        sc.pp.highly_variable_genes(part, n_top_genes=20)
        sc.pp.pca(part, n_comps=3)
        assert np.isfinite(part.obsm["X_pca"]).all()
