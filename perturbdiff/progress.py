"""Progress for people and for logs: a bar on a terminal, one plain line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 10.0


def set_up_logging(verbosity: int) -> None:
    """Send the package's log to standard error: warnings (-1), information (0) or everything (1)."""
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(show_path=False, rich_tracebacks=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    package = logging.getLogger("perturbdiff")
    package.handlers[:] = [handler]
    package.setLevel(level)
    package.propagate = False


class Track:
    """Counts work done; `advance` is cheap enough for a loop over blocks."""

    def __init__(self, label: str, total: int, unit: str, bar: Progress | None) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, 0
        self._bar = bar
        self._task = bar.add_task(label, total=total) if bar else None
        self._started = self._spoken = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        """Note that ``amount`` more units are done."""
        self.done += amount
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() - self._spoken >= LOG_EVERY_SECONDS:
            self._spoken = time.monotonic()
            logger.info("%s", self.line())

    def line(self) -> str:
        """Return the plain progress line: done of total, rate, time left."""
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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        yield Track(label, total, unit, bar)
