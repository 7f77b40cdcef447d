"""The documentation, built once as `make docs` builds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """Folder of the built site; a warning of the build is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs builds the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
    }  # the theme's note on its successor, as in the Makefile
    done = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder
