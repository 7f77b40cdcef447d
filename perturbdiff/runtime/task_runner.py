"""Run the tasks of a long stage in this process, in processes on this machine, or on a dask cluster.

Tasks are large (seconds to minutes), independent, and leave their results in files. A task may therefore run twice, and
a scheduler has little to plan.
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

from perturbdiff.runtime import slurm_workers
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",  # returns memory that a task frees to the system
}
"""Environment of workers, unless the user set it. Each uses one thread, as there is one worker per CPU."""
_PR_SET_PDEATHSIG = 1
_TRIES = 3
_SECONDS_TO_CONNECT = 30
_TRUST = "%s: whoever reaches this scheduler can run code as you, unless it asks for TLS (docs/scale.md)"

T = TypeVar("T")
R = TypeVar("R")


class WorkerDied(Exception):
    """A task killed its worker repeatedly."""


class _Worker:
    """A worker process and our end of its pipe; ``number`` is its current task."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # A daemon ends together with this process.
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        with _as_workers_start():
            self._process.start()
        theirs.close()  # so that reading ends when the process ends
        self.number: int | None = None

    def give(self, number: int, function: Callable[[T], R], task: T) -> None:
        self.number = number
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the worker is dead, which reading its answer will show
            self.pipe.send((function, task))

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


class LocalWorkers:
    """Worker processes. They start when they are needed, and stay until `close`.

    Parameters
    ----------
    most
        Maximum number of workers.
    tries
        Maximum number of attempts at a task whose worker dies.
    """

    def __init__(self, most: int, tries: int) -> None:
        self._most, self._tries = most, tries
        self._workers: list[_Worker] = []

    def results(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R | Exception]]:
        """Yield the number of each task as it ends, with its result or the exception that it raised.

        Raises
        ------
        WorkerDied
            If the worker died in every attempt at a task.
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
                self._remove(worker)  # its answer is no longer needed

    def _idle(self) -> _Worker | None:
        """Return an idle worker, or a new one if the limit allows it, or None."""
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
        """End all workers."""
        while self._workers:
            self._remove(self._workers[-1])


@contextlib.contextmanager
def _as_workers_start() -> Iterator[None]:
    """Give processes that start in this block the environment of workers, and block Ctrl-C for them."""
    resource_tracker.ensure_running()  # otherwise it starts inside the block and unblocks Ctrl-C
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
    """Receive and run tasks; this is the main function of a worker."""
    end_with(parent, signal.SIGKILL)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the main process is gone
        while True:
            pipe.send(attempt(*_received(pipe.recv_bytes())))


def _received(given: bytes) -> tuple[Callable[[Any], Any], Any]:
    """Return function and task. If they cannot be unpickled, the function raises that error when called."""
    try:
        return pickle.loads(given)
    except Exception as error:  # noqa: BLE001 - the main process raises it
        return _raise, error


def _raise(error: Exception) -> None:
    raise error


def end_with(parent: int, number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent dies, for whatever reason.

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
    """Return the result of ``function``, or the exception that it raises, which the caller then handles."""
    try:
        return function(task)
    except Exception as error:  # noqa: BLE001 - the main process raises it
        where = traceback.format_exc()
        error.add_note(f"in a worker process:\n{where}")
        try:
            return pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - not every exception can be pickled
            return RuntimeError(where)


_DIED = (
    f"a worker process died {_TRIES} times over one task, probably for lack of memory; give fewer --jobs, "
    "a smaller --memory-limit, or a machine with more memory. Run again to go on where it stopped"
)


class TaskRunner:
    """Runs tasks. It is a context manager, because workers must be ended.

    Parameters
    ----------
    jobs
        Number of worker processes on this machine. 1: run everything in this process. None: one per CPU; they are
        started only for several tasks.
    scheduler
        Address of a running dask scheduler, whose workers are used instead. They need this package and the same
        paths. Anyone who reaches the scheduler can run code as its user and as this user. An address ``tls://…``
        uses the certificates in dask's own settings. ``slurm:N``: a scheduler in this process, and N Slurm jobs with
        workers, which end with it.

    Raises
    ------
    UserError
        If the scheduler does not answer, or a worker dies repeatedly.

    Notes
    -----
    Workers are spawned, so a script that uses them must guard its entry with
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
            Function at the top level of a module. Its argument and result are sent between processes.
        tasks
            Arguments of the calls.
        weights
            Units of progress in each task; by default one.
        label, unit
            Label and unit of the progress display.
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
        results = (
            self._locally(function, tasks) if self.scheduler is None else self._remotely(function, tasks)
        )
        with contextlib.closing(results):  # if a task fails, the others are ended or cancelled at once
            for number, result in results:
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

            address: Any = self.scheduler
            if address.startswith(slurm_workers.PREFIX):
                address = self._stack.enter_context(slurm_workers.slurm_workers(address))
            try:
                client = Client(address, timeout=_SECONDS_TO_CONNECT)
            except (OSError, ValueError, TypeError) as error:  # TypeError: tls:// without certificates
                raise UserError(
                    f"--dask-scheduler {self.scheduler}: no scheduler answers there ({error}); give an address "
                    "such as tls://host:8786"
                ) from None
            self._client = self._stack.enter_context(client)
            if address == self.scheduler:
                logger.warning(_TRUST, self.scheduler)
            if not client.scheduler_info()["workers"]:
                logger.warning("%s has no workers yet: waiting for some", self.scheduler)
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._workers = self._client = None
