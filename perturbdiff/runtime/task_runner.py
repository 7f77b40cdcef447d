"""Who does the coarse tasks of a long stage: this process, processes on this machine, or a dask cluster.

Tasks are large (seconds to minutes), independent, and leave their results in files, so that a task may be done
twice and a scheduler has little to plan.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self, TypeVar

from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.local_workers import LocalWorkers, WorkerDied, attempt
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_TRIES = 3
_SECONDS_TO_CONNECT = 30
_DIED = (
    f"a worker process died {_TRIES} times over one task, probably for lack of memory; give fewer --jobs, "
    "a smaller --memory-limit, or a machine with more memory. Run again to go on where it stopped"
)
_TRUST = "%s: whoever reaches this scheduler can run code as you, unless it asks for TLS (docs/scale.md)"


class TaskRunner:
    """Runs tasks; a context manager, because workers must be told to go.

    Parameters
    ----------
    jobs
        Worker processes on this machine. 1: everything is done in this process. None: as many as there are
        CPUs, which are started only for several tasks.
    scheduler
        Address of a running dask scheduler, whose workers are used instead. They need this package and the same
        paths. Whoever reaches the scheduler can run code as its user and as this one; an address ``tls://…`` uses
        the certificates that dask's own settings name.

    Raises
    ------
    UserError
        If the scheduler does not answer, or a worker dies again and again.

    Notes
    -----
    Workers are started by spawning: a script that uses them must guard its entry by
    ``if __name__ == "__main__"``.
    """

    def __init__(self, jobs: int | None = None, scheduler: str | None = None) -> None:
        self.jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
        self.scheduler = scheduler
        self._stack = contextlib.ExitStack()
        self._workers: LocalWorkers | None = None
        self._client: Any = None

    def run(
        self,
        function: Callable[[T], R],
        tasks: Sequence[T],
        *,
        weights: Sequence[int] | None = None,
        label: str = "",
        unit: str = "cells",
    ) -> list[R]:
        """Return ``function`` of each task, in the order of ``tasks``.

        Parameters
        ----------
        function
            Defined at the top level of a module. Its argument and result travel between processes.
        tasks
            What to call it with.
        weights
            Units of progress in each task; by default one.
        label, unit
            Of the progress display.
        """
        if not tasks:
            return []
        sizes = [1] * len(tasks) if weights is None else list(weights)
        results: list[Any] = [None] * len(tasks)
        with track(label, sum(sizes), unit) as progress:
            for number, result in self._results(function, tasks):
                results[number] = result
                progress.advance(sizes[number])
        return results

    def _results(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Yield the number and the result of each task as it ends."""
        if self.scheduler is None and (self.jobs == 1 or len(tasks) < 2):
            for number, task in enumerate(tasks):
                yield number, function(task)
            return
        found = self._locally(function, tasks) if self.scheduler is None else self._remotely(function, tasks)
        with contextlib.closing(found):  # at once: what still runs when a task fails is ended or cancelled
            for number, result in found:
                if isinstance(result, Exception):
                    raise result
                yield number, result

    def _locally(
        self, function: Callable[[T], R], tasks: Sequence[T]
    ) -> Generator[tuple[int, R | Exception]]:
        if self._workers is None:
            self._workers = LocalWorkers(self.jobs, _TRIES)
            self._stack.callback(self._workers.close)
        try:
            yield from self._workers.results(function, tasks)
        except WorkerDied:
            raise UserError(_DIED) from None

    def _remotely(
        self, function: Callable[[T], R], tasks: Sequence[T]
    ) -> Generator[tuple[int, R | Exception]]:
        from distributed import KilledWorker, as_completed

        client = self._connected()
        futures = [client.submit(attempt, function, task, pure=False) for task in tasks]
        place = {future.key: number for number, future in enumerate(futures)}
        try:
            for future in as_completed(futures):
                yield place[future.key], future.result()
        except KilledWorker:
            raise UserError(_DIED) from None
        finally:
            client.cancel(futures)

    def _connected(self) -> Any:
        if self._client is None:
            from distributed import Client

            try:
                client = Client(self.scheduler, timeout=_SECONDS_TO_CONNECT)
            except (OSError, ValueError, TypeError) as error:  # TypeError: tls:// without certificates
                raise UserError(
                    f"--dask-scheduler {self.scheduler}: no scheduler answers there ({error}); give an address "
                    "such as tls://host:8786"
                ) from None
            self._client = self._stack.enter_context(client)
            logger.warning(_TRUST, self.scheduler)
            if not client.scheduler_info()["workers"]:
                logger.warning("%s has no workers yet: waiting for some", self.scheduler)
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._workers = self._client = None
