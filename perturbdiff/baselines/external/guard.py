"""Run a command so that nothing of it outlives us: ``python -I -S guard.py FD PARENT COMMAND…``.

This process stands between perturbdiff (PARENT) and an external method. It starts the command in a session of its own.
When the command ends, this process ends everything that the command started. It does the same on SIGTERM, which the
kernel also sends if the parent dies, even by SIGKILL. Then it writes one line of JSON to the file descriptor FD: how
the command ended, its CPU seconds and its peak memory. It needs the standard library only, so that it starts at once
and leaves the memory to the method.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # options of prctl, Linux
_PAUSE = 0.05
_CANNOT_START = 127
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guard:
    """The command and all processes that descend from it."""

    def __init__(self, command: Sequence[str], report: int) -> None:
        self.asked = False
        self.status: int | None = None
        for number in _ENDS:
            signal.signal(number, self._ask)
        self._child = os.fork()
        if not self._child:
            self._become(command, report)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _become(self, command: Sequence[str], report: int) -> None:
        """Turn the forked process into the command."""
        try:
            os.setsid()
            _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            for number in _ENDS:
                signal.signal(number, signal.SIG_DFL)
            os.close(report)
            os.execv(command[0], list(command))
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(_CANNOT_START)

    def reap(self) -> bool:
        """Collect the processes that have ended; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self._child:
                self.status = os.waitstatus_to_exitcode(status)

    def wait(self) -> None:
        """Wait until the command ends, or until a signal asks us to end it."""
        while self.reap() and self.status is None and not self.asked:
            time.sleep(_PAUSE)

    def end(self) -> None:
        """End all descendants: SIGTERM, then SIGKILL after `GRACE`. Orphans become children of this process."""
        since = time.monotonic()
        number = signal.SIGTERM
        self._signal(number)
        while self.reap():
            if time.monotonic() - since > GRACE:
                number = signal.SIGKILL
            if number == signal.SIGKILL:
                self._signal(number)
            time.sleep(_PAUSE)

    def _signal(self, number: int) -> None:
        if self.status is None:
            _send(os.killpg, self._child, number)
        for pid in _children():
            _send(os.kill, pid, number)


def _children() -> list[int]:
    """Return the processes whose parent is this one (Linux; elsewhere none are known)."""
    this_process, children = str(os.getpid()), []
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - pathlib is slow to load
    except OSError:
        return []
    for name in names:
        try:
            with open(f"/proc/{name}/stat") as handle:  # noqa: PTH123
                parent = handle.read().rpartition(")")[2].split()[1]
        except OSError:  # ended meanwhile
            continue
        if parent == this_process:
            children.append(int(name))
    return children


def _send(how: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(target, number)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(
        OSError, AttributeError
    ):  # not Linux: then only the command's own group is ended
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(report: int, parent: int, command: Sequence[str]) -> None:
    """Run the command and report."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(_SET_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before we asked the kernel for the signal
        return
    guard = Guard(command, report)
    guard.wait()
    guard.end()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = {
        "code": guard.status,
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_memory_mib": round(used.ru_maxrss / 1024),
    }
    os.write(report, json.dumps(facts).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
