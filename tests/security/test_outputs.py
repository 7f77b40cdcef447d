"""An output replaces what the same stage made, and nothing else: no foreign byte changes, whatever is named."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from refusals import refused

from perturbdiff.runtime import locks, provenance
from perturbdiff.runtime.errors import UserError


@pytest.fixture
def work(trained, tmp_path, monkeypatch):
    """A working folder with a store, a split and a bundle of one's own, and a stranger's files beside them."""
    for name in ("store", "bundle"):
        shutil.copytree(trained / name, tmp_path / name)
    for path in trained.glob("split.parquet*"):
        shutil.copy(path, tmp_path)
    shutil.copy(trained / "counts.h5ad", tmp_path)
    (tmp_path / "project" / "notes").mkdir(parents=True)
    (tmp_path / "project" / "notes" / "diary.txt").write_text("three years")
    (tmp_path / "project" / "important.h5ad").write_text("not yours")
    (tmp_path / "thesis.md").write_text("chapter 1")
    (tmp_path / "to-project").symlink_to("project")
    (tmp_path / "to-thesis").symlink_to("thesis.md")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    """Return the bytes of every file below a folder, and where every link leads."""
    return {
        str(p.relative_to(folder)): p.readlink() if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if p.is_symlink() or p.is_file()
    }


COMMANDS = {
    "split": ("split", "store", "--config", "tiny", "--set", "split.held_out=[d2]"),
    "baseline": ("baseline", "control", "store", "--split", "split.parquet"),
    "export": ("store", "export", "store"),
    "simulate": ("simulate", "--cells", "800", "--set", "simulate.genes=50"),
    "stats": ("stats", "store", "--pairs", "0"),
    "preprocess": ("preprocess", "counts.h5ad", "--config", "tiny"),
    "sample": ("sample", "bundle", "store", "--split", "split.parquet"),
    "report": ("report", "project/notes"),
}

NAMED = {
    "a foreign folder": ("project",),
    "a foreign file": ("thesis.md", "project/important.h5ad"),
    "an input": ("store", "bundle", "split.parquet", "counts.h5ad"),
    "a place in an input": ("store/new", "bundle/new.h5ad", "store/obs"),
    "the working folder": (".", "../{here}", "{path}", "project/.."),
    "a folder that holds it": ("..", "/"),
    "a link": ("to-project", "to-thesis"),
    "a record of another output": ("split.parquet.manifest.json",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_foreign_is_replaced(work, run_cli, command):
    before = contents(work)
    for places in NAMED.values():
        for place in places:
            out = place.format(here=work.name, path=work)
            if (command, place) == ("split", "split.parquet"):
                continue  # its own output, which it may replace
            done = run_cli(*COMMANDS[command], "--out", out)
            if done.code != 0:  # a stage may write into a folder that is no input of its own
                assert done.code == 2, done.err
                assert len([x for x in done.err.splitlines() if x.startswith("error: ")]) == 1, done.err
            after = contents(work)
            assert {k: after.get(k) for k in before} == before, (command, out)
            if done.code != 0:
                assert after.keys() == before.keys(), (command, out)
            before = after


PLACES = ["a", "b.h5ad", "empty", "project", "project/c", "thesis.md", "to-project/d", "store/e"]


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_of_commands_changes_a_foreign_byte(work, run_cli, seed):
    draw = random.Random(seed)
    foreign = contents(work)
    for _ in range(5):
        command, place = draw.choice(["split", "baseline", "export", "simulate"]), draw.choice(PLACES)
        done = run_cli(*COMMANDS[command], "--out", place, *draw.choice([(), ("--force",)]))
        assert done.code in (0, 2), done.err
        after = contents(work)
        assert {k: after.get(k) for k in foreign} == foreign, (command, place)
        # somebody leaves a file in the output, or where one of its records would lie
        target = draw.choice([work / place / "mine.txt", work / f"{place}.run.json", None])
        if target is not None and target.parent.is_dir() and not target.exists():
            target.write_text("mine")
            foreign[str(target.resolve().relative_to(work))] = b"mine"


def test_a_finished_model_needs_force_and_is_kept(work, run_cli):
    old = contents(work / "bundle")
    again = (
        "train",
        "store",
        "--split",
        "split.parquet",
        "--config",
        "tiny",
        "--out",
        "bundle",
        "--device",
        "cpu",
    )
    other = (*again, "--set", "train.max_steps=2")
    refused(run_cli(*other), "bundle", "max_steps", "--force", "bundle.previous")
    assert contents(work / "bundle") == old
    done = run_cli(*other, "--force")
    assert done.code == 0, done.err
    assert contents(work / "bundle.previous") == old
    assert contents(work / "bundle") != old


def test_checkpoints_go_into_no_strangers_folder(work, run_cli):
    before = contents(work)
    line = (
        "train",
        "store",
        "--split",
        "split.parquet",
        "--config",
        "tiny",
        "--out",
        "new",
        "--device",
        "cpu",
    )
    (work / "project" / "last.ckpt").write_text("theirs")
    before = contents(work)
    refused(run_cli(*line, "--checkpoints", "project", "--resume", "never"), "project")
    refused(run_cli(*line, "--checkpoints", "store"), "store")
    assert contents(work) == before


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_an_output_that_is_not_whole_is_made_again(work, run_cli, damage):
    line = (*COMMANDS["simulate"], "--out", "sim")
    assert run_cli(*line).code == 0
    whole = contents(work / "sim")
    file = work / "sim" / "conditions.csv"
    file.write_bytes(file.read_bytes()[:10]) if damage == "truncated" else file.unlink()
    done = run_cli(*line)
    assert done.code == 0
    assert "not whole (conditions.csv)" in done.err
    now = contents(work / "sim")
    assert {k: v for k, v in now.items() if k != "run.json"} == {
        k: v for k, v in whole.items() if k != "run.json"
    }


def _make(out, seed, ready, go):
    with provenance.stage("make", Path(out), config={}, inputs={}, seed=seed) as run:
        run.path.write_text(f"seed {seed}")
        ready.set()
        go.wait(60)


@pytest.fixture
def maker(tmp_path):
    """Another process that makes tmp_path/out, and stands still before it is done."""
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    process = context.Process(target=_make, args=(tmp_path / "out", 1, ready, go))
    process.start()
    assert ready.wait(60)
    yield process, go
    process.kill()
    process.join()


def test_of_two_that_write_one_output_one_wins_and_the_other_says_so(tmp_path, maker):
    process, go = maker
    with pytest.raises(UserError, match="another run that writes out"):
        _make(tmp_path / "out", 2, multiprocessing.Event(), multiprocessing.Event())
    go.set()
    process.join()
    assert (tmp_path / "out").read_text() == "seed 1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.manifest.json", "out.run.json"]


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path, maker):
    process, _ = maker
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out").exists()
    done = multiprocessing.Event()
    done.set()
    _make(tmp_path / "out", 2, multiprocessing.Event(), done)
    assert (tmp_path / "out").read_text() == "seed 2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.manifest.json", "out.run.json"]


@pytest.mark.parametrize("name", [".out.partial", ".out.partial/.lock"])
def test_planted_links_are_refused(tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "diary.txt").write_text("three years")
    target = victim if name == ".out.partial" else victim / "diary.txt"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError, match=r"link|lock"):
        _make(tmp_path / "out", 1, multiprocessing.Event(), multiprocessing.Event())
    assert (victim / "diary.txt").read_text() == "three years"
    assert not (tmp_path / "out").exists()


def test_a_stalled_run_does_not_overwrite_who_took_over(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.05)
    out = tmp_path / "out"
    with pytest.raises(UserError, match="another run went on"):
        with provenance.stage("make", out, config={}, inputs={}, seed=1) as run:
            run.path.write_text("stalled")
            lock = run.scratch / locks.LOCK
            note = json.loads(lock.read_text()) | {"token": "another"}
            lock.write_text(json.dumps(note))
            time.sleep(0.2)
    assert not out.exists()
