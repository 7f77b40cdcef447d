"""Who does the coarse tasks of a long stage: this process, processes on this machine, or a dask cluster.

Tasks are large (seconds to minutes), independent, and leave their results in files, so that a task may be done
twice and a scheduler has little to plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self, TypeVar

from perturbdiff.errors import UserError
from perturbdiff.progress import track

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_TRIES = 3
_SECONDS_TO_CONNECT = 30
_ALONE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",  # memory that was freed goes back to the system
}
"""Environment of worker processes: one thread each, for there is one for each CPU."""
_PR_SET_PDEATHSIG = 1


class Crew:
    """Runs tasks; a context manager, because workers must be told to go.

    Parameters
    ----------
    jobs
        Worker processes on this machine. 1: everything is done in this process. None: as many as there are
        CPUs, which are started only for several tasks.
    scheduler
        Address of a running dask scheduler, whose workers are used instead. They need this package and the same
        paths. Whoever can reach a scheduler can run programs as its owner, unless it uses TLS.

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
        self._client: Any = None
        self._pool: ProcessPoolExecutor | None = None
        self._workers: set[Any] = set()

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
        if self.scheduler is not None:
            found = self._by_scheduler(function, tasks)
        elif self.jobs == 1 or len(tasks) < 2:
            found = ((number, function(task)) for number, task in enumerate(tasks))
        else:
            found = self._by_processes(function, tasks)
        for number, result in found:
            if isinstance(result, Exception):
                raise result
            yield number, result

    def _by_processes(
        self, function: Callable[[T], R], tasks: Sequence[T]
    ) -> Iterator[tuple[int, R | Exception]]:
        """Have workers on this machine do the tasks; they hear of them through pipes that nobody else can reach."""
        left, deaths = dict(enumerate(tasks)), 0
        while left:
            futures = {self._submitted(_attempt, function, task): number for number, task in left.items()}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
                    del left[futures[future]]
            except BrokenProcessPool:
                for future, number in futures.items():
                    if (
                        future.done()
                        and not future.cancelled()
                        and future.exception() is None
                        and number in left
                    ):
                        yield number, future.result()
                        del left[number]
                self._end_workers(at_once=True)
                deaths += 1
                if deaths == _TRIES:
                    raise _died() from None
            finally:
                for future in futures:
                    future.cancel()

    def _submitted(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Hand work to the pool, which is started first if there is none."""
        if self._pool is None:
            before, was = (
                set(multiprocessing.active_children()),
                {name: os.environ.get(name) for name in _ALONE},
            )
            os.environ.update(_ALONE)
            try:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.jobs, context, _begin, (os.getpid(),))
                self._pool.submit(os.getpid)  # all workers start now
            finally:
                for name, value in was.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})
            self._workers = set(multiprocessing.active_children()) - before
        return self._pool.submit(function, *arguments)

    def _end_workers(self, *, at_once: bool) -> None:
        """End the workers; ``at_once`` in the middle of a task, too: a further run does it again."""
        if self._pool is not None:
            if at_once:
                for worker in self._workers:
                    worker.kill()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _by_scheduler(
        self, function: Callable[[T], R], tasks: Sequence[T]
    ) -> Iterator[tuple[int, R | Exception]]:
        """Have the workers of a dask scheduler do the tasks."""
        from distributed import KilledWorker
        from distributed import as_completed as ended

        client = self._connected()
        futures = [client.submit(_attempt, function, task, pure=False) for task in tasks]
        place = {future.key: number for number, future in enumerate(futures)}
        try:
            for future in ended(futures):
                yield place[future.key], future.result()
        except KilledWorker:
            raise _died() from None
        finally:
            client.cancel(futures)

    def _connected(self) -> Any:
        if self._client is None:
            from distributed import Client

            logger.warning(
                "--dask-scheduler %s: whoever can reach that scheduler can run programs as you; "
                "have it use TLS where others share the network (docs/scale.md)",
                self.scheduler,
            )
            try:
                client = Client(self.scheduler, timeout=_SECONDS_TO_CONNECT)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"--dask-scheduler {self.scheduler}: no scheduler answers there ({error}); give an address "
                    "such as tls://host:8786"
                ) from None
            self._client = self._stack.enter_context(client)
            if not client.scheduler_info()["workers"]:
                logger.warning("%s has no workers yet: waiting for some", self.scheduler)
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_workers(at_once=kind is not None)
        self._stack.close()
        self._client = None


def _died() -> UserError:
    return UserError(
        f"a worker process died {_TRIES} times, probably for lack of memory; give fewer --jobs, a smaller "
        "--memory-limit, or a machine with more memory. Run again to go on where it stopped"
    )


def _begin(parent: int) -> None:
    """Be a worker: Ctrl-C is the parent's matter, and without the parent there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent, signal.SIGKILL)


def end_with(parent: int, number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent dies, however that dies.

    Raises
    ------
    SystemExit
        If the parent is gone already.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    except (OSError, AttributeError):  # not Linux
        return
    if os.getppid() != parent:
        raise SystemExit(1)


def _attempt(function: Callable[[T], R], task: T) -> R | Exception:
    """Return what ``function`` returns, or an error that belongs to the caller: a worker has nothing to log."""
    try:
        return function(task)
    except (UserError, OSError) as error:
        return error
