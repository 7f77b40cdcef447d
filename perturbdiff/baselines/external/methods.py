"""External methods: a tool that the package knows, or a user's own script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbdiff.baselines.external import known_tools, tool_environments
from perturbdiff.config.settings import BaselineConfig
from perturbdiff.method import Method
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError

_START_SECONDS = 120.0
_VERSIONS = (
    "import importlib.metadata as m, json, platform, sys;"
    "print(json.dumps([platform.python_version(), m.version(sys.argv[1])]))"
)


@dataclass(frozen=True)
class ExternalMethod:
    """An external method.

    Attributes
    ----------
    name
        Its name in tables.
    command
        Program and script. The task folder is added as the last argument.
    settings
        Its hyper-parameters, for task.json.
    determinants
        What determines the result beside settings and inputs, for the manifest.
    made_by
        Its description in the predictions file. Each run adds its seed.
    inputs
        Files of the user that belong to the method.
    """

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    determinants: Mapping[str, Any]
    made_by: Method
    inputs: Mapping[str, Path] = field(default_factory=dict)


def tool_method(
    tool: known_tools.Tool, config: BaselineConfig, *, python: Path | None = None, name: str | None = None
) -> ExternalMethod:
    """Return a tool as a method.

    Parameters
    ----------
    tool
        `tools.load`.
    config
        Its settings.
    python
        Interpreter of the user's own environment with the tool; by default that of the installed environment.
    name
        Another name for tables.

    Raises
    ------
    UserError
        If an option is wrong, or the tool is not installed.
    """
    settings = tool.resolve(config.settings, config.options)
    version, lock = tool.version, tool.lock_sha256
    if python is None:
        python = tool_environments.python_of(tool)
        of_python = None
    else:
        python, lock = _program(python), None
        of_python, version = _versions(python, tool)
    return ExternalMethod(
        name=name or tool.name,
        command=(str(python), str(tool.adapter)),
        settings=settings,
        determinants={
            "kind": "tool",
            "tool": tool.name,
            "version": version,
            "lock_sha256": lock,
            "python": of_python,
            "adapter_sha256": files.sha256(tool.adapter),
        },
        made_by=Method(
            baseline=tool.name,
            baseline_kind="tool",
            title=tool.title,
            version=version,
            licence=tool.licence,
            settings=_described(config),
            note=tool.note or None,
        ),
    )


def script_method(
    script: Path, config: BaselineConfig, *, python: Path | None = None, name: str | None = None
) -> ExternalMethod:
    """Return a user's script as a method. Its settings are the options of ``config``.

    Parameters
    ----------
    script
        Python (``.py``), or any program that may be executed.
    python
        Interpreter that runs it, of any language. By default our Python runs ``.py``, and other scripts run directly.
    name
        Its name in tables; 'script' by default.

    Raises
    ------
    UserError
        If it is not there or cannot be run.
    """
    script = files.existing(Path(script), "script").absolute()
    program: tuple[str, ...] = ()
    if python is not None:
        program = (str(_program(python)),)
    elif script.suffix == ".py":
        program = (sys.executable,)
    elif not os.access(script, os.X_OK):
        raise UserError(
            f"{script} is neither Python (.py) nor executable: make it so (chmod +x), or name with --python the "
            "program that runs it"
        )
    return ExternalMethod(
        name=name or "script",
        command=(*program, str(script)),
        settings=dict(config.options),
        determinants={"kind": "script", "interpreter": _interpreter(program)},
        made_by=Method(
            baseline="script",
            baseline_kind="script",
            settings=_changes(config) or "its own",
            script=files.sha256(script)[:12],
        ),
        inputs={"script": script},
    )


def _described(config: BaselineConfig) -> str:
    changes = _changes(config)
    return f"{config.settings} (changed: {changes})" if changes else config.settings


def _changes(config: BaselineConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(config.options.items()))


def _program(name_or_path: Path) -> Path:
    """Return the absolute path of a program given by path or name."""
    path = shutil.which(str(name_or_path))
    if path is None:
        raise UserError(f"--python {name_or_path}: there is no such program")
    return Path(path).absolute()  # not resolved: a link in an environment's bin leads to its packages


def _versions(python: Path, tool: known_tools.Tool) -> tuple[str, str]:
    """Return the versions of an interpreter and of a tool in it."""
    done = _ask([str(python), "-c", _VERSIONS, tool.package])
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"--python {python}: has no {tool.package} ({reason})")
    of_python, version = json.loads(done.stdout)
    return of_python, version


def _interpreter(program: tuple[str, ...]) -> str | None:
    """Return what an interpreter prints for ``--version``, or None if there is none."""
    if not program:
        return None
    done = _ask([*program, "--version"])
    return (f"{done.stdout}\n{done.stderr}".strip().splitlines() or [None])[0]


def _ask(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = tool_environments.clean_environment()
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_START_SECONDS, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--python {command[0]}: cannot be run ({error})") from None
