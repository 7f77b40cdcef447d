"""Make an environment from a lock, with uv where it is there, else with pip; say plainly what went wrong."""

from __future__ import annotations

import logging
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perturbdiff.baselines.external.python_finder import Python, clean_environment, find_uv
from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

_SPEAK = 15.0  # seconds between two lines of progress
_PIP_TO_UV = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
}
"""Settings of pip that uv would not look at."""

_TOLD = re.compile(
    r"Downloading .*\((\d{3,}(\.\d+)? ?Mi?B|[\d.]+ ?Gi?B)\)|^\s*(Prepared|Installed|Building) "
)
"""Lines of uv and pip that a person wants to see; the log has all."""

_REASONS = (
    (
        r"no space left|disk quota exceeded",
        "the disk is full: free some space, or name another place in {place}",
    ),
    (
        r"hash mismatch|do not match the hashes",
        "a package that the index offers is not the one that was locked: use another index or mirror",
    ),
    (
        r"certificate verify failed|invalid peer certificate|UnknownIssuer",
        "the index's certificate is not trusted here: name your site's in PIP_CERT or SSL_CERT_FILE",
    ),
    (
        r"\b(401|403) |unauthorized|forbidden",
        "the package index wants a login or refuses: look at the settings of pip or uv",
    ),
    (
        r"dns error|name resolution|connection (refused|reset|error|aborted)|failed to establish|timed? ?out"
        r"|error sending request|network (is )?unreachable|max retries|could not connect|tunnel error"
        r"|network was disabled",
        "the package index cannot be reached from here: set PIP_INDEX_URL or a proxy, or install where there is a "
        "network (an image can be copied: bin/build-image --baseline)",
    ),
    (
        r"gcc.*(not found|no such file|failed)|(command|compiler) .*(gcc|cc|g\+\+).*(failed|not found)"
        r"|no such file or directory: '(gcc|cc|g\+\+)'|unable to find a .*compiler",
        "a package has to be compiled and there is no compiler that can: install gcc and the Python's headers",
    ),
    (
        r"no matching distribution|could not find a version|no solution found|was not found in the",
        "the index lacks a locked package, or has it for other platforms only",
    ),
    (
        r"permission denied|read-only file system",
        "the folder cannot be written: name another place in {place}",
    ),
)


@dataclass(frozen=True)
class Steps:
    """Runs the commands of one installation.

    Attributes
    ----------
    what
        Who is installed, for the messages.
    log
        File that gets all that they say.
    place
        Setting by which a person chooses another place.
    """

    what: str
    log: Path
    place: str

    def run(
        self, doing: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """Run a command and return its lines.

        Parameters
        ----------
        doing
            What it does, for the messages: 'making the environment'.
        command
            Program and arguments.
        environment
            Its environment; `clean_environment` by default.

        Raises
        ------
        UserError
            If it fails, with the reason as far as its words tell.
        """
        lines: list[str] = []
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            process = subprocess.Popen(
                command,
                env=dict(clean_environment() if environment is None else environment),
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            with _ended_with_us(process):
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    lines.append(line.rstrip())
                    logger.log(logging.INFO if _TOLD.search(line) else logging.DEBUG, "%s", lines[-1].strip())
        if process.returncode:
            raise UserError(f"{self.what}: {doing} failed: {self._reason(lines)}; log: {self.log}")
        return lines

    def _reason(self, lines: Sequence[str]) -> str:
        text = "\n".join(lines)
        for pattern, reason in _REASONS:
            if found := re.search(rf"[^\n]*({pattern})[^\n]*", text, re.IGNORECASE):
                return f"{reason.format(place=self.place)} ('{_short(found[0])}')"
        said = [line for line in lines if line.strip() and not line.startswith(("[notice]", "hint"))]
        return _short(said[-1]) if said else "it said nothing"


def make(folder: Path, python: Python, lock: Path, steps: Steps) -> str:
    """Make a virtual environment with exactly the packages of a lock; return what installed them.

    Parameters
    ----------
    folder
        The environment, which must not exist. It cannot be moved later.
    python
        Its Python.
    lock
        Requirements with versions and hashes.
    steps
        Runs the commands.
    """
    uv = find_uv()
    total = len(re.findall(r"^\S+==", lock.read_text(), re.MULTILINE))
    requirements = ("--no-deps", "--require-hashes", "-r", lock)  # a lock is complete: nothing is resolved
    if uv:
        environment = _for_uv()
        steps.run("making the environment", (uv, "venv", "--python", python.path, folder), environment)
        command = (uv, "pip", "install", "--python", folder / "bin" / "python", *requirements)
        version = " ".join(steps.run("asking uv", (uv, "--version"))[-1].split()[:2])
    else:
        environment = clean_environment()
        steps.run("making the environment", (python.path, "-m", "venv", folder), environment)
        pip = (folder / "bin" / "python", "-m", "pip")
        command = (*pip, "--disable-pip-version-check", "install", "--progress-bar", "off", *requirements)
        version = " ".join(steps.run("asking pip", (*pip, "--version"))[-1].split()[:2])
    with _spoken_of(steps.what, folder, total):
        steps.run("installing its packages", command, environment)
    return version


def _for_uv() -> dict[str, str]:
    """Return the environment for uv: settings of pip hold for it where it has none of its own."""
    environment = clean_environment()
    given = {ours: environment[pips] for pips, ours in _PIP_TO_UV.items() if environment.get(pips)}
    return {"UV_HTTP_TIMEOUT": "300"} | given | environment | {"UV_NO_PROGRESS": "1"}


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Wait for a process; end it if we are interrupted."""
    try:
        yield
    except BaseException:
        process.terminate()
        raise
    finally:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def _spoken_of(what: str, folder: Path, total: int) -> Iterator[None]:
    """Say every few seconds how many packages are in place."""
    ended, began = threading.Event(), time.monotonic()

    def speak() -> None:
        while not ended.wait(_SPEAK):
            there = sum(1 for _ in folder.glob("lib/python*/site-packages/*.dist-info"))
            seconds = time.monotonic() - began
            logger.info("%s: %d of at most %d packages in place, %.0f s", what, there, total, seconds)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _short(line: str) -> str:
    words = " ".join(line.split())
    return words if len(words) <= 160 else f"{words[:157]}…"
