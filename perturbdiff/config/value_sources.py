"""YAML whose values say where they come from: ``!paper 1000``, ``!released 512``, ``!ours 32``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, listing

SOURCES = ("paper", "released", "ours")


class Tagged:
    """A value with the source its tag names."""

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
    """Return a YAML text's sections; values with a tag are `Tagged`.

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
    """Return ``base`` with what ``top`` says put in, section by section."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def untag(tree: Any, prefix: str = "") -> tuple[Any, dict[str, str]]:
    """Return a tree's plain values and, by dotted key, their sources; 'given' where there is no tag."""
    if isinstance(tree, Tagged):
        return tree.value, {prefix: tree.source}
    if not isinstance(tree, dict):
        return tree, {prefix: "given"}
    values, sources = {}, {}
    for key, value in tree.items():
        values[key], found = untag(value, f"{prefix}.{key}".lstrip("."))
        sources.update(found)
    return values, sources
