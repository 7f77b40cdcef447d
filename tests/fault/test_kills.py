"""A few signals at random moments; `make fuzz` sends 20 of each to every command (`fault.kills`)."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_a_disturbed_command_run_again_gives_an_undisturbed_result(tmp_path, sound):
    names = "preprocess,split,sample,evaluate,baseline,export"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fault.kills", "--each", "1", "--commands", names, "--good", sound],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL") == 6
