"""Who does the coarse tasks of a long stage: this process, processes on this machine, or a dask cluster.

Tasks are large (seconds to minutes), independent, and leave their results in files, so that a task may be done
twice and a scheduler has little to plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing as mp
import os
import pickle
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",  # memory that a task frees goes back to the system
}
"""Of workers, unless the user set it: there is one for each CPU."""
_PR_SET_PDEATHSIG = 1
_TRIES = 3
_SECONDS_TO_CONNECT = 30
_TRUST = "%s: whoever reaches this scheduler can run code as you, unless it asks for TLS (docs/scale.md)"

T = TypeVar("T")
R = TypeVar("R")


class WorkerDied(Exception):
    """A task ended its worker again and again."""


class _Worker:
    """A process and this end of its pipe; ``number`` is that of the task that it is at."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # A daemon ends with this process.
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        with _as_workers_start():
            self._process.start()
        theirs.close()  # so that reading ends when the process does
        self.number: int | None = None

    def give(self, number: int, function: Callable[[T], R], task: T) -> None:
        self.number = number
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it is dead, as its answer will show
            self.pipe.send((function, task))

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


class LocalWorkers:
    """Processes that do tasks; they start when they are needed, and stay until `close`.

    Parameters
    ----------
    most
        How many at once.
    tries
        How often a task is begun whose worker dies.
    """

    def __init__(self, most: int, tries: int) -> None:
        self._most, self._tries = most, tries
        self._workers: list[_Worker] = []

    def results(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R | Exception]]:
        """Yield the number and the result of each task as it ends, or the exception that it raised.

        Raises
        ------
        WorkerDied
            If a task's worker died each time.
        """
        waiting, deaths = deque(range(len(tasks))), Counter[int]()
        try:
            while True:
                while waiting and (worker := self._idle()):
                    number = waiting.popleft()
                    worker.give(number, function, tasks[number])
                busy = {worker.pipe: worker for worker in self._workers if worker.number is not None}
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    worker = busy[pipe]  # type: ignore[index]
                    number, worker.number = worker.number, None
                    assert number is not None
                    try:
                        result = worker.pipe.recv()
                    except (EOFError, OSError):
                        self._remove(worker)
                        deaths[number] += 1
                        if deaths[number] == self._tries:
                            raise WorkerDied from None
                        waiting.appendleft(number)
                    else:
                        yield number, result
        finally:
            for worker in [w for w in self._workers if w.number is not None]:
                self._remove(worker)  # nobody waits for its answer any more

    def _idle(self) -> _Worker | None:
        """Return a worker without a task, a new one if there may be more; else None."""
        for worker in self._workers:
            if worker.number is None:
                return worker
        if len(self._workers) == self._most:
            return None
        self._workers.append(_Worker())
        return self._workers[-1]

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def close(self) -> None:
        """End all."""
        while self._workers:
            self._remove(self._workers[-1])


@contextlib.contextmanager
def _as_workers_start() -> Iterator[None]:
    """Give a process that starts in this block the environment of workers, and keep Ctrl-C from it."""
    resource_tracker.ensure_running()  # else it starts inside the block and lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    added = [name for name in _ENVIRONMENT if name not in os.environ]
    os.environ.update({name: _ENVIRONMENT[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, parent: int) -> None:
    """Be a worker."""
    end_with(parent, signal.SIGKILL)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # nobody is there any more
        while True:
            pipe.send(attempt(*_received(pipe.recv_bytes())))


def _received(given: bytes) -> tuple[Callable[[Any], Any], Any]:
    """Return function and task; one that cannot be read raises its error when it is called."""
    try:
        return pickle.loads(given)
    except Exception as error:  # noqa: BLE001 - the main process raises it
        return _raise, error


def _raise(error: Exception) -> None:
    raise error


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


def attempt(function: Callable[[T], R], task: T) -> R | Exception:
    """Return what ``function`` returns, or what it raises: that belongs to the caller, a worker has nothing to log."""
    try:
        return function(task)
    except Exception as error:  # noqa: BLE001 - the main process raises it
        where = traceback.format_exc()
        error.add_note(f"in a worker process:\n{where}")
        try:
            return pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - not every exception can travel
            return RuntimeError(where)


_DIED = (
    f"a worker process died {_TRIES} times over one task, probably for lack of memory; give fewer --jobs, "
    "a smaller --memory-limit, or a machine with more memory. Run again to go on where it stopped"
)


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
