"""The examples of docs/usage.md run, in order, as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

USAGE = Path(__file__).parents[2] / "docs" / "usage.md"
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", USAGE.read_text(), re.M | re.S)
STAGES = ("simulate", "preprocess", "split", "stats", "train", "pretrain", "finetune", "sample")
STAGES += ("baseline", "evaluate", "report", "doctor", "config")


def test_every_command_has_an_example():
    shown = "".join(code for language, code in BLOCKS if language == "bash")
    assert [s for s in STAGES if not re.search(rf"^perturbdiff {s}\b", shown, re.M)] == []


@pytest.mark.slow
def test_examples_run(tmp_path):
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for language, code in BLOCKS:
        command = (
            ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        )
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "from_python.h5ad").is_file()
