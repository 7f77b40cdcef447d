"""A command on a terminal of its own, and what a person would see there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CTRL_C = b"\x03"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Ended:
    """How a command on a terminal ended.

    Attributes
    ----------
    code
        Its exit code.
    text
        All that it wrote, with every control sequence.
    unchanged
        Whether it left the terminal's settings as they were.
    """

    code: int
    text: str
    unchanged: bool

    @property
    def screen(self) -> list[str]:
        """The lines that stay on the terminal, without colours."""
        return screen(self.text)


def screen(text: str) -> list[str]:
    """Return the lines that stay when a terminal has shown a text. Lines that were written over are gone."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        kept = re.split(r"\r\x1b\[2K", line)[-1]
        lines.append(_CONTROL.sub("", kept))
    return lines


def on_terminal(
    command: Sequence[str],
    *,
    columns: int = 120,
    environment: Mapping[str, str] | None = None,
    respond: Callable[[str], bytes | None] = lambda text: None,
    seconds: float = 120.0,
) -> Ended:
    """Run a command that has a terminal for input, output and errors.

    Parameters
    ----------
    command
        The program and its arguments.
    columns
        Width of the terminal.
    environment
        Environment variables that differ from ours.
    respond
        Gets all that was written so far; what it returns is typed, once.
    seconds
        Time limit.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    before = termios.tcgetattr(slave)
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "JPY_PARENT_PID", "PD_LOG")}
    process = subprocess.Popen(
        command,
        stdin=slave, stdout=slave, stderr=slave,
        env=env | {"TERM": "xterm-256color"} | dict(environment or {}),
        preexec_fn=_own_terminal,
    )  # fmt: skip
    written, typed, deadline = b"", False, time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.05)[0]:
                written += os.read(master, 1 << 16)
                answer = None if typed else respond(written.decode(errors="replace"))
                if answer is not None:
                    typed = True
                    os.write(master, answer)
            elif process.poll() is not None:
                break
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        after = termios.tcgetattr(slave)
        os.close(slave)
        os.close(master)
    return Ended(process.returncode, written.decode(), after == before)


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the command as SIGINT
