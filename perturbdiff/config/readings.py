"""Readings of the method by name (`variant`), and sizes of the network by name (`size`).

``variants/NAME.yaml`` has two parts. ``switches`` are the mathematics of model, loss, training and sampling: a
configuration bears a variant's name if it agrees with all of them (`agreeing`). ``settings`` are what the variant
chooses where nothing else is said. ``sizes/NAME.yaml`` has the numbers of a network. In a recipe both are
shorthands for their values: they come first in their layer, the layer's own values after them, and later layers
after those.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from perturbdiff.config import value_sources
from perturbdiff.runtime.errors import UserError, nearest

OWN = "own"


def variants() -> list[str]:
    """Return the names of the variants."""
    return _names("variants")


def sizes() -> list[str]:
    """Return the names of the sizes."""
    return _names("sizes")


def expand(layer: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a recipe layer with ``variant`` and ``size`` replaced by what they stand for.

    Raises
    ------
    UserError
        Naming ``origin``, if there is no such variant or size.
    """
    own = dict(layer)
    values: dict[str, Any] = {}
    if (name := _plain(own.pop("variant", None))) not in (None, OWN):
        parts = _read("variants", _known("variant", name, variants(), origin))
        values = value_sources.merge(parts["switches"], parts["settings"])
    if (name := _plain(own.pop("size", None))) is not None:
        values = value_sources.merge(values, _read("sizes", _known("size", name, sizes(), origin)))
    return value_sources.merge(values, own)


@cache
def switches(name: str) -> dict[str, Any]:
    """Return a variant's switches, dotted key → value."""
    plain, _ = value_sources.untag(_read("variants", name)["switches"])
    return {f"{section}.{key}": value for section, keys in plain.items() for key, value in keys.items()}


def agreeing(config: object) -> str:
    """Return the name of the variant whose switches a configuration has, or "own"."""
    for name in variants():
        if all(_value(config, key) == value for key, value in switches(name).items()):
            return name
    return OWN


def _value(config: object, dotted: str) -> object:
    value = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def _plain(value: object) -> object:
    return value.value if isinstance(value, value_sources.Tagged) else value


def _known(what: str, name: object, names: list[str], origin: str) -> str:
    if name not in names:
        hint = nearest(str(name), names)
        raise UserError(f"{origin}: unknown {what} '{name}'{hint} {what}s: {', '.join(names)}")
    return str(name)


@cache
def _names(folder: str) -> list[str]:
    files = (resources.files("perturbdiff.config") / folder).iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


@cache
def _read(folder: str, name: str) -> dict[str, Any]:
    file = resources.files("perturbdiff.config") / folder / f"{name}.yaml"
    return value_sources.read(file.read_text(), f"{folder}/{name}.yaml")
