"""The processes of a training run (one, or several started by our `launcher`, torchrun or srun), and when they stop."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from perturbdiff.runtime.errors import EXIT_FAILURE, StoppedEarly, UserError
from perturbdiff.runtime.large_arrays import Node
from perturbdiff.runtime.task_runner import end_with

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)

LAUNCHER = "PD_LAUNCHER"
"""Environment variable with the id of the launcher process. This process must end when the launcher ends."""

MEETING = "PD_MEETING"
"""Environment variable with the file through which one node's processes find each other. Only we can open it."""

TOKEN = "PD_TOKEN"
"""Environment variable with a secret that the processes of several nodes share. It is part of every store name."""

START_SECONDS = 1800.0
"""Seconds to wait until the processes of all nodes have started."""

_PAUSE = 0.05
_COUNT = itertools.count()  # numbers the agreements, and is the same in all processes


@dataclass(frozen=True)
class Processes:
    """One process of a run.

    Attributes
    ----------
    rank, world_size
        Index of this process, and the number of processes.
    per_node
        Number of processes on each node.
    launcher
        The program that started them.
    local_rank
        Index of this process on its node.
    run
        Text that distinguishes this run from others on the node.
    """

    rank: int = 0
    world_size: int = 1
    per_node: int = 1
    launcher: Literal["none", "torchrun", "srun"] = "none"
    local_rank: int = field(default=0, compare=False)
    run: str = field(default="", compare=False)
    _met: list[Any] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Processes:
        """Read the variables of torchrun or srun. Without srun, an allocation of several tasks is one process."""
        if "TORCHELASTIC_RUN_ID" in env and int(env.get("WORLD_SIZE", "1")) > 1:
            names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")
            run = " ".join(env.get(k, "") for k in names)
            place = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
            return cls(*place, "torchrun", int(env.get("LOCAL_RANK", "0")), run)
        tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1:
            nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
            names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID")
            run = " ".join(env.get(k, "") for k in names)
            place = int(env["SLURM_PROCID"]), tasks, tasks // nodes
            return cls(*place, "srun", int(env.get("SLURM_LOCALID", "0")), run)
        return cls()

    def node(self) -> Node | None:
        """Return the group that shares memory on this node, or None for one process or an unsupported system."""
        if self.per_node < 2 or not Node.supported():
            return None
        return Node(self.run, self.local_rank, self.per_node)

    def meet(self, device: Literal["cpu", "cuda"]) -> None:
        """Wait until all processes have started, check that they fit together, and create their group.

        Raises
        ------
        UserError
            If a process has no GPU of its own, uses another device than the others, or does not start.
        """
        if self.world_size == 1:
            return
        _end_with_launcher()
        _check_gpus(device, self.per_node)
        store = self._store()
        ours = {"device": device, "host": platform.node()}
        name = f"hello {next(_COUNT)} of"
        store.set(f"{name} {self.rank}", json.dumps(ours))
        for other in range(self.world_size):
            theirs = json.loads(self._get(f"{name} {other}"))
            if theirs["device"] != device:
                raise UserError(
                    f"process {self.rank} on {ours['host']} computes on {device}, process {other} on "
                    f"{theirs['host']} on {theirs['device']}; leave that node out or give --device cpu"
                )
        self._join(device)

    def _join(self, device: Literal["cpu", "cuda"]) -> None:
        """Create PyTorch's group of all processes. By itself PyTorch would open a port to anyone."""
        import torch.distributed as torch_group
        from torch.distributed.distributed_c10d import PrefixStore

        torch_group.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=PrefixStore("group", self._store()),
            rank=self.rank,
            world_size=self.world_size,
        )
        if device == "cuda":
            atexit.register(_leave_group)

    def first(self, name: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` in the first process and return its result in all. The others wait for any length of time.

        Parameters
        ----------
        name
            Name of this piece of work.
        work
            Its result must be serialisable as JSON.

        Raises
        ------
        UserError, StoppedEarly
            In all processes, if ``work`` raises it in the first.
        SystemExit
            In the other processes, if the first ends in another way.
        """
        if self.world_size == 1:
            return work()
        store, name = self._store(), f"{name} {next(_COUNT)}"
        if self.rank:
            answer = json.loads(self._get(name))
            if answer["error"] is None:
                return answer["result"]
            for kind in (UserError, StoppedEarly):
                if answer["error"] == kind.__name__:
                    raise kind(answer["result"])
            logger.info("the first process stopped; see its messages")
            raise SystemExit(EXIT_FAILURE)
        error, result = None, None
        try:
            result = work()
        except BaseException as raised:
            error, result = type(raised).__name__, str(raised)
            raise
        finally:
            store.set(name, json.dumps({"error": error, "result": result}))
        return result

    def _store(self) -> Store:
        """Return the store through which processes communicate before there is a process group."""
        from torch.distributed.distributed_c10d import PrefixStore

        if not self._met:
            self._met.append(PrefixStore(meeting_name("perturbdiff"), self._meeting()))
        return self._met[0]

    def _meeting(self) -> Store:
        from torch.distributed import DistError, FileStore  # pyright: ignore[reportPrivateImportUsage]
        from torch.distributed.rendezvous import rendezvous

        if MEETING in os.environ:
            return FileStore(os.environ[MEETING], -1)
        address, port = first_node()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        wait = timedelta(seconds=START_SECONDS)
        try:
            store, *_ = next(rendezvous("env://", self.rank, self.world_size, timeout=wait))
        except DistError as error:
            raise UserError(
                f"process {self.rank} on {platform.node()} does not reach the first one at "
                f"{address}, port {port}: {str(error).splitlines()[0]}"
            ) from None
        return store

    def _get(self, key: str) -> bytes:
        store = self._store()
        try:
            while not store.check([key]):  # the launcher handles processes that died
                time.sleep(_PAUSE)
            return store.get(key)
        except RuntimeError:
            logger.info("the launcher or the first process ended")
            raise SystemExit(EXIT_FAILURE) from None


def first_node(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the address of the first node and the port at which the processes of several nodes meet.

    torchrun gives both. Under srun the address is the first of the step's nodes, and the port follows from the job's
    number, so that two jobs on a node seldom meet.
    """
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]  # node[01-03,07],other → node01
    port = 15000 + int(env.get("SLURM_JOB_ID", "0")[-4:])
    return env.get("MASTER_ADDR", first), int(env.get("MASTER_PORT", port))


def meeting_name(what: str) -> str:
    """Return the store name for ``what``, which includes the secret so that outsiders cannot guess it."""
    return f"{what} {os.environ.get(TOKEN, '')}"


def _leave_group() -> None:
    import torch.distributed as torch_group

    if torch_group.is_initialized():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch_group.destroy_process_group()


def lost(error: BaseException) -> bool:
    """Return whether an error only means that another process is gone."""
    from torch.distributed import DistError

    texts = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "gloo/transport",
        "NCCL",
    )
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def _check_gpus(device: str, per_node: int) -> None:
    import torch

    if device == "cuda" and torch.cuda.device_count() < per_node:
        raise UserError(
            f"{per_node} processes on {platform.node()}, but PyTorch sees {torch.cuda.device_count()} GPU(s) there; "
            "ask for one GPU for each process, for the node as a whole (--gres=gpu:N), not for each task"
        )


def _end_with_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, because an orphan would keep the GPU and the folder."""
    if launcher := os.environ.get(LAUNCHER):
        end_with(int(launcher), signal.SIGTERM)


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
