"""Damaged inputs: a right result or one line and exit code 2; `make fuzz` tries a thousand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from security.kept import KEPT

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory, sound):
    """What came of 28 mutations and of the kept ones, in a process of its own: it forks."""
    folder = tmp_path_factory.mktemp("fuzz")
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "security.fuzz",
            "--runs",
            "24",  # at least one of each kind
            "--kept",
            "--good",
            sound,
            "--json",
            folder / "verdicts.json",
        ],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert (folder / "verdicts.json").exists(), done.stdout + done.stderr
    return json.loads((folder / "verdicts.json").read_text())


def found(verdicts):
    """Return what is not allowed, as lines that tell how to repeat it."""
    return [
        f"{v['kind']}:{v['number']} {v['command']}: {v['file']}: {v['damage']}: {v['outcome']}: {v['said']}"
        for v in verdicts
        if v["outcome"] not in ("right", "refused", "unseen")
    ]


def test_random_damage_is_refused_in_one_line_or_changes_nothing(verdicts):
    random = [v for v in verdicts if v["number"] >= 0]
    assert len(random) >= 24
    assert {v["outcome"] for v in random} >= {"right", "refused"}
    assert not found(random)


def test_what_was_found_once_is_mended(verdicts):
    kept = [v for v in verdicts if v["number"] < 0]
    assert len(kept) == len(KEPT)
    assert not found(kept)
