"""Check that parts made by several jobs with ``--shard I/N`` belong together, and put them in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.files import existing

DETERMINE = ("stage", "config", "inputs", "seed", "versions")
"""Entries of a manifest that determine the result."""


def stage_of(part: Path) -> str:
    """Return the name of the stage that wrote ``part``, or an empty text if it has no manifest.

    Raises
    ------
    UserError
        If there is no such file or folder.
    """
    return str((provenance.read_manifest(existing(part, "part")) or {}).get("stage", ""))


def roles(parts: Sequence[Path]) -> dict[str, Path]:
    """Return the parts as a stage's inputs by role."""
    return {f"part {number}": Path(part) for number, part in enumerate(parts)}


def ordered(
    parts: Sequence[Path], command: str, is_part: Callable[[Path, Mapping[str, Any]], bool]
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return all N parts in order of their number, and their manifests.

    Parameters
    ----------
    parts
        Files or folders in any order. A path that is given twice counts once.
    command
        Name of the command that writes the parts, for messages.
    is_part
        Function of path and manifest that says whether this is a part.

    Raises
    ------
    UserError
        If a path is not a part, or if parts are missing, given twice or from different runs.
    """
    if not parts:
        raise UserError(f"no part to merge: give what 'perturbdiff {command} … --shard I/N' wrote")
    records = {part: _record(part, command, is_part) for part in dict.fromkeys(parts)}
    first = parts[0]
    count = int(records[first]["config"]["shard"][1])
    by_number: dict[int, Path] = {}
    for part, record in records.items():
        if different := _difference(records[first], record):
            raise UserError(f"{part}: is not of the same run as {first}: {different}")
        number = int(record["config"]["shard"][0])
        if number in by_number:
            raise UserError(
                f"{part}: is part {number}/{count}, as {by_number[number]} is; give each part once"
            )
        by_number[number] = part
    if missing := sorted(set(range(count)) - set(by_number)):
        raise UserError(
            f"{first}: is one of {count} parts, but {listing(f'{i}/{count}' for i in missing)} are not given; "
            "run them and give all"
        )
    found = [by_number[i] for i in range(count)]
    return found, [records[part] for part in found]


def _record(part: Path, command: str, is_part: Callable[[Path, Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Return a part's manifest."""
    manifest = provenance.read_manifest(existing(part, "part"))
    if manifest is None or "shard" not in manifest.get("config", {}) or not is_part(part, manifest):
        lies = "" if manifest or part.is_dir() else " (its manifest.json must lie beside it)"
        raise UserError(f"{part}: is not a part that 'perturbdiff {command} … --shard I/N' wrote{lies}")
    provenance.verify(part)
    return manifest


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe a forbidden difference between two manifests; empty if there is none."""
    for key in DETERMINE:
        a, b = one.get(key), other.get(key)
        if key == "config":
            counts = [record["config"]["shard"][1] for record in (one, other)]
            if counts[0] != counts[1]:
                return f"one of {counts[1]} parts, not of {counts[0]}"
            a, b = ({**record["config"], "shard": None} for record in (one, other))
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
            return f"its {key} differ in {listing(names)}"
        return f"its {key} is {b}, not {a}"
    return ""
