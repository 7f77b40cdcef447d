"""Progress display and logging: a bar on a terminal, one plain line every few seconds elsewhere.

With the environment variable ``PD_LOG`` a command also appends its log to that file. Each attempt begins there with a
line of its own and ends with its exit code, so one file contains the whole history of a run.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perturbdiff.runtime.errors import visible

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 10.0
LOG_FILE = "PD_LOG"
"""Environment variable with the file to which the log is appended."""

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
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(
            console=Console(stderr=True), show_path=False, rich_tracebacks=False
        )
        handler.setFormatter(_Formatter("%(message)s"))
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
    """Counts finished work. `advance` is cheap enough for a loop over blocks."""

    def __init__(self, label: str, total: int, unit: str, bar: Progress | None) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, 0
        self._bar = bar
        self._task = bar.add_task(label, total=total) if bar else None
        self._started = self._spoken = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        """Record that ``amount`` more units are done."""
        self.done += amount
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() - self._spoken >= LOG_EVERY_SECONDS:
            self._spoken = time.monotonic()
            logger.info("%s", self.line())

    def line(self) -> str:
        """Return the plain progress line with done and total, rate and time left."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = self.done / seconds
        left = f", {max(self.total - self.done, 0) / rate:.0f} s left" if rate > 0 and self.total else ""
        of = f"/{self.total}" if self.total else ""
        return f"{self.label}: {self.done}{of} {self.unit}, {rate:.0f} {self.unit}/s{left}"


@contextmanager
def track(label: str, total: int, unit: str = "cells") -> Iterator[Track]:
    """Show progress of ``total`` units of work named ``unit`` while the block runs."""
    quiet = logger.getEffectiveLevel() > logging.INFO
    if quiet or not sys.stderr.isatty():
        work = Track(label, total, unit, None)
        yield work
        logger.info("%s", work.line())
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield Track(label, total, unit, bar)
