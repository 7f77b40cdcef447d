"""Start the training processes on this node and end with their exit code (``python -m``).

It differs from torchrun in four ways. The exit code is that of the processes (75: stopped early; 2: the user can fix
it; 128 + n: killed by signal n), where torchrun always ends with 1. Signals reach the processes and leave them time for
a checkpoint; SIGUSR1 ends torchrun alone and leaves its processes behind. The processes of one node meet in a file that
only their user can open, and not at a port. On several nodes, a failure on one node ends the others. Run it on each
node, inside the container.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from perturbdiff.runtime.errors import EXIT_FAILURE, EXIT_STOPPED_EARLY, EXIT_USER_ERROR
from perturbdiff.runtime.files import remove
from perturbdiff.training.distributed.nodes import GRACE, Nodes, Place, meet
from perturbdiff.training.distributed.processes import LAUNCHER, MEETING, SIGNALS, ignored

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

_PAUSE = 0.1
_SETTLE = 2.0  # seconds; a process that lost its peer may end before that peer is seen to have ended
_LINES = 20


def threads(env: Mapping[str, str], processes: int) -> int:
    """Return the number of threads per process, so that together they use the task's CPUs."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = env.get("OMP_NUM_THREADS", "")
    return max((int(setting) if setting.isdigit() else allowed) // processes, 1)


def environment(place: Place, local: int, run: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: that of torchrun, with the threads divided among processes."""
    of_torchrun = {
        "RANK": place.node * place.processes + local,
        "WORLD_SIZE": place.nodes * place.processes,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": place.processes,
        "GROUP_RANK": place.node,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": place.port,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        LAUNCHER: os.getpid(),
    }
    variables = {**env, **dict.fromkeys(THREADS, str(threads(env, place.processes)))}
    if place.nodes == 1 and sys.platform == "linux":
        for backend in ("GLOO", "NCCL"):  # independent of host name resolution, and closed to other machines
            variables.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides advice about DDP that does not apply
    return variables | {name: str(value) for name, value in of_torchrun.items()}


class Ranks:
    """The processes of this node. Rank 0 writes to the console, the other ranks write to files.

    Parameters
    ----------
    place, run
        The place of the processes in the run, and the run's name.
    command
        The command that each process runs.
    """

    def __init__(self, place: Place, run: str, command: Sequence[str]) -> None:
        self._temporary: Path | None = None
        self._handle: int | None = None
        self._first = place.node * place.processes
        meeting = {} if place.nodes > 1 else {MEETING: self._meeting()}
        self._logs: dict[int, tuple[Path, int]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for local in range(place.processes):
            env = environment(place, local, run, os.environ) | meeting
            rank = self._first + local
            output: IO[bytes] | None = None
            if rank:
                output = self._log(rank, env.pop("PD_LOG", ""))
            # A session of its own, so that Ctrl-C reaches it only once, through the launcher.
            self._processes[rank] = subprocess.Popen(
                command, env=env, stdout=output, stderr=output, start_new_session=True
            )
            if output is not None:
                output.close()

    def _meeting(self) -> str:
        """Return the path of a file through which the processes find each other."""
        if hasattr(os, "memfd_create"):  # nameless: nothing is left behind, and only this user can open it
            self._handle = os.memfd_create("perturbdiff-meeting")
            return f"/proc/{os.getpid()}/fd/{self._handle}"
        return str(self._folder() / "meeting")

    def _folder(self) -> Path:
        self._temporary = self._temporary or Path(tempfile.mkdtemp(prefix="perturbdiff-ranks-"))
        return self._temporary

    def _log(self, rank: int, log: str) -> IO[bytes]:
        """Open the log file of a process, next to the run's log or else in a temporary folder."""
        if log:
            path = Path(log).with_suffix(f".rank{rank}.log")
            with suppress(OSError):
                handle = path.open("ab")
                self._logs[rank] = path, handle.tell()
                return handle
        path = self._folder() / f"rank{rank}.log"
        self._logs[rank] = path, 0
        return path.open("wb")

    def ended(self) -> dict[int, int]:
        """Return the exit codes of the processes that have ended; -n means killed by signal n."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def all_ended(self) -> bool:
        """Return whether all processes have ended."""
        return len(self.ended()) == len(self._processes)

    def signal(self, number: int) -> None:
        """Send a signal to the running processes."""
        for process in self._processes.values():
            process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait until all processes have ended, for at most this many seconds."""
        end = time.monotonic() + seconds
        while not self.all_ended() and time.monotonic() < end:
            time.sleep(_PAUSE)

    def end(self, *, ask: bool) -> None:
        """End the running processes: SIGTERM first if ``ask``, then SIGKILL after `GRACE`."""
        if ask:
            self.signal(signal.SIGTERM)
        self.wait(GRACE)
        self.signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def last_lines(self, rank: int) -> tuple[Path, list[str]]:
        """Return the output file of a process and its last lines."""
        path, start = self._logs[rank]
        with path.open("rb") as handle:
            handle.seek(start)
            return path, handle.read().decode(errors="replace").splitlines()[-_LINES:]

    def close(self) -> None:
        """Remove the temporary files."""
        if self._handle is not None:
            os.close(self._handle)
        if self._temporary is not None:
            remove(self._temporary)


def exit_code(codes: Mapping[int, int]) -> tuple[int, int | None]:
    """Return the run's exit code and the process that caused it.

    A killed process takes precedence, because the others fail after losing it. Code 1 comes last.
    """

    def weight(item: tuple[int, int]) -> tuple[int, int]:
        rank, code = item
        known = {EXIT_USER_ERROR: 1, EXIT_STOPPED_EARLY: 2, EXIT_FAILURE: 4}
        return (0 if code < 0 else known.get(code, 3)), rank

    bad = {rank: code for rank, code in codes.items() if code}
    if not bad:
        return 0, None
    rank, code = min(bad.items(), key=weight)
    return (128 - code if code < 0 else code), rank


def run(place: Place, command: Sequence[str]) -> int:
    """Start the processes of this node, wait for those of all nodes and return the run's exit code."""
    with _collected_signals() as signals:
        store, place = meet(place)
        nodes = Nodes(store, place)
        ranks = Ranks(place, nodes.name(), command)
        while True:
            while signals:
                ranks.signal(signals.pop(0))
            codes = ranks.ended()
            if any(codes.values()) or ranks.all_ended() or nodes.other_failed():
                break
            time.sleep(_PAUSE)
        if any(codes.values()):
            nodes.failed()
        ranks.wait(_SETTLE)
        codes = ranks.ended()
        if not ranks.all_ended():
            stopped = set(codes.values()) == {EXIT_STOPPED_EARLY}  # the others are about to stop as well
            ranks.end(ask=not stopped)
            if stopped:
                codes = ranks.ended()
        code, culprit = exit_code(nodes.gather(codes))
    if culprit in codes:
        _report(ranks, culprit, codes[culprit])
    if code in (0, EXIT_STOPPED_EARLY):
        ranks.close()
    return code


@contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """Collect signals while the block runs, so that they can be passed on to the processes."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    handlers = {number: signal.signal(number, receive) for number in SIGNALS if not ignored(number)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _report(ranks: Ranks, rank: int, code: int) -> None:
    """Print why the run failed, unless the first process has done so."""
    where = f"process {rank} on {os.environ.get('SLURMD_NODENAME') or platform.node()}"
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; too little memory, perhaps" if -code == signal.SIGKILL else ""
        print(f"error: {where} was killed ({name}){hint}; the others were stopped", file=sys.stderr)
    elif rank and code != EXIT_STOPPED_EARLY:
        path, lines = ranks.last_lines(rank)
        errors = [line for line in lines if line.startswith("error:")]
        if code == EXIT_USER_ERROR and errors:
            print(f"{errors[-1]} ({where})", file=sys.stderr)
            return
        print(
            "\n".join([f"error: {where} failed with code {code}; {path} ends with:", *lines]), file=sys.stderr
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="perturbdiff.training.distributed.launcher", description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0, help="number of this node")
    parser.add_argument("--first", default="127.0.0.1:0", metavar="HOST:PORT", help="of the first node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each process runs")
    options = parser.parse_args(arguments)
    address, _, port = options.first.rpartition(":")
    place = Place(options.processes, options.nodes, options.node, address, int(port))
    return run(place, options.command)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without clean-up, so that the launchers of all nodes end together
