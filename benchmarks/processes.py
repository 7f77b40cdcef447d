"""A command in a process of its own, with the memory of all its processes watched and its CPU time counted."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

INTERVAL = 0.05
"""Seconds between two looks at the memory, or twenty times as long as a look takes."""

MIB = 2**20


def run(command: Sequence[str], folder: Path) -> dict:
    """Run a command that prints a JSON object on its last line; return that with what `watch` saw meanwhile."""
    said, peak = watch(command, folder)
    return {**json.loads(said.splitlines()[-1]), **peak}


def watch(command: Sequence[str], folder: Path) -> tuple[str, dict[str, float]]:
    """Run a command; return what it printed and what was seen meanwhile.

    Returns
    -------
    str, dict
        The standard output; ``private``, the highest sum over the process and all its descendants of memory that no
        other process shares (MiB; pages of a file that only one process maps count); ``anonymous``, that of what is
        in no file; ``pss``, all memory, what is shared divided among those who share it; ``processes``, the most seen
        at once; ``disk``, the most bytes in ``folder``.
    """
    process = subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True)
    peak = {"private": 0.0, "anonymous": 0.0, "pss": 0.0, "processes": 0.0, "disk": 0.0}
    root = psutil.Process(process.pid)
    while process.poll() is None:
        start = time.perf_counter()
        for name, value in {**_memory(root), "disk": _disk(folder)}.items():
            peak[name] = max(peak[name], value)
        time.sleep(max(INTERVAL, 20 * (time.perf_counter() - start)))
    assert process.stdout is not None
    said = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return said, peak


def _memory(root: psutil.Process) -> dict[str, float]:
    total = {"private": 0.0, "anonymous": 0.0, "pss": 0.0, "processes": 0.0}
    with contextlib.suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found = process.memory_full_info()
                total["private"] += found.uss / MIB
                total["anonymous"] += _anonymous(process.pid) / MIB
                total["pss"] += found.pss / MIB
                total["processes"] += 1
    return total


def _anonymous(pid: int) -> int:
    """Return the bytes of a process that are in no file."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    return 0


def _disk(folder: Path) -> float:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).stat().st_size
    return float(total)


class Stopwatch:
    """CPU and wall time, and reads and writes of files, since it was made.

    Children that have ended count for the CPU; reads and writes are those of this process alone.
    """

    def __init__(self) -> None:
        self._cpu, self._wall, self._io = _cpu(), time.perf_counter(), _io()

    def read(self) -> dict[str, float]:
        """Return ``cpu`` and ``wall`` in seconds, ``reads`` and ``writes`` in calls, their bytes."""
        seen = {name: value - self._io[name] for name, value in _io().items()}
        return {"cpu": _cpu() - self._cpu, "wall": time.perf_counter() - self._wall, **seen}


def _cpu() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(spent.ru_utime + spent.ru_stime for spent in both)


def _io() -> dict[str, float]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    names = {"syscr": "reads", "syscw": "writes", "rchar": "bytes read", "wchar": "bytes written"}
    return {names[key]: float(value) for key, value in lines if key in names}
