import errno
import json
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError


def run(tmp_path, out="out.txt", *, folder=False, config=None, force=False):
    source = tmp_path / "in.txt"
    source.write_text("data")
    with provenance.stage(
        "demo",
        tmp_path / out,
        config=config or {"k": 1},
        inputs={"source": source},
        seed=3,
        folder=folder,
        force=force,
    ) as job:
        if job.skip:
            return False
        target = job.path / "x" if folder else job.path
        target.write_text("result")
        job.results["n"] = 5
        job.notes["rate"] = 7
    return True


@pytest.mark.parametrize("folder", [False, True])
def test_equal_run_is_skipped_and_force_repeats_it(tmp_path, folder):
    assert run(tmp_path, "o", folder=folder)
    assert not run(tmp_path, "o", folder=folder)
    assert run(tmp_path, "o", folder=folder, force=True)
    assert run(tmp_path, "o", folder=folder, config={"k": 2})


def test_a_run_that_ends_before_its_file_stands_is_not_taken_for_done(tmp_path, monkeypatch):
    run(tmp_path, "o", config={"k": 1})

    replace = Path.replace

    def fails(source, target):
        if target.name == "o":
            raise OSError(errno.EIO, "Input/output error")
        return replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(Path, "replace", fails)
        run(tmp_path, "o", config={"k": 2})
    assert (tmp_path / "o").exists()
    assert provenance.read_manifest(tmp_path / "o") is None
    assert run(tmp_path, "o", config={"k": 2})
    assert not run(tmp_path, "o", config={"k": 2})


def test_what_is_neither_file_nor_folder_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="a device or pipe, not a file"):
        run(tmp_path, "pipe", force=True)
    assert (tmp_path / "pipe").is_fifo()


def test_manifest_determines_the_result_and_run_tells_the_circumstances(tmp_path):
    run(tmp_path, "a.txt")
    first = (tmp_path / "a.txt.manifest.json").read_bytes()
    run(tmp_path, "a.txt", force=True)
    assert (tmp_path / "a.txt.manifest.json").read_bytes() == first
    manifest, record = json.loads(first), json.loads((tmp_path / "a.txt.run.json").read_text())
    assert manifest["results"] == {"n": 5}
    assert manifest["inputs"]["source"]["name"] == "in.txt"
    assert str(tmp_path) not in first.decode()
    assert record["rate"] == 7
    assert record["peak_memory_mib"] > 0


def test_what_is_shared_names_neither_host_nor_job_nor_folders(tmp_path, monkeypatch):
    words = [
        "/home/alice/bin/perturbdiff",
        "train",
        "../alice/store",
        "--set",
        "split.file=~/alice/s.parquet",
    ]
    monkeypatch.setattr(
        "sys.argv", [*words, "--embedding", "gene=/home/alice/g.npz", "--out", "/home/alice/out/"]
    )
    for name in ("SLURM_JOB_ID", "USER", "MARKER"):
        monkeypatch.setenv(name, "alice-4711")
    monkeypatch.setattr(platform, "node", lambda: "alice-node")
    run(tmp_path, "a.txt")
    text = (tmp_path / "a.txt.run.json").read_text() + (tmp_path / "a.txt.manifest.json").read_text()
    assert "alice" not in text
    command = json.loads((tmp_path / "a.txt.run.json").read_text())["command"]
    assert command == "perturbdiff train store --set split.file=s.parquet --embedding gene=g.npz --out out"


def test_missing_input_is_named(tmp_path):
    with pytest.raises(UserError, match="input 'source' not found"):
        with provenance.stage("demo", tmp_path / "o", config={}, inputs={"source": tmp_path / "nothing"}):
            pass
    assert not (tmp_path / "o").exists()


def unfinished(out, seed):
    with (
        pytest.raises(RuntimeError),
        provenance.stage("make", out, config={}, inputs={}, seed=seed, folder=True, keep=True) as run,
    ):
        (run.path / "x").write_text("done so far")
        raise RuntimeError
    return run.path


def test_an_interrupted_stage_goes_on_only_if_it_is_the_same(tmp_path):
    out = tmp_path / "out"
    for seed, found in ((1, True), (2, False)):
        partial = unfinished(out, 1)
        assert (partial / "x").exists()
        with provenance.stage(
            "make", out, config={}, inputs={}, seed=seed, folder=True, keep=True, force=True
        ) as run:
            assert (run.path / "x").exists() == found
        assert not list(out.glob(".*"))
        assert json.loads((out / "run.json").read_text())["stage"] == "make"


def test_image_and_code_are_told_in_run_and_never_in_the_manifest(tmp_path, monkeypatch):
    monkeypatch.delenv("APPTAINER_CONTAINER", raising=False)
    monkeypatch.setenv("PD_IMAGE_ID", "sha256:" + "0" * 64)
    run(tmp_path, "a.txt")
    outside = (tmp_path / "a.txt.manifest.json").read_bytes()
    assert json.loads((tmp_path / "a.txt.run.json").read_text())["image"] is None
    monkeypatch.setenv("APPTAINER_CONTAINER", "/there/x.sif")
    monkeypatch.setattr(provenance, "code", lambda: {"commit": "f" * 40, "dirty": False})
    run(tmp_path, "a.txt", force=True)
    record = json.loads((tmp_path / "a.txt.run.json").read_text())
    assert record["image"] == {"name": "x.sif", "id": "sha256:" + "0" * 64}
    assert record["code"] == {"commit": "f" * 40, "dirty": False}
    assert (tmp_path / "a.txt.manifest.json").read_bytes() == outside
    monkeypatch.setenv("PD_IMAGE_ID", "")
    assert provenance.image() == {"name": "x.sif", "id": None}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a checkout of git, which takes the place of ours."""
    folder = tmp_path / "checkout" / "perturbdiff"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setattr(provenance, "__file__", str(folder / "runtime" / "provenance.py"))
    # nobody's own settings: a template, a hook or a signature
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    provenance.code.cache_clear()
    yield folder
    provenance.code.cache_clear()


def git(folder, *arguments):
    names = ("-c", "user.name=x", "-c", "user.email=x@y")
    done = subprocess.run(
        ["git", "-C", folder, *names, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def code():
    provenance.code.cache_clear()
    return provenance.code()


def test_code_is_the_commit_of_the_checkout_and_whether_it_was_changed(package):
    assert code() == {"commit": None, "dirty": None}
    git(package.parent, "init", "-q")
    git(package, "add", "__init__.py")
    git(package, "commit", "-q", "-m", "first")
    (package.parent / "notes.txt").touch()  # beside the package: no matter
    assert code() == {"commit": git(package, "rev-parse", "HEAD"), "dirty": False}
    (package / "new.py").touch()
    assert code()["dirty"] is True


def test_an_environment_in_somebody_elses_checkout_has_no_commit(package):
    git(package.parent, "init", "-q")
    git(package, "commit", "-q", "--allow-empty", "-m", "theirs")
    assert code() == {"commit": None, "dirty": None}


def test_no_git_no_commit(package, monkeypatch):
    git(package.parent, "init", "-q")
    git(package, "add", "__init__.py")
    git(package, "commit", "-q", "-m", "first")
    monkeypatch.setenv("PATH", "")
    assert code() == {"commit": None, "dirty": None}


def test_an_image_tells_its_code_without_git(package):
    record = {"commit": "a" * 40, "dirty": False, "source_sha256": "b", "lock_sha256": "c"}
    (package / "_build.json").write_text(json.dumps(record))
    assert code() == record


def test_code_is_looked_at_when_a_run_begins(package, tmp_path):
    git(package.parent, "init", "-q")
    git(package, "add", "__init__.py")
    git(package, "commit", "-q", "-m", "first")
    first = git(package, "rev-parse", "HEAD")
    with provenance.stage("demo", tmp_path / "o", config={}, inputs={}) as job:
        git(package, "commit", "-q", "--allow-empty", "-m", "second")
        job.path.touch()
    assert json.loads((tmp_path / "o.run.json").read_text())["code"]["commit"] == first


def keeping(out, **more):
    return provenance.stage("make", out, config={}, inputs={}, folder=True, keep=True, **more)


def test_disk_full_keeps_what_is_done_for_a_stage_that_continues(tmp_path):
    out = tmp_path / "store"
    with pytest.raises(UserError, match=r"disk full while writing .*goes on.*\.store\.partial"):
        with keeping(out) as run:
            (run.path / "x").write_text("done")
            raise OSError(errno.ENOSPC, "No space left on device")
    with keeping(out) as run:
        assert (run.path / "x").read_text() == "done"
    assert list(tmp_path.iterdir()) == [out]


def test_a_users_mistake_leaves_nothing_to_continue(tmp_path):
    with pytest.raises(UserError), keeping(tmp_path / "a" / "store") as run:
        (run.path / "x").write_text("done")
        raise UserError("wrong column")
    assert not list(tmp_path.iterdir())


def test_an_output_made_on_another_file_system_is_copied_whole(tmp_path):
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        if other.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("one file system only")
        out = tmp_path / "out"
        with keeping(out, unfinished=other) as run:
            (run.path / "x").write_text("done")
        assert (out / "x").read_text() == "done"
        assert list(tmp_path.iterdir()) == [out]
        assert not list(other.iterdir())
    finally:
        shutil.rmtree(other)
