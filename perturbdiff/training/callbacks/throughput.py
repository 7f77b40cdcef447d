"""How fast a training goes, and how long it will take."""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger(__name__)

SPEAK_SECONDS = 60.0
"""Time after which a line is due though no row of the journal is."""


class Throughput:
    """The clock of an attempt, and the sums over the attempts before it.

    Parameters
    ----------
    attempts, seconds
        Attempts before this one, and their time up to the checkpoint that this one goes on from.
    """

    def __init__(self, attempts: int = 0, seconds: float = 0.0) -> None:
        self.attempts, self.seconds = attempts + 1, seconds
        self.first, self.steps, self.cells, self.validating = 0, 0, 0, 0.0
        self._began: float | None = None
        self._ended = self._spoken = 0.0
        self._unsaid = 0  # cells since the last line
        self._quiet = True  # nothing was said in this attempt

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"attempts": self.attempts, "seconds": self.seconds + self.elapsed()}

    def start(self, step: int) -> None:
        """Start the clock before the first step."""
        if self._began is None:
            self._began = self._ended = self._spoken = time.monotonic()
            self.first = step

    def step(self, cells: int) -> None:
        """Count a step of so many cells."""
        self.steps += 1
        self.cells += cells
        self._unsaid += cells
        self._ended = time.monotonic()

    def validated(self, seconds: float) -> None:
        """Take a validation's time out of the throughput."""
        self.validating += seconds
        self._spoken += seconds

    def silent(self) -> bool:
        """Return whether a line is due: after the first step, and when none came for long."""
        return self._quiet or time.monotonic() - self._spoken >= SPEAK_SECONDS

    def elapsed(self) -> float:
        """Return the seconds of this attempt until its last step."""
        return 0.0 if self._began is None else self._ended - self._began

    def said(self, step: int, last: int) -> str:
        """Return throughput since the last line and time left, for a line."""
        now = time.monotonic()
        rate = self._unsaid / max(now - self._spoken, 1e-9)
        self._spoken, self._unsaid, self._quiet = now, 0, False
        left = (last - step) * (now - (self._began or now)) / max(self.steps, 1)
        return f"{rate:.0f} cells/s, {span(left)} left"

    def facts(self) -> dict[str, Any]:
        """Return the figures of this attempt and all for the record of the run."""
        working = max(self.elapsed() - self.validating, 1e-9)
        return {
            "attempts": self.attempts,
            "first_step": self.first,
            "train_seconds": round(self.elapsed(), 3),
            "validation_seconds": round(self.validating, 3),
            "cells_per_second": round(self.cells / working, 1),
            "train_seconds_of_all_attempts": round(self.seconds + self.elapsed(), 3),
        }

    def conclude(self, last: int) -> None:
        """Log the figures of this attempt."""
        if not self.steps:
            return
        facts = self.facts()
        logger.info(
            "attempt %d: steps %d to %d of %d in %s (validation %s), %.0f cells/s",
            self.attempts, self.first + 1, self.first + self.steps, last, span(self.elapsed()),
            span(self.validating), facts["cells_per_second"],
        )  # fmt: skip


def span(seconds: float) -> str:
    """Return a time for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
