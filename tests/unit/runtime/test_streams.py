"""Logs and bars go to standard error, also on a terminal; standard output has results only."""

import os
import pty
import subprocess
import sys

CODE = """
import logging, sys
from perturbdiff.runtime.progress import set_up_logging, track
set_up_logging(0)
logging.getLogger("perturbdiff").warning("a warning")
with track("counting", 3) as work:
    work.advance(3)
print("a result")
"""


def test_standard_output_has_results_only():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "a result\n"
    assert "a warning" in done.stderr


def test_on_a_terminal_too():
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.stdout == "a result\n"
    assert "a warning" in shown
    assert "counting" in shown
