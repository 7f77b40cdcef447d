"""Named readings of the method (`variant`) and named sizes of the network (`size`).

YAML tags say where a value comes from: ``!paper 1000``, ``!released 512``, ``!ours 32``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, listing, nearest

SOURCES = ("paper", "released", "ours")
OWN = "own"


class Tagged:
    """A value and the source that its tag names."""

    def __init__(self, value: Any, source: str) -> None:
        self.value, self.source = value, source


class _Loader(untrusted.Loader):
    pass


def _construct_tagged(loader: _Loader, suffix: str, node: yaml.Node) -> Tagged:
    def refuse(why: str) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, why, node.start_mark)

    if suffix not in SOURCES:
        raise refuse(f"unknown tag '!{suffix}', sources are {listing(SOURCES)}")
    if isinstance(node, yaml.SequenceNode):
        return Tagged(loader.construct_sequence(node, deep=True), suffix)
    if isinstance(node, yaml.ScalarNode):
        plain = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, node.value, (True, False)), node.value)
        return Tagged(loader.construct_object(plain, deep=True), suffix)
    raise refuse(f"tag '!{suffix}' belongs on a value, not on a section")


_Loader.add_multi_constructor("!", _construct_tagged)


def read(text: str, origin: str) -> dict[str, Any]:
    """Return the sections of a YAML text. Values with a tag become `Tagged`.

    Raises
    ------
    UserError
        Naming ``origin``, if the text is not YAML, not a tree of sections, or has an unknown tag.
    """
    tree = untrusted.parse(text, "YAML", origin, loader=_Loader)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: expected sections, found {type(tree).__name__}")
    return tree


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``top`` put in, section by section."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def untag(tree: Any, prefix: str = "") -> tuple[Any, dict[str, str]]:
    """Return a tree's plain values, and their sources by dotted key. The source of a value without a tag is 'given'."""
    if isinstance(tree, Tagged):
        return tree.value, {prefix: tree.source}
    if not isinstance(tree, dict):
        return tree, {prefix: "given"}
    values, sources = {}, {}
    for key, value in tree.items():
        values[key], of_section = untag(value, f"{prefix}.{key}".lstrip("."))
        sources.update(of_section)
    return values, sources


def variants() -> list[str]:
    """Return the names of the variants."""
    return _names("variants")


def sizes() -> list[str]:
    """Return the names of the sizes."""
    return _names("sizes")


def expand(layer: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a layer of a recipe with the values that its ``variant`` and ``size`` stand for.

    Raises
    ------
    UserError
        Naming ``origin``, if there is no such variant or size.
    """
    explicit = dict(layer)
    values: dict[str, Any] = {}
    if (name := _plain(explicit.pop("variant", None))) not in (None, OWN):
        variant = _read("variants", _known("variant", name, variants(), origin))
        values = merge(variant["switches"], variant["settings"])
    if (name := _plain(explicit.pop("size", None))) is not None:
        values = merge(values, _read("sizes", _known("size", name, sizes(), origin)))
    return merge(values, explicit)


@cache
def switches(name: str) -> dict[str, Any]:
    """Return a variant's switches: the value of each dotted key."""
    plain, _ = untag(_read("variants", name)["switches"])
    return {f"{section}.{key}": value for section, keys in plain.items() for key, value in keys.items()}


def agreeing(config: object) -> str:
    """Return the name of the variant with the same switches as a configuration, or "own" if there is none."""
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
    return value.value if isinstance(value, Tagged) else value


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
    return read(file.read_text(), f"{folder}/{name}.yaml")
