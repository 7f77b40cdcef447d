"""Make an environment from a lock, with uv where it is there, else with pip; say plainly what went wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

_ASK = """
import importlib.util, json, platform, sys
print(json.dumps({
    "version": platform.python_version(),
    "cpython": platform.python_implementation() == "CPython",
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}))
"""
_PATIENCE = 60  # seconds for an interpreter to start: on a busy network file system it takes many
_ELSEWHERE = (
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "PIP_DRY_RUN"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_PROJECT_ENVIRONMENT", "UV_DRY_RUN"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "__PYVENV_LAUNCHER__"),
)
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
class Python:
    """An interpreter that started when it was asked.

    Attributes
    ----------
    path
        Its executable.
    version
        E.g. '3.10.13'.
    venv
        Whether it can make environments with pip by itself (Debian's cannot without a further package).
    """

    path: Path
    version: str
    venv: bool

    @property
    def minor(self) -> tuple[int, int]:
        """Its minor version, e.g. (3, 10)."""
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)


def clean_environment() -> dict[str, str]:
    """Return the process environment without what belongs to our own Python or names another place to install to.

    The user's settings of pip and uv (index, certificates, proxy) stay.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k not in _ELSEWHERE}
    return kept | {"PYTHONNOUSERSITE": "1"}


def find_uv() -> Path | None:
    """Return the program uv, beside our Python or on PATH, if it is there and starts."""
    for found in (Path(sys.executable).with_name("uv"), shutil.which("uv")):
        if found and _output(found, "--version"):
            return Path(found)
    return None


def find(wanted: Sequence[tuple[int, int]], what: str, *, given: Path | None = None) -> Python:
    """Return a Python of one of the wanted minor versions.

    Tried in this order: the running one; on PATH; pyenv's; conda's environments; those that uv keeps; and where uv
    is there, a standalone one that uv fetches.

    Parameters
    ----------
    wanted
        Minor versions, the preferred one first.
    what
        Who wants it, for the messages.
    given
        The one to take, by the user's choice.

    Raises
    ------
    UserError
        If there is none, which says what to install.
    """
    uv = find_uv()
    if given is not None:
        return _given(given, wanted, what, needs_venv=uv is None)
    lame = None
    for minor in wanted:
        for path in _candidates(minor, uv):
            python = ask(path)
            if python is None or python.minor != minor:
                continue
            if python.venv or uv:
                return python
            lame = python
    if uv and (python := _fetched(uv, wanted[0])):
        return python
    if lame:
        raise UserError(
            f"{what}: {lame.path} cannot make environments; install its venv module "
            f"(apt-get install python{lame.minor[0]}.{lame.minor[1]}-venv) or uv"
        )
    words = " or ".join(f"{a}.{b}" for a, b in wanted)
    first = f"{wanted[0][0]}.{wanted[0][1]}"
    raise UserError(
        f"{what} needs Python {words}, and none was found (running, PATH, pyenv, conda, uv); install one with "
        f"'uv python install {first}', 'pyenv install {first}' or 'conda create -n py{first} python={first}', "
        "or name one with --python PATH"
    )


def ask(path: Path) -> Python | None:
    """Return what an executable says of itself, None if it is no CPython that starts.

    A version manager's stub stands on PATH without a Python behind it, so names are not believed.
    """
    said = _output(path, "-I", "-c", _ASK)
    try:
        facts = json.loads(said)
        return Python(Path(path), facts["version"], facts["venv"]) if facts["cpython"] else None
    except (ValueError, KeyError, TypeError):
        return None


def _given(path: Path, wanted: Sequence[tuple[int, int]], what: str, *, needs_venv: bool) -> Python:
    found = shutil.which(path)  # a name on PATH will do
    python = ask(Path(found).absolute()) if found else None
    if python is None:
        raise UserError(f"--python {path}: no Python that starts")
    if python.minor not in wanted:
        words = " or ".join(f"{a}.{b}" for a, b in wanted)
        raise UserError(f"--python {path}: this is Python {python.version}, {what} needs {words}")
    if needs_venv and not python.venv:
        raise UserError(f"--python {path}: it cannot make environments; install its venv module or uv")
    return python


def _candidates(minor: tuple[int, int], uv: Path | None) -> Iterator[Path]:
    """Yield executables that may be of a minor version, the nearest first."""
    name = f"python{minor[0]}.{minor[1]}"
    if sys.version_info[:2] == minor:
        yield Path(sys.executable)
    for folder in filter(None, os.environ.get("PATH", "").split(os.pathsep)):
        yield from _executable(Path(folder) / name)
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for home in sorted((root / "versions").glob(f"{minor[0]}.{minor[1]}*"), reverse=True):
        yield from _executable(home / "bin" / name)
    for home in _conda_environments():
        yield from _executable(home / "bin" / name)
    if uv and (found := _kept_by(uv, minor)):
        yield found


def _executable(path: Path) -> Iterator[Path]:
    if os.access(path, os.X_OK) and path.is_file():
        yield path


def _conda_environments() -> list[Path]:
    """Return the folders of conda's environments: those it has noted, the active one, and the base's."""
    homes = []
    with contextlib.suppress(OSError):
        homes += (Path.home() / ".conda" / "environments.txt").read_text().split("\n")
    homes.append(os.environ.get("CONDA_PREFIX", ""))
    if conda := os.environ.get("CONDA_EXE"):
        base = Path(conda).parent.parent
        homes += [str(base), *map(str, sorted((base / "envs").glob("*")))]
    return [Path(home.strip()) for home in dict.fromkeys(homes) if home.strip()]


def _kept_by(uv: Path, minor: tuple[int, int]) -> Path | None:
    """Return the Python of a minor version that uv has fetched before."""
    options = ("--python-preference", "only-managed", "--no-python-downloads")
    said = _output(uv, "python", "find", *options, f"{minor[0]}.{minor[1]}").strip()
    return Path(said) if said else None


def _fetched(uv: Path, minor: tuple[int, int]) -> Python | None:
    """Have uv fetch a standalone Python, which touches none that is installed; None if it cannot."""
    version = f"{minor[0]}.{minor[1]}"
    logger.info("no Python %s here: uv fetches one", version)
    done = subprocess.run(
        [uv, "python", "install", version],
        env=clean_environment() | {"UV_PYTHON_INSTALL_BIN": "0"},  # nothing new on the user's PATH
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        logger.warning("uv cannot fetch Python %s: %s", version, " ".join(done.stderr.split())[-300:])
        return None
    found = _kept_by(uv, minor)
    return ask(found) if found else None


def _output(*command: str | Path) -> str:
    """Return what a program prints, nothing if it fails."""
    try:
        done = subprocess.run(
            command,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


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
