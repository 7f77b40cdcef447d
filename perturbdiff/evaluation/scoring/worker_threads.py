"""Threads that compare cells: as many values wait at a time as memory may hold, and the first error is raised."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

IN_FLIGHT = 1 << 25
"""Values that wait or are worked on, 0.25 GiB; a larger piece of work runs alone."""


def usable(threads: int | None) -> int:
    """Return a number of threads: as given, by default the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if threads is None else max(1, threads)


class Workers:
    """Runs pieces of work in threads and raises the first error.

    Parameters
    ----------
    threads
        One: work is done at once, in the calling thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._changed = threading.Condition()
        self._busy, self._values = 0, 0
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None], values: int) -> None:
        """Do ``work``, which holds this number of ``values``, as soon as there is room for it."""
        if self._pool is None:
            work()
            return
        with self._changed:
            while self._error is None and self._full(values):
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._busy += 1
            self._values += values
        self._pool.submit(self._run, work, values)

    def _full(self, values: int) -> bool:
        return self._busy > self._threads or (self._busy > 0 and self._values + values > IN_FLIGHT)

    def _run(self, work: Callable[[], None], values: int) -> None:
        try:
            if self._error is None:
                work()
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self._error = self._error or error
        finally:
            del work
            with self._changed:
                self._busy -= 1
                self._values -= values
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait for all work; raise the first error."""
        with self._changed:
            while self._busy:
                self._changed.wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._error = self._error or error
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            self.finish()
