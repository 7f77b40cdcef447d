"""What people share names no machine, no user, no folder of theirs and nothing of their environment."""

import gzip
import os
import platform
import socket
import zipfile
from pathlib import Path

import pytest

MARKS = ("alices-workstation", "alice-the-user", "alice-home", "token-of-alice")


def texts(path):
    """Yield the bytes of a file, and of what is packed in it."""
    data = path.read_bytes()
    yield path.name.encode()
    yield data
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name.encode()
                yield archive.read(name)
    if data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, user, machine and environment that would be known again."""
    folder = tmp_path / "alice-home"
    (folder / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    for name in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, "alice-the-user")
    monkeypatch.setenv("SECRET_TOKEN", "token-of-alice")
    monkeypatch.setenv("HOSTNAME", "alices-workstation")
    monkeypatch.setattr(platform, "node", lambda: "alices-workstation")
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-workstation")
    return folder


def test_no_output_of_the_whole_way_tells_where_and_by_whom_it_was_made(home, run_cli):
    work = home / "work"
    store, split, bundle = work / "store", work / "split.parquet", work / "bundle"
    few = ("--config", "tiny", "--set", "split.num_held_out=1", "--set", "split.valid_fraction=0.2")
    lines = [
        ("simulate", "--out", work / "sim", "--cells", "900", "--set", "simulate.genes=60"),
        ("preprocess", work / "sim" / "counts.h5ad", "--out", store, "--config", "tiny"),
        ("split", store, "--out", split, *few),
        ("train", store, "--split", split, "--out", bundle, "--config", "tiny", "--device", "cpu"),
        ("sample", bundle, store, "--split", split, "--out", work / "p.h5ad"),
        ("evaluate", work / "p.h5ad", store, "--out", work / "metrics"),
        ("report", work / "metrics", "--bundle", bundle, "--records", work, "--out", work / "report.html"),
    ]
    for line in lines:
        done = run_cli(*line)
        assert done.code == 0, done.err
    found = [
        (path.relative_to(work).as_posix(), mark)
        for path in work.rglob("*")
        if path.is_file()
        for text in texts(path)
        for mark in (*MARKS, str(work.parent.parent))
        if mark.encode() in text
    ]
    assert not found
    assert not any(f".{os.getpid()}." in path.name for path in work.rglob("*"))
    assert (bundle / "logs").is_dir()


def test_the_marks_would_be_found(tmp_path):
    (tmp_path / "a.txt").write_text("made on alices-workstation")
    assert any(MARKS[0].encode() in text for text in texts(Path(tmp_path / "a.txt")))
