"""Every mistake of the table is told in one message that names the place and the remedy; nothing is written."""

import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest
import torch
from fault.user_mistakes import MISTAKES, entries, make_members, message_of, prepare
from refusals import refused
from tiny_data import TINY, tiny_counts

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


ROWS = [
    pattern
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
    for pattern in re.findall(r"`([^`]*)`", line.split("|")[1])
]
"""What the page says that a user sees; … stands for any text."""
SHOWN: dict[str, set[str]] = {}


def rows_of(message):
    """Return the lines of the page that show a message."""
    return {row for row in ROWS if re.fullmatch(re.escape(row).replace("…", ".*"), message)}


@pytest.fixture(scope="module")
def members(trained):
    make_members(trained)
    return trained


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_mistake(members, tmp_path, monkeypatch, run_cli, mistake):
    if "no GPU" in mistake.what and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    folder = tmp_path / "here"
    prepare(members, folder)
    if mistake.make is not None:
        mistake.make(folder)
    monkeypatch.chdir(folder)
    before = entries(folder), sorted(path.name for path in members.iterdir())
    outcome = run_cli(*shlex.split(mistake.line))
    refused(outcome, *mistake.says)
    assert outcome.out == ""
    SHOWN[mistake.what] = rows_of(*message_of(outcome.err))
    assert SHOWN[mistake.what], "docs/troubleshooting.md does not show this message"
    assert before == (entries(folder), sorted(path.name for path in members.iterdir()))


def test_a_file_that_may_not_be_read_or_a_place_that_may_not_be_written(run_cli):
    """As another user than root, who may read and write everything."""
    with tempfile.TemporaryDirectory() as name:
        folder, locked = Path(name), Path(name) / "locked"
        folder.chmod(0o755)
        tiny_counts().write_h5ad(folder / "counts.h5ad")
        tiny_counts().write_h5ad(folder / "secret.h5ad")
        (folder / "secret.h5ad").chmod(0)
        locked.mkdir(mode=0o500)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            read = run_cli("preprocess", folder / "secret.h5ad", "--out", folder / "out", *TINY)
            written = run_cli("preprocess", folder / "counts.h5ad", "--out", folder / "out", *TINY)
        finally:
            os.seteuid(user)
        refused(read, "secret.h5ad", "permission")
        assert rows_of(*message_of(read.err))
        if user == 0:
            refused(written, "out", "permission denied", "choose another output")
            assert rows_of(*message_of(written.err))
            assert sorted(path.name for path in folder.iterdir()) == ["counts.h5ad", "locked", "secret.h5ad"]


def test_the_page_shows_nothing_else():
    """Each line of the page is what a mistake of the table leads to, or one of these two that need another user."""
    assert len(PAGE.read_bytes()) < 12_000
    if len(SHOWN) < len(MISTAKES):
        pytest.skip("only with all mistakes")
    seen = set().union(*SHOWN.values())
    assert {row for row in ROWS if row not in seen} == {
        "…: permission denied; …",
        "cannot write …: permission denied; …",
    }
