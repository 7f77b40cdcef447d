"""bin/get-chromium says what is wrong in a line, and leaves no half browser behind."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bin" / "get-chromium"


def get(*arguments, **environment) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "PD_CHROMIUM"}
    return subprocess.run(
        [SCRIPT, *arguments], env=kept | environment, capture_output=True, text=True, check=False, timeout=60
    )


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_named_browser_comes_first(tmp_path):
    mine = program(tmp_path / "mine", "echo Chromium 1")
    assert get(PD_CHROMIUM=str(mine)).stdout.strip() == str(mine)


def test_a_browser_that_does_not_start_is_named(tmp_path):
    broken = program(tmp_path / "broken", "exit 3")
    done = get(PD_CHROMIUM=str(broken))
    assert done.returncode == 1
    assert done.stderr.strip() == f"get-chromium: PD_CHROMIUM={broken} does not start"


def test_a_stub_on_path_is_passed_over(tmp_path):
    program(tmp_path / "chromium", "echo 'install the package first' >&2; exit 1")
    real = program(tmp_path / "google-chrome", "echo Chrome 1")
    done = get(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout.strip() == str(real)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="fetched there only")
@pytest.mark.parametrize(
    ("npm", "said"),
    [
        ("exit 1", "npm could not fetch"),
        ("echo other > other.tgz", "its hash differs"),
    ],
)
def test_a_failed_or_foreign_archive_leaves_nothing(tmp_path, npm, said):
    for name, text in (("npm", npm), ("node", "exit 0")):
        program(tmp_path / name, text)
    home = tmp_path / "home" / "chromium"
    done = get("--own", PD_CHROMIUM_HOME=str(home), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""
    assert [p.name for p in home.parent.rglob("*")] == ["chromium", "fetch.log"]
