"""What every merge of parts shares that several jobs made with ``--shard I/N``: checks, order and manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.files import existing

_DETERMINE = ("stage", "config", "inputs", "seed", "versions")
"""Entries of a manifest that determine the result."""

IsPart = Callable[[Path, Mapping[str, Any]], bool]
"""Function of path and manifest that says whether this is a part."""


@dataclass(frozen=True)
class Merge:
    """A merge that is under way.

    Attributes
    ----------
    parts
        All N parts in order of their number.
    records
        Their manifests.
    config
        The configuration of the single run that the result stands for.
    stage
        The stage that writes the result; the body must not write if it says ``skip``.
    """

    parts: list[Path]
    records: list[dict[str, Any]]
    config: dict[str, Any]
    stage: provenance.Stage


def stage_of(part: Path) -> str:
    """Return the name of the stage that wrote ``part``, or an empty text if it has no manifest.

    Raises
    ------
    UserError
        If there is no such file or folder.
    """
    return str((provenance.read_manifest(existing(part, "part")) or {}).get("stage", ""))


@contextlib.contextmanager
def merging(
    parts: Sequence[Path],
    out: Path,
    command: str,
    is_part: IsPart,
    *,
    unsharded: Mapping[str, Any],
    folder: bool,
    force: bool,
) -> Iterator[Merge]:
    """Check that parts belong together, and run the stage that joins them: its manifest is that of a single run.

    Parameters
    ----------
    parts
        Files or folders in any order. A path that is given twice counts once.
    out
        File or (``folder``) folder to write.
    command
        Name of the command that writes the parts, for messages.
    is_part
        Whether a path is a part.
    unsharded
        What the configuration of a single run says of shards.
    force
        Run even if an equal output is there.

    Raises
    ------
    UserError
        If a path is not a part, or if parts are missing, given twice or from different runs.
    """
    ordered, records = _ordered([Path(part) for part in parts], command, is_part)
    base = {key: records[0][key] for key in _DETERMINE}
    base["config"] = {k: v for k, v in base["config"].items() if k != "shard"} | dict(unsharded)
    roles = {f"part {number}": part for number, part in enumerate(ordered)}
    with provenance.stage(
        str(base["stage"]), Path(out), config={}, inputs=roles, folder=folder, force=force, base=base
    ) as stage:
        yield Merge(ordered, records, base["config"], stage)
        if not stage.skip:
            stage.notes["parts"] = len(ordered)


def _ordered(parts: Sequence[Path], command: str, is_part: IsPart) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return all N parts in order of their number, and their manifests."""
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
    ordered = [by_number[i] for i in range(count)]
    return ordered, [records[part] for part in ordered]


def _record(part: Path, command: str, is_part: IsPart) -> dict[str, Any]:
    """Return a part's manifest."""
    manifest = provenance.read_manifest(existing(part, "part"))
    if manifest is None or "shard" not in manifest.get("config", {}) or not is_part(part, manifest):
        lies = "" if manifest or part.is_dir() else " (its manifest.json must lie beside it)"
        raise UserError(f"{part}: is not a part that 'perturbdiff {command} … --shard I/N' wrote{lies}")
    provenance.verify(part)
    return manifest


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe a forbidden difference between two manifests; empty if there is none."""
    for key in _DETERMINE:
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
