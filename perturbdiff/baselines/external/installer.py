"""Make an environment from a lock with uv, and say in plain words what went wrong."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

_REDIRECTING = (
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "PIP_DRY_RUN"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_PROJECT_ENVIRONMENT", "UV_DRY_RUN"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "__PYVENV_LAUNCHER__"),
)
"""Variables that make pip or uv install into another place."""
_PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip that uv would not look at."""
_WORTH_SHOWING = re.compile(
    r"Downloading .*\((\d{3,}(\.\d+)? ?Mi?B|[\d.]+ ?Gi?B)\)|^\s*(Using|Prepared|Installed|Building) "
)
"""Lines of uv that a person wants to see. The log has all lines."""
_REASONS = (
    (
        r"no interpreter found|failed to inspect python|failed to download .*python-build-standalone",
        "it needs Python {python}, and none was found (running, PATH, pyenv, conda, uv); install one with "
        "'uv python install', 'pyenv install' or 'conda create', or name one with --python PATH",
    ),
    (
        r"no space left|disk quota exceeded",
        "the disk is full: free some space, or name another place in PD_BASELINES",
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
        r"dns error|connection (refused|reset|error|aborted)|timed? ?out|error sending request"
        r"|network (is )?unreachable|could not connect|tunnel error|network was disabled",
        "the package index cannot be reached from here: set PIP_INDEX_URL or a proxy, or install where there is a "
        "network (an image can be copied: bin/build-image --baseline)",
    ),
    (
        r"gcc.*(not found|no such file|failed)|(command|compiler) .*(gcc|cc|g\+\+).*(failed|not found)"
        r"|no such file or directory: '(gcc|cc|g\+\+)'|unable to find a .*compiler",
        "a package has to be compiled and there is no compiler that can: install gcc and the Python's headers",
    ),
    (
        r"no solution found|was not found in the",
        "the index lacks a locked package, or has it for other platforms only",
    ),
    (
        r"permission denied|read-only file system",
        "the folder cannot be written: name another place in PD_BASELINES",
    ),
)


def clean_environment() -> dict[str, str]:
    """Return the process environment without what belongs to our own Python or names another place to install to.

    The user's settings of pip and uv (index, certificates, proxy) stay.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k not in _REDIRECTING}
    return kept | {"PYTHONNOUSERSITE": "1"}


@dataclass(frozen=True)
class Installation:
    """Makes the environment of one tool.

    Attributes
    ----------
    tool
        Name of the tool, for the messages.
    pythons
        Minor versions of Python that the tool runs on.
    log
        File that gets the output of all commands.
    """

    tool: str
    pythons: Sequence[tuple[int, int]]
    log: Path

    def make(self, folder: Path, lock: Path, python: Path | None = None) -> dict[str, str]:
        """Make a virtual environment with exactly the packages of a lock, whose hashes are checked.

        Parameters
        ----------
        folder
            The environment, which must not exist. It cannot be moved later.
        lock
            Requirements with versions and hashes.
        python
            Interpreter to take. By default uv looks for one: the running one, on PATH, pyenv's, conda's and its
            own. If there is none, uv downloads one.

        Returns
        -------
        dict
            ``pyvenv.cfg``: ``version_info`` is the version of Python, ``uv`` that of uv.

        Raises
        ------
        UserError
            If there is no Python that fits, or the packages cannot be installed.
        """
        uv, environment = _uv(), _uv_environment()
        first, last = self.pythons[0], self.pythons[-1]
        wanted = f"cpython>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
        if python is not None:
            wanted = str(Path(shutil.which(python) or python).absolute())
        options = ("--python-preference", "system", "--python", wanted)
        self.run("making the environment", (uv, "venv", *options, folder), environment)
        lines = (folder / "pyvenv.cfg").read_text().splitlines()
        made = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
        major, minor, *_ = map(int, made["version_info"].split(".")[:2])
        if (major, minor) not in self.pythons:
            raise UserError(
                f"--python {python}: this is Python {made['version_info']}, {self.tool} needs {self._needed()}"
            )
        command = (uv, "pip", "sync", "--require-hashes", "--python", folder / "bin" / "python", lock)
        self.run("installing its packages", command, environment)
        return made

    def run(
        self, doing: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> None:
        """Run a command. Its output goes to the log.

        Parameters
        ----------
        doing
            What the command does, for the messages: 'making the environment'.
        command
            Program and arguments.
        environment
            Its environment; `clean_environment` by default.

        Raises
        ------
        UserError
            If it fails, with the reason as far as its output tells.
        """
        lines: list[str] = []
        with (
            self.log.open("a") as log,
            subprocess.Popen(
                command,
                env=dict(clean_environment() if environment is None else environment),
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process,
        ):
            print("$", *command, file=log, flush=True)
            try:
                for line in process.stdout or ():
                    log.write(line)
                    lines.append(line.rstrip())
                    level = logging.INFO if _WORTH_SHOWING.search(line) else logging.DEBUG
                    logger.log(level, "%s", line.strip())
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise UserError(f"{self.tool}: {doing} failed: {self._reason(lines)}; log: {self.log}")

    def _reason(self, lines: Sequence[str]) -> str:
        text = "\n".join(lines)
        for pattern, reason in _REASONS:
            if match := re.search(rf"[^\n]*({pattern})[^\n]*", text, re.IGNORECASE):
                return f"{reason.format(python=self._needed())} ('{_short(match[0])}')"
        telling = [line for line in lines if line.strip() and not line.startswith("hint")]
        return _short(telling[-1]) if telling else "it printed nothing"

    def _needed(self) -> str:
        return " or ".join(f"{major}.{minor}" for major, minor in self.pythons)


def _uv() -> str:
    """Return the program uv: the one that was installed with this package, else the one on PATH."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    program = shutil.which("uv", path=path)
    if program is None:
        raise UserError("the program uv is missing; install it with 'pip install uv'")
    return program


def _uv_environment() -> dict[str, str]:
    """Return the environment for uv: with the settings of pip, and with more folders to find a Python in."""
    environment = clean_environment()
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    pip = dict(re.findall(r"^global\.([a-z-]+)='(.*)'$", listed, re.MULTILINE))
    pip |= {
        name: os.environ.get(f"PIP_{name.upper().replace('-', '_')}", pip.get(name)) for name in _PIP_TO_UV
    }
    settings = {_PIP_TO_UV[name]: pip[name] for name in _PIP_TO_UV if pip[name]}
    path = os.pathsep.join(
        (f"{sys.base_prefix}/bin", environment.get("PATH", ""), *map(str, _folders_off_path()))
    )
    return {"UV_HTTP_TIMEOUT": "300"} | settings | environment | {"UV_NO_PROGRESS": "1", "PATH": path}


def _folders_off_path() -> list[Path]:
    """Return the ``bin`` folders of the Pythons of pyenv and conda, which need not be on PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    noted = Path.home() / ".conda" / "environments.txt"
    homes = [Path(home) for home in noted.read_text().split("\n") if home] if noted.is_file() else []
    if conda := os.environ.get("CONDA_EXE"):
        base = Path(conda).parents[1]
        homes += [base, *(base / "envs").glob("*")]
    return [home / "bin" for home in (*sorted((pyenv / "versions").glob("*"), reverse=True), *homes)]


def _short(line: str) -> str:
    words = " ".join(line.split())
    return words if len(words) <= 160 else f"{words[:157]}…"
