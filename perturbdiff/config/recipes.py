"""Recipes are complete configurations, read from presets or YAML files and changed by ``--set a.b=c``.

In a preset, YAML tags say where each value comes from: ``!paper 1000``, ``!released 512``, ``!ours 32``. The command
`config show` prints them. A user's own file needs no tags.

A recipe is made of layers: the bases of a file, the file itself, and the overrides. A layer may name a `variant` and a
`size`, which stand for several values (`perturbdiff.config.readings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from perturbdiff.config import readings
from perturbdiff.config.readings import expand
from perturbdiff.config.settings import Config
from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, nearest
from perturbdiff.runtime.files import is_there

SOURCES = readings.SOURCES
DEFAULT = "recommended"

_SHOWN = 80  # characters of a value in a message


def presets() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("perturbdiff.config") / "presets"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Return the configuration of a preset or a YAML file, with ``key.path=value`` overrides applied.

    None stands for the preset ``recommended``. A file or preset that begins with ``base: NAME`` holds only what
    differs from NAME. Without a base, it starts from the defaults of `perturbdiff.config.settings`. In each file and
    among the overrides, ``variant`` and ``size`` apply before the other values (`perturbdiff.config.readings`).

    Raises
    ------
    UserError
        If the preset or file is unknown, a key does not exist or a value has the wrong type.
    """
    return load_with_sources(source, overrides)[0]


def changed(config: Config, overrides: Iterable[str]) -> Config:
    """Return a configuration with ``key.path=value`` overrides applied.

    Raises
    ------
    UserError
        If a key does not exist or a value has the wrong type.
    """
    changes: dict[str, Any] = {}
    for text in overrides:
        _set(changes, text)
    tree, _ = readings.untag(readings.merge(config.model_dump(mode="json"), expand(changes, "--set")))
    return validated(tree, f"configuration {config.name}")


def validated(tree: Mapping[str, Any], origin: str) -> Config:
    """Return the configuration of a tree of plain values.

    Raises
    ------
    UserError
        Naming ``origin``, every unknown key and every forbidden value.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{origin}: {_explain(error)}") from None
    except RecursionError:
        raise UserError(f"{origin}: its values are nested too deep") from None


def load_with_sources(
    source: str | Path | None = None, overrides: Iterable[str] = ()
) -> tuple[Config, dict[str, str]]:
    """Return the configuration as `load` does, and the source of each dotted key that was set."""
    changes: dict[str, Any] = {}
    for text in overrides:
        _set(changes, text)
    tree = readings.merge(_read(str(source or DEFAULT), seen=()), expand(changes, "--set"))
    values, sources = readings.untag(tree)
    return validated(values, f"configuration {source or DEFAULT}"), sources


def describe(source: str | Path | None, overrides: Iterable[str] = ()) -> str:
    """Return the complete configuration as YAML. A comment gives the source of each value."""
    config, sources = load_with_sources(source, overrides)
    lines = []
    for dotted in keys():
        value: Any = config
        *sections, last = dotted.split(".")
        for name in dotted.split("."):
            value = getattr(value, name)
        if sections and (head := f"{'.'.join(sections)}:") not in lines:
            lines.append(head)
        text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
        text = text.removesuffix("...\n").strip()
        origin = sources.get(dotted, "default")
        lines.append(f"{'  ' if sections else ''}{last}: {text}" + (f"  # {origin}" if sections else ""))
    return "\n".join(lines)


def _read(source: str, seen: tuple[str, ...]) -> dict[str, Any]:
    path = Path(source)
    if source in presets():
        text = (resources.files("perturbdiff.config") / "presets" / f"{source}.yaml").read_text()
    elif is_there(path) and path.is_file():
        text = untrusted.read_text(path, "YAML", "configuration")
    else:
        raise UserError(
            f"no preset or file '{source}'{nearest(path.stem, presets()) or ';'} presets: {', '.join(presets())}"
        )
    tree = readings.read(text, f"configuration {source}")
    base = tree.pop("base", None)
    tree = expand(tree, f"configuration {source}")
    if base is None:
        return tree
    if base in seen:
        raise UserError(f"configuration {source}: its bases form a circle")
    return readings.merge(_read(str(base), (*seen, source)), tree)


def _set(tree: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text!r}: write it as section.key=value, e.g. train.max_steps=500")
    *sections, last = key.strip().split(".")
    if len(sections) > untrusted.DEEPEST:
        raise UserError(f"--set {key[:_SHOWN]}…: no key has so many parts")
    node = tree
    for name in sections:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {text!r}: '{name}' is a value, not a section")
    node[last] = untrusted.parse(raw, "YAML", f"--set {key.strip()}: the value")


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the tree."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{dotted}.")
        else:
            yield dotted


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if part not in ("float", "int"))
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key '{key}'{nearest(key, keys())}")
        else:
            lines.append(
                f"'{key}': {problem['msg'][0].lower()}{problem['msg'][1:]}, got {_short(problem['input'])}"
            )
    return "; ".join(dict.fromkeys(lines))


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number of too many digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
