"""What machines do: full disks, no /dev/shm, folders that cannot be written, odd names, odd locales, odd clocks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from security.fuzz import contents

ROOT = Path(__file__).parents[2]
RECIPE = ("--config", "tiny", "--set", "split.held_out=[d2]", "--set", "split.valid_fraction=0.4")
QUICK = (
    *("--set", "evaluate.bootstrap=20", "--set", "evaluate.embed_conditions=0"),
    *("--metrics", "expression,de"),
)
COMMANDS = {
    "preprocess": ("preprocess", "{0}/counts.h5ad", *RECIPE, "--jobs", "1", "--out", "{1}/x"),
    "split": ("split", "{0}/store", *RECIPE, "--out", "{1}/x"),
    "sample": (
        *("sample", "{0}/bundle", "{0}/store", "--split", "{0}/split.parquet"),
        *("--device", "cpu", "--out", "{1}/x.h5ad"),
    ),
    "ceiling": ("ceiling", "{0}/store", "--split", "{0}/split.parquet", *QUICK, "--out", "{1}/x"),
}
"""The stages that most others follow from; ``{0}`` is the folder of inputs, ``{1}`` that of the output."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


def program(*arguments, environment=None, before=(), quick=None, limit=300):
    """Run ``perturbdiff …`` as a program of its own, after ``before``, or ``quick``: in a process that is forked."""
    start = [sys.executable, "-m", "perturbdiff"] if quick is None else [quick / "perturbdiff"]
    command = [*before, *map(str, (*start, *arguments))]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    return subprocess.run(
        command, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
    )


def line(name, good, out):
    """Return a command's words."""
    return [word.format(good, out) for word in COMMANDS[name]]


def one_line(done):
    """Assert a user's error in one line."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: "), done.stderr


@pytest.fixture(scope="module")
def right(trained, quick_program, tmp_path_factory):
    """What each command writes where nothing is odd."""
    found = {}
    for name in COMMANDS:
        out = tmp_path_factory.mktemp("right")
        done = program(*line(name, trained, out), quick=quick_program)
        assert done.returncode == 0, done.stderr
        found[name] = contents(out)
    return found


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@needs_root
@pytest.mark.parametrize("name", ["preprocess", "sample", "ceiling"])
def test_a_full_disk_is_told_in_one_line_and_nothing_stays(trained, quick_program, small_disk, name):
    (small_disk / "filler").write_bytes(bytes(50 << 10))
    done = program(*line(name, trained, small_disk), quick=quick_program)
    one_line(done)
    assert "disk full" in done.stderr or "No space left" in done.stderr
    kept = {p.name for p in small_disk.iterdir()} - {"filler"}
    assert not {name for name in kept if not name.startswith(".")}
    assert name == "preprocess" or not kept


@needs_root
@pytest.mark.parametrize("name", ["preprocess", "sample"])
def test_a_full_tmpdir_changes_nothing_or_is_told(trained, right, quick_program, tmp_path, small_disk, name):
    (small_disk / "filler").write_bytes(bytes(64 << 10))
    out = tmp_path / "out"
    out.mkdir()
    environment = {"TMPDIR": str(small_disk)}
    done = program(*line(name, trained, out), environment=environment, quick=quick_program)
    if done.returncode:
        one_line(done)
        assert not any(out.iterdir())
    else:
        assert contents(out) == right[name]
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


@needs_root
@pytest.mark.parametrize("name", ["preprocess", "sample"])
def test_without_shared_memory(trained, right, tmp_path, name):
    hidden = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"', "sh")
    if subprocess.run([*hidden, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    done = program(
        *line(name, trained, tmp_path), *(("--jobs", "2") if name == "preprocess" else ()), before=hidden
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == right[name]


SURROUNDINGS = {
    "a home that cannot be written, and LC_ALL=C": {
        **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"), "/proc/1"),
        **{"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    },
    "no home, no terminal, and a locale that is not installed": {
        **{"HOME": "/nowhere", "TERM": "dumb", "COLUMNS": "0", "LC_ALL": "xx_XX.UTF-8"},
    },
}


@pytest.mark.parametrize(
    ("which", "name"), [*((which, "split") for which in SURROUNDINGS), (next(iter(SURROUNDINGS)), "ceiling")]
)
def test_odd_surroundings_change_nothing(trained, right, tmp_path, which, name):
    scratch, out = tmp_path / "tmp", tmp_path / "out"
    scratch.mkdir()
    out.mkdir()
    done = program(*line(name, trained, out), environment={**SURROUNDINGS[which], "TMPDIR": str(scratch)})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert contents(out) == right[name]
    assert not any(scratch.iterdir())


def test_a_program_cleans_its_tmpdir(trained, right, tmp_path):
    scratch, out = tmp_path / "tmp", tmp_path / "out"
    for folder in (scratch, out):
        folder.mkdir()
    done = program(
        *("train", trained / "store", "--split", trained / "split.parquet", *RECIPE, "--device", "cpu"),
        *("--out", out / "x"),
        environment={"TMPDIR": str(scratch)},
    )
    assert done.returncode == 0, done.stderr
    assert not any(scratch.iterdir())


NAMES = {
    "spaces": "my data  set",
    "quotes": 'it\'s "mine" `now`',
    "unicode": "Größe Δ 基因 \u202e",
    "a newline": "two\nlines",
    "shell": "$(touch HARM); & | * ? ${A@P}",
    "a dash": "-rf",
    "250 bytes": "n" * 250,
    "250 bytes of unicode": "ö" * 125,
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("name", ["preprocess", "split", "sample"])
def test_odd_names_of_outputs_and_inputs(trained, right, tmp_path, run_cli, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    good, out = tmp_path / NAMES[kind], tmp_path / f"{NAMES[kind][:200]}-"
    good.mkdir()
    for item in ("counts.h5ad", "store", "bundle", "split.parquet"):
        for path in trained.glob(f"{item}*"):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, good / path.name)
    out.mkdir()
    done = run_cli(*line(name, good, out))
    assert done.code == 0, done.err
    assert contents(out) == right[name]
    assert not list(tmp_path.rglob("HARM"))


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("name", ["preprocess", "split"])
def test_an_output_of_an_odd_name_is_made_or_refused(trained, tmp_path, run_cli, kind, name):
    target = tmp_path / NAMES[kind]
    words = [*line(name, trained, tmp_path)[:-1], f"{target}"]
    done = run_cli(*words)
    if done.code:
        assert done.code == 2, done.err
        assert "Traceback" not in done.err
        assert len([text for text in done.err.splitlines() if text.startswith("error: ")]) == 1
        assert not list(tmp_path.iterdir())
    else:
        assert target.exists()


def test_clocks_that_run_back_and_stale_locks(trained, right, tmp_path, run_cli):
    good, out = tmp_path / "good", tmp_path / "out"
    shutil.copytree(trained, good)
    out.mkdir()
    future = time.time() + 10 * 365 * 86400
    for path in [good, *good.rglob("*")]:
        os.utime(path, (future, future))
    partial = out / ".x.partial"
    partial.mkdir()
    (partial / ".lock").write_bytes(b"")
    os.utime(partial / ".lock", (future, future))
    done = run_cli(*line("split", good, out))
    assert done.code == 0, done.err
    assert contents(out) == right["split"]
    again = run_cli(*line("split", good, out))
    assert "up to date" in again.err


def test_a_damaged_cache_of_compiled_loops_is_made_again(trained, right, tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "out"
    environment = {"NUMBA_CACHE_DIR": str(cache)}
    assert program(*line("preprocess", trained, out), environment=environment).returncode == 0
    found = sorted(p for p in cache.rglob("*") if p.suffix in (".nbi", ".nbc"))
    assert len(found) > 3
    for number, path in enumerate(
        found[:6]
    ):  # of two loops, each file in one of three ways: all would take a minute
        data = path.read_bytes()
        path.write_bytes((data[: len(data) // 2], b"", b"x" * len(data))[number % 3])
    shutil.rmtree(out)
    done = program(*line("preprocess", trained, out), environment=environment)
    assert done.returncode == 0, done.stderr
    assert contents(out) == right["preprocess"]
