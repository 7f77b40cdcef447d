"""The external tools that the package knows. Each has a description (NAME.yaml) and locked requirements (NAME.lock)."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, listing, nearest

Value = bool | int | float | str
"""Type of a setting."""

FOLDER = Path(__file__).parent / "tools"
"""Folder of the descriptions. The folder of the adapters lies beside it."""

_FLOAT_WITHOUT_DOT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class Setting(BaseModel):
    """A hyper-parameter of a tool.

    Attributes
    ----------
    recommended, quick
        Value that the tool's authors recommend, and value for minutes on a CPU. Both have one type.
    help
        What it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    recommended: Value
    quick: Value
    help: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _one_type(self) -> Setting:
        for value in (self.recommended, self.quick):
            if isinstance(value, str) and _FLOAT_WITHOUT_DOT.fullmatch(value):
                raise ValueError(f"YAML reads {value} as text; write a dot and a sign (1.0e-3, 1.0e+5)")
        kinds = {type(self.recommended), type(self.quick)}
        if len(kinds) > 1 and kinds != {int, float}:
            raise ValueError(f"{self.recommended!r} and {self.quick!r} are of two types")
        return self

    @property
    def kind(self) -> type[Value]:
        """The type of its values."""
        return float if float in (type(self.recommended), type(self.quick)) else type(self.recommended)

    def read(self, given: Value) -> Value | None:
        """Return ``given`` as a value of this setting's type, or None if it is of another type.

        A whole number is accepted for a fraction, 1e4 for a whole number, and text that reads as a number for one.
        """
        if self.kind in (bool, str):
            return given if type(given) is self.kind else None
        if isinstance(given, bool):
            return None
        try:
            number = float(given)
        except ValueError:
            return None
        if self.kind is float:
            return number if math.isfinite(number) else None
        return int(number) if number.is_integer() else None


_WORDS: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _from_list(given: Any) -> Any:
    """Read the short form ``[recommended, quick, help]``."""
    if not isinstance(given, list) or len(given) != 3:
        raise ValueError("must be [recommended, quick, what it is]")
    return dict(zip(("recommended", "quick", "help"), given, strict=True))


class Tool(BaseModel):
    """An external tool: how it is installed, what can be set, and what a reader must know about it.

    Attributes
    ----------
    name
        As in ``perturbdiff baseline NAME``.
    title
        Its own name.
    package, version
        The distribution, and its version in the lock.
    python
        A minor version ('3.10') or a range of them ('>=3.11,<3.13').
    platforms
        ``sys.platform``-``machine`` that the lock is for, e.g. 'linux-x86_64'.
    licence, url, citation
        Of the tool.
    probe
        Python statement that works in a complete environment. It can import the adapters.
    size_gb
        Room on disk, GB of 10⁹ bytes.
    determinism
        Whether equal seeds give equal predictions.
    note
        One sentence for the report's table, or nothing.
    settings
        Its hyper-parameters by name.
    lock, lock_sha256
        Exact requirements with hashes, and the file's digest.
    adapter
        Script that runs it (docs/adapters.md).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    package: str
    version: str
    python: Annotated[str, Field(pattern=r"^(\d+\.\d+|>=\d+\.\d+,<\d+\.\d+)$")]
    platforms: tuple[str, ...]
    licence: str
    url: str
    citation: str
    probe: str
    size_gb: float
    determinism: str
    note: str = ""
    settings: dict[str, Annotated[Setting, BeforeValidator(_from_list)]]
    lock: Path
    lock_sha256: str
    adapter: Path

    @property
    def pythons(self) -> tuple[tuple[int, int], ...]:
        """The minor versions of Python that it runs on. The first is the one it was tried on."""
        first, *last = (tuple(map(int, version)) for version in re.findall(r"(\d+)\.(\d+)", self.python))
        return tuple((first[0], minor) for minor in range(first[1], last[0][1] if last else first[1] + 1))

    def resolve(
        self, settings: Literal["recommended", "quick"], options: Mapping[str, Value]
    ) -> dict[str, Value]:
        """Return all hyper-parameters: one set of values, with the given changes.

        Raises
        ------
        UserError
            If an option is unknown or of the wrong type.
        """
        chosen = {name: getattr(setting, settings) for name, setting in self.settings.items()}
        for name, given in options.items():
            if name not in self.settings:
                hint = nearest(name, self.settings) or ";"
                raise UserError(
                    f"{self.name} has no setting '{name}'{hint} settings: {listing(self.settings, 30)}"
                )
            chosen[name] = self.settings[name].read(given)
            if chosen[name] is None:
                kind = _WORDS[self.settings[name].kind]
                raise UserError(f"baseline.options.{name} of {self.name} must be {kind}, not {given!r}")
        return {name: self.settings[name].kind(value) for name, value in chosen.items()}


def names() -> tuple[str, ...]:
    """Return the names of the tools, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load(name: str) -> Tool:
    """Return a tool.

    Raises
    ------
    UserError
        If there is none of that name, or its description is wrong (which says what and where).
    """
    if name not in names():
        hint = nearest(name, names()) or ";"
        raise UserError(f"no tool '{name}'{hint} tools: {listing(names(), 20)}")
    return _load(FOLDER, name)


@functools.lru_cache
def _load(folder: Path, name: str) -> Tool:
    path, lock = folder / f"{name}.yaml", folder / f"{name}.lock"
    try:
        facts = untrusted.read(path, "YAML") or {}
        content = lock.read_text()
        return Tool(
            **facts,
            name=name,
            version=_version(content, str(facts.get("package"))),
            lock=lock,
            lock_sha256=hashlib.sha256(content.encode()).hexdigest(),
            adapter=folder.parent / "adapters" / f"run_{name}.py",
        )
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UserError(f"{path}: {'; '.join(wrong)}") from error
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error


def _version(lock: str, package: str) -> str:
    """Return the version of a package in a lock, whose names are normalised."""
    normalised = re.sub(r"[-_.]+", "-", package).lower()
    match = re.search(rf"^{re.escape(normalised)}==([^\s;\\]+)", lock, re.MULTILINE)
    if not match:
        raise ValueError(f"the lock has no {package}")
    return match[1]
