"""Run an external method as a sub-process: follow its output and progress, end it, and say why it failed."""

from __future__ import annotations

import json
import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn

from perturbdiff.baselines.external import guard
from perturbdiff.runtime.errors import Killed, UserError
from perturbdiff.runtime.progress import LOG_EVERY_SECONDS, PROGRESS, Track, log_file, track

logger = logging.getLogger(__name__)

_KEPT = 200
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b")
_REFUSED = "refused: "
_PROGRESS = re.compile(r"progress (\d+)/(\d+) ?(.*)")
_POLL = 0.2
_LONGEST_LINE = 1 << 20
_EXIT_REFUSED = 3
_OUT_OF_MEMORY = ("MemoryError", "Cannot allocate memory", "can't allocate memory", "std::bad_alloc")
_LAST_LINES = 15


class OutputLog:
    """Appends lines to the run's log (``PD_LOG``), or writes them to ``OUT.log`` beside the output.

    Parameters
    ----------
    out
        The output.
    name
        Name of the method. It begins the lines in the run's log.

    Attributes
    ----------
    path
        The file.
    shared
        Whether it is the run's log.
    """

    def __init__(self, out: Path, name: str) -> None:
        shared = log_file()
        self.shared = shared is not None
        self.path = shared or out.with_name(f"{out.name}.log")
        self._prefix = f"{name} | " if shared else ""
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = self.path.open("a" if shared else "w", encoding="utf-8", buffering=1)

    def write(self, line: str) -> None:
        """Add a line."""
        self._kept.append(line)
        self._handle.write(f"{self._prefix}{line}\n")

    def say(self, text: str) -> None:
        """Add a line of our own, with the time."""
        self._handle.write(f"{self._prefix}{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def last(self, number: int) -> list[str]:
        """Return the last lines of the method that are not empty."""
        return [line for line in self._kept if line.strip()][-number:]

    def error(self) -> str:
        """Return the line that most likely tells why the method failed: that of its last error, else its last line."""
        lines = [line.strip() for line in self._kept if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        return [*lines, *errors][-1] if lines else "it said nothing"

    def refusal(self) -> str:
        """Return the reason that the method gave for refusing the task."""
        refusals = [line for line in self._kept if line.startswith(_REFUSED)]
        return refusals[-1].removeprefix(_REFUSED) if refusals else [*self.last(1), "it gave no reason"][0]

    def __enter__(self) -> OutputLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()


_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Ended:
    """How a method's process ended.

    Attributes
    ----------
    code
        Its exit code; -n if signal n killed it.
    timed_out
        Whether we ended it because its time was over.
    seconds, cpu_seconds
        Wall time, and CPU time of all its processes.
    peak_memory_mib
        Peak memory of its largest process.
    """

    code: int
    timed_out: bool
    seconds: float
    cpu_seconds: float
    peak_memory_mib: int


class Steps:
    """Shows the lines ``progress N/M text`` as a bar, and as lines of our log, at most one every ten seconds."""

    def __init__(self, name: str, log: OutputLog, work: Track) -> None:
        self._name, self._log, self._work = name, log, work
        self._spoken = time.monotonic()
        work.total = -1

    def take(self, line: str) -> bool:
        """Return whether a line is about progress, and show it."""
        match = _PROGRESS.fullmatch(line)
        if not match:
            return False
        done, total, now, work = int(match[1]), int(match[2]), time.monotonic(), self._work
        if total != work.total or done < work.done:  # another part of the work
            work.restart(total, done)
        text = f"{match[3] or 'step'}: {done}/{total}"
        work.label = f"{self._name}: {match[3] or 'step'}"
        work.advance(done - work.done)
        if now - self._spoken >= LOG_EVERY_SECONDS:
            self._spoken = now
            text += f", {work.time_left()}" if work.time_left() else ""
            logger.info("%s: %s", self._name, text, extra={PROGRESS: True})
            self._log.say(text)
        return True


def run(
    command: Sequence[str],
    folder: Path,
    log: OutputLog,
    *,
    name: str,
    environment: Mapping[str, str],
    seconds: float,
) -> Ended:
    """Run a command to its end. Nothing that it starts outlives it or us.

    Parameters
    ----------
    command
        Absolute path of a program, and its arguments.
    folder
        Where it runs.
    log
        Gets standard output and error, line by line.
    name
        Name of the method, for the log.
    environment
        Its environment variables.
    seconds
        Time limit.
    """
    started = time.monotonic()
    reader, writer = os.pipe()
    # Isolated and without packages, the guard starts in 20 ms. In its own session, it gets Ctrl-C only from us.
    guarded = [sys.executable, "-I", "-S", guard.__file__, str(writer), str(os.getpid()), *command]
    with os.fdopen(reader, "rb") as report:
        try:
            process = subprocess.Popen(
                guarded,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            with track(name, 0, "", details=tuple, lines=False) as work:
                steps = Steps(name, log, work)
                timed_out = _follow(
                    process, started + seconds, lambda line: steps.take(line) or log.write(line)
                )
        finally:
            _end(process)
        facts = _facts(report)
    return Ended(timed_out=timed_out, seconds=round(time.monotonic() - started, 2), **facts)


def _follow(process: subprocess.Popen[bytes], deadline: float, take: Callable[[str], Any]) -> bool:
    """Pass the lines on until the process has ended; return whether its time was over."""
    pipe, lines, timed_out = process.stdout, _Lines(take), False
    if pipe is None:
        raise ValueError("the process has no pipe")
    with selectors.DefaultSelector() as selector, pipe:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            over = process.poll() is not None  # asked before the pipe is read, so that nothing is lost
            if selector.select(0 if over else _POLL):
                piece = os.read(pipe.fileno(), 1 << 16)
                if not piece:
                    break
                lines.add(piece)
            elif over:
                break
            if not timed_out and time.monotonic() > deadline:
                timed_out = True
                process.terminate()
    lines.close()
    return timed_out


class _Lines:
    """Cuts output into lines as a terminal would show them: of a line that was overwritten, the last state."""

    def __init__(self, take: Callable[[str], Any]) -> None:
        self._take, self._waiting = take, b""

    def add(self, piece: bytes) -> None:
        *lines, self._waiting = (self._waiting + piece).split(b"\n")
        for line in lines:
            self._say(line)
        if len(self._waiting) > _LONGEST_LINE:
            self.close()

    def close(self) -> None:
        if self._waiting:
            self._say(self._waiting)
        self._waiting = b""

    def _say(self, line: bytes) -> None:
        self._take(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the guard end the method and wait for it."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(guard.GRACE + 10)
    except subprocess.TimeoutExpired:  # even SIGKILL does not end a process that waits for lost storage
        process.kill()
        process.wait()


def _facts(report: IO[bytes]) -> dict[str, Any]:
    """Return what the guard wrote. A guard that wrote nothing was killed, and the method with it."""
    try:
        written = json.loads(report.read())
    except ValueError:
        written = {}
    code = written.get("code")
    return {
        "code": -int(signal.SIGKILL) if code is None else code,
        "cpu_seconds": written.get("cpu_seconds", 0.0),
        "peak_memory_mib": written.get("peak_memory_mib", 0),
    }


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let signals that end a process end the block first, so that it cleans up. The exit code names the signal."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        before = {number: signal.signal(number, end) for number in _SIGNALS}
    except ValueError:  # only the main thread can handle signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(name: str, ended: Ended, log: OutputLog) -> NoReturn:
    """Raise the error that explains why a method did not end well.

    Raises
    ------
    Killed
        If it probably ran out of memory.
    UserError
        If it refused or failed.
    """
    place = f"its output is in {log.path}"
    if ended.code == _EXIT_REFUSED:
        raise UserError(f"{name} refused: {log.refusal().removeprefix(f'{name}: ')}; {place}")
    last = log.last(_LAST_LINES)
    for line in () if log.shared else last:
        logger.warning("%s | %s", name, line)
    killed = ended.code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if killed or any(words in line for words in _OUT_OF_MEMORY for line in last):
        raise Killed(
            f"{name} was killed, probably out of memory (peak {ended.peak_memory_mib} MiB); give it more; {place}"
        )
    if ended.code < 0:
        hint = "; perhaps this CPU is too old for it" if ended.code == -signal.SIGILL else ""
        raise UserError(
            f"{name} was ended by {signal.Signals(-ended.code).name}{hint}: {log.error()}; {place}"
        )
    raise UserError(f"{name} failed with exit code {ended.code}: {log.error()}; {place}")
