"""Progress and logging: a bar on a terminal or in a notebook, one plain line every few seconds elsewhere.

With the environment variable ``PD_LOG`` a command also appends its log to that file. Each attempt begins there with a
line of its own and ends with its exit code, so one file contains the whole history of a run.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perturbdiff.runtime.errors import visible
from perturbdiff.runtime.live_bar import Bar, bar, on_terminal

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 10.0
LOG_FILE = "PD_LOG"
"""Environment variable with the file to which the log is appended."""

PROGRESS = "progress"
"""Attribute of log records that say what a bar shows, too (``extra={PROGRESS: True}``)."""

_TIME = "%Y-%m-%d %H:%M:%S"


class _Formatter(logging.Formatter):
    """Replaces characters in labels that would hide or reorder the text around them."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


_PLAIN = _Formatter("%(asctime)s %(levelname)s %(message)s", _TIME)


def set_up_logging(verbosity: int) -> None:
    """Send the package's log to standard error, and to the file in ``PD_LOG`` if it is set.

    Log warnings (``verbosity`` -1), information (0) or everything (1).
    """
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    if on_terminal():
        from rich.console import Console
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(
            console=Console(stderr=True), show_path=False, rich_tracebacks=False
        )
        handler.setFormatter(_Formatter("%(message)s"))
        handler.addFilter(_beside_the_bar)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_PLAIN)
    package = logging.getLogger("perturbdiff")
    package.handlers[:] = [handler]
    package.setLevel(level)
    package.propagate = False
    if path := log_file():
        log = LogFile(path)
        package.addHandler(log)
        log.begin()


def _beside_the_bar(record: logging.LogRecord) -> bool:
    """Make room for a line on the terminal. Return False for one that says what the bar shows."""
    shown = _shown[-1].bar if _shown else None
    if shown is None:
        return True
    if getattr(record, PROGRESS, False):
        return False
    shown.erase()
    return True


def log_file() -> Path | None:
    """Return the file that ``PD_LOG`` names, or None if it is not set."""
    path = os.environ.get(LOG_FILE)
    return Path(path) if path else None


def conclude(code: int, text: str = "") -> None:
    """Write how the command ended to the log file, if there is one. Standard error has its own message."""
    for handler in logging.getLogger("perturbdiff").handlers:
        if isinstance(handler, LogFile):
            handler.end(code, text)


class LogFile(logging.Handler):
    """Appends lines to a file that several attempts share. A failure to write gives one warning and no error.

    Parameters
    ----------
    path
        The file; its folder is created.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(_PLAIN)
        self.path = path
        self._complained = False
        self._began = time.monotonic()

    def begin(self) -> None:
        """Write the line that separates this attempt from the previous one."""
        job = os.environ.get("SLURM_JOB_ID")
        where = f"host {platform.node()}, process {os.getpid()}" + (f", Slurm job {job}" if job else "")
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self._append(f"{_now()} ======== {where}: {command}")

    def end(self, code: int, text: str) -> None:
        """Write the exit code and the last message."""
        after = f"{time.monotonic() - self._began:.0f} s"
        self._append(f"{_now()} exit code {code} after {after}{': ' if text else ''}{text}")

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line."""
        self._append(self.format(record))

    def _append(self, line: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(
                "a"
            ) as handle:  # opened each time, as the file may be moved or the disk be full
                handle.write(f"{line}\n")
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("%s %s cannot be written: %s", LOG_FILE, self.path, error.strerror or error)


def _now() -> str:
    return time.strftime(_TIME)


class Track:
    """Counts finished work and tells of it. `advance` is cheap enough for a loop over blocks or training steps.

    Parameters
    ----------
    label, total, unit
        Name of the work, and how much there is of it.
    done
        What an earlier attempt has done. Rate and time left do not count it.
    bar
        Where the work is shown while it goes on, if anywhere.
    details
        Returns what the bar says after the time left; by default the rate. It is asked only when the bar is drawn.
    lines
        Whether to log a line every few seconds and at the end.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        *,
        done: int = 0,
        bar: Bar | None = None,
        details: Callable[[], Sequence[str]] | None = None,
        lines: bool = True,
    ) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, done
        self._first, self.bar, self._lines = done, bar, lines
        self._details = details or (lambda: (f"{self.rate():.0f} {self.unit}/s",))
        self._started = self._spoken = time.monotonic()
        self._drawn = 0.0

    def advance(self, amount: int = 1) -> None:
        """Record that ``amount`` more units are done."""
        self.done += amount
        now = time.monotonic()
        if self.bar is not None and now - self._drawn >= self.bar.every and _shown[-1] is self:
            self._drawn = now
            self._draw(self.bar)
        if self._lines and now - self._spoken >= LOG_EVERY_SECONDS:
            self._spoken = now
            logger.info("%s", self.line(), extra={PROGRESS: True})

    def restart(self, total: int, done: int) -> None:
        """Count anew, for another part of the work."""
        self.total, self.done, self._first = total, done, done
        self._started = time.monotonic()

    def rate(self) -> float:
        """Return the units per second of this attempt."""
        return (self.done - self._first) / max(time.monotonic() - self._started, 1e-9)

    def time_left(self) -> str:
        """Return the time left in words, or an empty string if it is unknown."""
        rate = self.rate()
        return f"{span(max(self.total - self.done, 0) / rate)} left" if rate > 0 and self.total else ""

    def line(self) -> str:
        """Return the plain progress line with done and total, rate and time left."""
        left = f", {self.time_left()}" if self.time_left() else ""
        return f"{self.label}: {self._count()} {self.unit}, {self.rate():.0f} {self.unit}/s{left}"

    def end(self, *, success: bool) -> None:
        """Erase the bar and log the last line, or leave the bar behind as it was when the work failed."""
        if self.bar is not None and self._drawn:
            self._draw(self.bar)
            self.bar.close(erase=success)
        if success and self._lines:
            logger.info("%s", self.line())

    def _count(self) -> str:
        return f"{self.done}/{self.total}" if self.total else f"{self.done}"

    def _draw(self, bar: Bar) -> None:
        parts = (f"{self.label} {self._count()} {self.unit}".rstrip(), self.time_left(), *self._details())
        bar.draw(min(self.done / max(self.total, 1), 1.0), [visible(part) for part in parts if part])


_shown: list[Track] = []
"""Work under way, the innermost last. Only that one is drawn."""


@contextmanager
def track(
    label: str,
    total: int,
    unit: str = "cells",
    *,
    done: int = 0,
    details: Callable[[], Sequence[str]] | None = None,
    lines: bool = True,
) -> Iterator[Track]:
    """Show progress of ``total`` units of work named ``unit`` while the block runs. `Track` explains the others."""
    work = Track(label, total, unit, done=done, bar=None if _quiet() else bar(), details=details, lines=lines)
    _shown.append(work)
    success = False
    try:
        yield work
        success = True
    finally:
        _shown.remove(work)
        work.end(success=success)


def _quiet() -> bool:
    """Return whether the user asked for warnings alone. Without a command line, nobody has said anything."""
    level = logging.getLogger("perturbdiff").level
    return level != logging.NOTSET and level > logging.INFO


def span(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def byte_size(number: float) -> str:
    """Return a number of bytes in words."""
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
