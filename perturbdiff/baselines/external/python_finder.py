"""Find a Python of a wanted version: tools of others run on one that may not be ours."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
