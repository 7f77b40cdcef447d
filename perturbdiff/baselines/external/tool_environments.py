"""The environments of external tools: one folder for each, made once from its lock and found by the lock's digest.

They lie in ``$PD_BASELINES``, else ``$XDG_DATA_HOME/perturbdiff/baselines``, else
``~/.local/share/perturbdiff/baselines``, as ``NAME-VERSION-<first 8 digits of the lock's SHA-256>/`` with the virtual
environment ``env/``, ``install.log`` and, written last, ``installed.json``. A folder without ``installed.json`` is
unfinished, and the next installation begins anew.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbdiff import __version__
from perturbdiff.baselines.external.installer import Installation, clean_environment
from perturbdiff.baselines.external.known_tools import Tool
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.locks import Lock, locked

__all__ = [
    "PLACE",
    "Installed",
    "clean_environment",
    "folder_of",
    "install",
    "installed",
    "python_of",
    "remove",
]

logger = logging.getLogger(__name__)

PLACE = "PD_BASELINES"
"""Environment variable with the folder of all environments."""

_RECORD, _ENVIRONMENT, _LOG = "installed.json", "env", "install.log"
_GB = 10**9


@dataclass(frozen=True)
class Installed:
    """A complete environment.

    Attributes
    ----------
    folder
        Where it lies.
    record
        ``installed.json``: tool, package, version, lock_sha256, python, installer, seconds, size_gb, installed_at.
    """

    folder: Path
    record: dict[str, Any]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / _ENVIRONMENT / "bin" / "python"


def root() -> Path:
    """Return where the environments lie."""
    if folder := os.environ.get(PLACE):
        return Path(folder).absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "perturbdiff" / "baselines"


def folder_of(tool: Tool) -> Path:
    """Return the folder of a tool's environment, whether it is there or not."""
    return root() / f"{tool.name}-{tool.version}-{tool.lock_sha256[:8]}"


def installed(tool: Tool) -> Installed | None:
    """Return the environment that was made from the tool's present lock, or None if there is none."""
    folder = folder_of(tool)
    try:
        record = json.loads((folder / _RECORD).read_text())
    except (OSError, ValueError):
        return None
    return Installed(folder, record) if record.get("lock_sha256") == tool.lock_sha256 else None


def python_of(tool: Tool) -> Path:
    """Return the interpreter of a tool's environment.

    Raises
    ------
    UserError
        If the tool is not installed, or the Python that its environment was made from is gone.
    """
    environment = installed(tool)
    if environment is None:
        raise UserError(
            f"{tool.name} is not installed in {root()}: run 'perturbdiff baseline install {tool.name}'"
        )
    if not environment.python.exists():
        raise UserError(
            f"{environment.folder}: the Python of this environment is gone: "
            f"run 'perturbdiff baseline install {tool.name} --force'"
        )
    return environment.python


def install(tool: Tool, python: Path | None = None, *, force: bool = False) -> Installed:
    """Make a tool's environment, unless it is there already.

    Parameters
    ----------
    tool
        The tool.
    python
        Interpreter to use. By default, one that fits is looked for.
    force
        Make it again if it is there.

    Raises
    ------
    UserError
        If the tool does not run on this platform, there is no Python, no room on disk or no network, or another
        installation of it is running.
    """
    if not force and (environment := installed(tool)) and environment.python.exists():
        logger.info("%s %s is installed in %s", tool.name, tool.version, environment.folder)
        return environment
    _check_platform(tool)
    folder = folder_of(tool)
    with locked(folder, f"another installation of {tool.name}") as lock:
        if lock.waited and (environment := installed(tool)):
            return environment
        (folder / _RECORD).unlink(missing_ok=True)
        files.remove(folder / _ENVIRONMENT)
        _check_room(tool, folder)
        return _install(tool, python, folder, lock)


def remove(tool: Tool) -> list[Path]:
    """Remove a tool's environments, including those of earlier locks, and return their folders."""
    folders = [path for path in sorted(root().glob(f"{tool.name}-*-????????")) if path.is_dir()]
    for folder in folders:
        with locked(folder, f"an installation of {tool.name}"):
            (folder / _RECORD).unlink(missing_ok=True)
            files.remove(folder)
    return folders


def _install(tool: Tool, python: Path | None, folder: Path, lock: Lock) -> Installed:
    """Install into a locked folder. After a failure only the log is left in it."""
    logger.info("installing %s %s into %s (%.1f GB)", tool.name, tool.version, folder, tool.size_gb)
    began = time.monotonic()
    installation = Installation(tool.name, tool.pythons, folder / _LOG)
    installation.log.unlink(missing_ok=True)
    environment = folder / _ENVIRONMENT
    try:
        with files.explain_os_errors(folder):
            made = installation.make(environment, tool.lock, python)
            _probe(tool, environment / "bin" / "python", installation)
            record = {
                "tool": tool.name,
                "package": tool.package,
                "version": tool.version,
                "lock_sha256": tool.lock_sha256,
                "python": made["version_info"],
                "installer": f"uv {made['uv']}",
                "seconds": round(time.monotonic() - began, 1),
                "size_gb": round(_size(environment) / _GB, 2),
                "installed_at": time.strftime("%Y-%m-%d %H:%M:%S"),
                "perturbdiff": __version__,
            }
            if other := lock.taken_by():
                raise UserError(f"{folder}: was taken over by {other}; run again")
            files.write_text(folder / _RECORD, json.dumps(record, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(environment, ignore_errors=True)
        raise
    return Installed(folder, record)


def _probe(tool: Tool, python: Path, installation: Installation) -> None:
    """Import the tool and our adapter module in its environment. This also compiles what is imported."""
    environment = clean_environment() | {"PYTHONPATH": str(tool.adapter.parent)}
    code = f"{tool.probe}\nimport perturbdiff_adapter"
    installation.run(f"trying it ('{tool.probe.splitlines()[-1]}')", (python, "-c", code), environment)


def _check_platform(tool: Tool) -> None:
    here = f"{sys.platform}-{platform.machine()}"
    if here not in tool.platforms:
        raise UserError(
            f"{tool.name} {tool.version} is locked for {', '.join(tool.platforms)}; this machine is {here}: "
            "run it on such a machine, or make your own environment and run its adapter there (docs/adapters.md)"
        )


def _check_room(tool: Tool, folder: Path) -> None:
    free = shutil.disk_usage(folder).free / _GB
    if free < tool.size_gb:
        raise UserError(
            f"{tool.name} takes {tool.size_gb:.1f} GB and {folder.parent} has {free:.1f} GB free; "
            f"free some space, or name another place in {PLACE}"
        )


def _size(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
