"""When a training stops: before the job's allocation ends, or when a signal says so."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Signals that stop a training."""


def ignored(number: int) -> bool:
    """Whether this is Ctrl-C and whoever started us has it ignored.

    Other signals are asked for by name: a batch script that ignores SIGUSR1 does so to outlive it, and means it for us.
    """
    return number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


class TimeLimit:
    """Tells when to stop: shortly before the allocation ends, or after a signal.

    Parameters
    ----------
    margin
        Seconds before the end at which to stop.
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}
        end = os.environ.get("PD_END_TIME") or os.environ.get("SLURM_JOB_END_TIME")
        try:
            self.end = float(end) if end else None
        except ValueError:
            logger.warning("PD_END_TIME or SLURM_JOB_END_TIME is not a time in seconds: %r; ignored", end)
            self.end = None

    def listen(self) -> None:
        """Turn SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C into a request to stop. A second Ctrl-C stops at once.

        A Ctrl-C that whoever started us had ignored, as a shell does for what a script runs in the background, stays
        ignored.
        """
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS if not ignored(s)}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to signals while the block runs."""
        self.listen()
        try:
            yield
        finally:
            self.stop_listening()

    def stop_listening(self) -> None:
        """Restore the former signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == self.signal == "SIGINT":
            raise KeyboardInterrupt
        self.signal = name

    def reason(self) -> str | None:
        """Return why to stop now, or None."""
        if self.signal:
            return f"signal {self.signal}"
        if self.end is not None and time.time() > self.end - self.margin:
            return f"the allocation ends in {max(self.end - time.time(), 0):.0f} s"
        return None
