"""How soon a command says something, in CPU seconds, and that threads which wait for each other do not spin."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
PROGRAM = (sys.executable, "-m", "perturbdiff")


def spent(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of a process that may have ended."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def until_it_speaks(*arguments) -> float:
    """CPU seconds until a command has written something."""
    command = [*PROGRAM, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        seconds = spent(process)
        process.kill()
    return seconds


@pytest.fixture(scope="module")
def compiled():
    until_it_speaks("--version")  # what Python has to compile is compiled


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("limit", "arguments"),
    [
        (0.3, ("--help",)),
        (0.6, ("data", "list")),
        (1.0, ("store", "info", "{}/store")),
        (1.0, ("bundle", "info", "{}/bundle")),
        (1.0, ("train", "{}/store", "--split", "{}/split.parquet", "--out", "{}/other")),
        (1.0, ("sample", "{}/bundle", "{}/store", "--split", "{}/split.parquet", "--out", "{}/p.h5ad")),
        (1.0, ("evaluate", "{}/p.h5ad", "{}/counts.h5ad", "--out", "{}/metrics")),
        (1.0, ("preprocess", "{}/counts.h5ad", "--out", "{}/again")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_speaks_at_once(trained, limit, arguments):
    assert until_it_speaks(*(text.format(trained) for text in arguments)) < limit


# torch's OpenMP reads the variable when it is loaded: alone, which takes a tenth of torch's time
LOAD = "import sys, ctypes, perturbdiff; ctypes.CDLL(sys.argv[1])"


@pytest.mark.parametrize(("given", "spins"), [(None, False), ("ACTIVE", True)])
def test_threads_do_not_spin_where_the_package_is_used_from_python(given, spins):
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin).parent
    found = [*place.glob("lib/libgomp*"), *place.parent.glob("torch.libs/libgomp*")]
    if not found:
        pytest.skip("this torch has another OpenMP than GNU's, which does not tell")
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({"OMP_WAIT_POLICY": given} if given else {})
    done = subprocess.run(
        [sys.executable, "-c", LOAD, found[0]],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    count = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert count is not None, done.stderr
    assert (int(count[1]) > 0) == spins
