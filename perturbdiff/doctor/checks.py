"""A finding, how findings are shown, and how a check that hangs is given up."""

from __future__ import annotations

import getpass
import json
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from perturbdiff import __version__

Status = Literal["ok", "note", "absent", "problem"]
Look = tuple[str, "Callable[[], Check | list[Check]]"]

GIB = 1 << 30
LIMIT = 75.0
"""Seconds after which a check without a result is given up."""
_SIGN = {"ok": "ok     ", "note": "note   ", "absent": "-      ", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes
    ----------
    name
        What was looked at.
    status
        ``ok``; ``note``: works, with something to know; ``absent``: not there and not needed for everything;
        ``problem``: will not work.
    found
        What is there.
    remedy
        What to do, empty if nothing.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def render(checks: Sequence[Check]) -> str:
    """Return the findings as lines of text, remedies indented below."""
    width = max(len(c.name) for c in checks)
    lines = []
    for check in checks:
        lines.append(f"{_SIGN[check.status]}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<{width + 11}}→ {check.remedy}")
    return "\n".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    """Return the findings as JSON: version, host, number of problems, and the list of checks."""
    record = {
        "version": __version__,
        "host": platform.node(),
        "problems": sum(check.status == "problem" for check in checks),
        "checks": [asdict(check) for check in checks],
    }
    return json.dumps(record, indent=2, ensure_ascii=False)


def gather(looks: Sequence[Look], limit: float | None = None) -> list[Check]:
    """Run all checks at once and return what they found, in order.

    A check without a result after ``limit`` seconds (a dead network file system blocks whoever reads from it) becomes
    a problem. Its thread is left behind; it does not keep the process from ending.
    """
    results: dict[int, list[Check]] = {}

    def run(i: int, name: str, look: Callable[[], Check | list[Check]]) -> None:
        try:
            checks = look()
        except Exception as error:  # noqa: BLE001 - the other checks are still of use
            checks = Check(name, "problem", f"could not be looked at: {type(error).__name__}: {error}")
        results[i] = checks if isinstance(checks, list) else [checks]

    threads = [threading.Thread(target=run, args=(i, *look), daemon=True) for i, look in enumerate(looks)]
    seconds = LIMIT if limit is None else limit
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    late = f"no answer within {seconds:.0f} s"
    remedy = "whatever it asks hangs (a dead network file system, a driver, a controller)"
    missing = [[Check(name, "problem", late, remedy)] for name, _ in looks]
    return [check for i in range(len(looks)) for check in results.get(i, missing[i])]


def ask(program: str, *arguments: str, timeout: float = 10, alone: bool = False) -> str | None:
    """Return what a program prints, or None if it is not there, fails, or does not answer in ``timeout`` seconds.

    ``alone`` leaves out what it prints to standard error.
    """
    if shutil.which(program) is None:
        return None
    try:
        # A session of its own, because launchers start children that would survive them.
        process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if alone else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        return None
    return output.strip() if process.returncode == 0 else None


def in_words(seconds: float) -> str:
    """Return a length of time in words, e.g. ``3 h 05 min``."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{max(int(seconds), 0)} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def user_name() -> str:
    """Return the name of the user, or the number where the system has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
