"""Parts of one result that several jobs made with ``--shard I/N``: do they belong together, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.files import existing

DETERMINE = ("stage", "config", "inputs", "seed", "versions")
"""Entries of a manifest that say what a result is made from."""


def stage_of(part: Path) -> str:
    """Return the name of the stage that wrote ``part``, empty if it has no manifest.

    Raises
    ------
    UserError
        If there is no such file or folder.
    """
    return str((provenance.read_manifest(existing(part, "part")) or {}).get("stage", ""))


def roles(parts: Sequence[Path]) -> dict[str, Path]:
    """Return parts as inputs of a stage."""
    return {f"part {number}": Path(part) for number, part in enumerate(parts)}


def ordered(
    parts: Sequence[Path], command: str, is_part: Callable[[Path, Mapping[str, Any]], bool]
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return all N parts by their number, and their manifests.

    Parameters
    ----------
    parts
        Files or folders, in any order; one that is named twice counts once.
    command
        That writes them, for messages.
    is_part
        Path and manifest → whether it is a part.

    Raises
    ------
    UserError
        If one is no part, parts are missing or given twice, or they are not of the same run.
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
    """Say in what two manifests differ that must not; empty if in nothing."""
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
