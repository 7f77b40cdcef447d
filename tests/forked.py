"""Commands in processes of their own that start at once: forked from one that has imported everything."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer.main

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # threads do not outlive a fork

HEAVY = (
    "perturbdiff.__main__",
    "perturbdiff.cli.main",
    "perturbdiff.preprocessing.preprocessing_stage",
    "perturbdiff.splits.splits",
    "perturbdiff.statistics.statistics_stage",
    "perturbdiff.store.store_check",
    "perturbdiff.splits.store_export",
    "perturbdiff.preprocessing.shared_genes",
    "perturbdiff.evaluation.evaluation_stage",
    "perturbdiff.evaluation.score_tables",
    "perturbdiff.reporting.page.page",
    "perturbdiff.reporting.figures.store_figures",
    "perturbdiff.sampling",
    "perturbdiff.sampling.shards",
    "perturbdiff.training.training_stages",
    "anndata",
    "h5py",
    "perturbdiff.training.fit",
    "pyarrow.parquet",
    "scanpy",
    "sklearn.decomposition",
    "zarr",
)
"""What commands import late."""

MEMORY = 6 << 30
"""Bytes that a command may ask for beyond what is loaded: what asks for more shall fail, not the machine."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes
    ----------
    code
        Exit code; None if a signal ended it.
    signal
        The signal's number, 0 without one.
    hung
        Whether it was ended because it took longer than it may.
    left
        Whether processes that it started outlived it.
    seconds
        Wall time.
    """

    code: int | None
    signal: int
    hung: bool
    left: bool
    out: str
    err: str
    seconds: float


def import_all() -> None:
    """Import what commands need, so that a forked process need not."""
    for name in HEAVY:
        importlib.import_module(name)
    build_once()
    gc.collect()
    gc.freeze()  # a forked process that looked for garbage here would copy every page


def build_once() -> None:
    """Let Typer build the command line once, and not anew for each command: that takes a twentieth of a second."""
    from perturbdiff.cli.main import app

    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)


def command(
    arguments: Sequence[object],
    *,
    folder: Path,
    limit: float = 120.0,
    environment: Mapping[str, str] | None = None,
    send: tuple[int, float] | None = None,
) -> Ended:
    """Run ``perturbdiff …`` in a forked process.

    Parameters
    ----------
    arguments
        The command line without the program's name.
    folder
        Made anew; ``folder/tmp`` becomes TMPDIR, the texts go to ``folder/out`` and ``folder/err``.
    limit
        Seconds after which it counts as hung.
    environment
        Variables to set besides.
    send
        A signal's number, and after how many seconds the process gets it.
    """

    def run() -> int:
        from perturbdiff.runtime.errors import EXIT_INTERRUPTED, INTERRUPTED

        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        except KeyboardInterrupt:  # before the command began
            print(INTERRUPTED, file=sys.stderr)
            return EXIT_INTERRUPTED
        try:
            return program(arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    return forked(run, folder=folder, limit=limit, environment=environment, send=send)


def forked(
    work: Callable[[], int],
    *,
    folder: Path,
    limit: float = 120.0,
    environment: Mapping[str, str] | None = None,
    send: tuple[int, float] | None = None,
) -> Ended:
    """Run a function that returns an exit code in a forked process; see `command`."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    for stream in ("out", "err"):
        (folder / stream).touch()  # a process may be killed before it does anything
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the command itself can answer
    child = os.fork()
    if child == 0:
        _be_child(work, folder, environment or {})
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
    status, hung = _wait(child, began, limit, send)
    seconds = time.monotonic() - began
    left = _kill_group(child)
    return Ended(
        os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        hung,
        left,
        (folder / "out").read_text(errors="replace"),
        (folder / "err").read_text(errors="replace"),
        seconds,
    )


def _be_child(work: Callable[[], int], folder: Path, environment: Mapping[str, str]) -> None:
    def whole() -> int:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update({"TMPDIR": str(folder / "tmp"), **environment})
        tempfile.tempdir = None
        loaded = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (loaded + MEMORY, loaded + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return work()

    made = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    end_with(
        whole, [os.open(os.devnull, os.O_RDONLY), *(os.open(folder / name, made) for name in ("out", "err"))]
    )


def end_with(work: Callable[[], int], streams: Sequence[int]) -> NoReturn:
    """Do the work of a forked process, with these streams as the three of a program, and end it with the code."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            if stream > 2:
                os.close(stream)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        code = work()
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - it is judged by what it says
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def program(arguments: Sequence[object]) -> int:
    """Run ``perturbdiff …`` in this process; return its exit code."""
    from perturbdiff.__main__ import main

    sys.argv = ["perturbdiff", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _wait(child: int, began: float, limit: float, send: tuple[int, float] | None) -> tuple[int, bool]:
    pause = 0.002
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, False
        spent = time.monotonic() - began
        if send is not None and spent >= send[1]:
            os.kill(child, send[0])
            send = None
        if spent > limit:
            os.killpg(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1], True
        time.sleep(min(pause, max(0.0, send[1] - spent)) if send else pause)
        pause = min(pause * 1.2, 0.05)


def _kill_group(group: int) -> bool:
    """End what is left of a process group; return whether anything lived on for ten seconds."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return True
