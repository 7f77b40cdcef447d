"""`merge`: the parts of one evaluation in, the folder of a single run out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perturbdiff import provenance
from perturbdiff.config import EvaluateConfig
from perturbdiff.errors import UserError, listing
from perturbdiff.evaluation import tables
from perturbdiff.evaluation.scopes import POOLED, Scope
from perturbdiff.evaluation.tables import DIFFERENTIAL, PART, DifferentialWriter, Tables
from perturbdiff.files import existing

_STAGES = ("evaluate", "ceiling")
_DETERMINE = ("stage", "config", "inputs", "seed", "versions")


def merge(parts: Sequence[Path], out: Path, *, force: bool = False) -> Path:
    """Join the parts that `evaluate` or `ceiling` wrote with ``shard=(I, N)``.

    The tables and the manifest are those of a single run, to the last byte.

    Parameters
    ----------
    parts
        All N folders, in any order.
    out
        Folder to write.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a folder is no part, parts are missing or given twice, or they are not of the same evaluation.
    """
    ordered = _ordered([Path(part) for part in parts])
    first = _record(ordered[0])
    base = {key: first[key] for key in _DETERMINE}
    base["config"] = {k: v for k, v in first["config"].items() if k != "shard"}
    with provenance.stage(
        str(base["stage"]), Path(out), config={}, inputs={}, folder=True, force=force, base=base
    ) as stage:
        if not stage.skip:
            found = Tables.joined([Tables.load(part) for part in ordered])
            names = {key: str(first["results"][key]) for key in ("kind", "method", "dataset")}
            fields = {k: v for k, v in base["config"].items() if k in EvaluateConfig.model_fields}
            config = EvaluateConfig.model_validate(fields)
            summary = tables.write_folder(stage.path, found, config, names, int(base["seed"]))
            _join_differential(ordered, stage.path)
            stage.results.update(summary)
            stage.notes["parts"] = len(ordered)
    return Path(out)


def _record(part: Path) -> dict[str, Any]:
    """Return a part's manifest."""
    manifest = provenance.read_manifest(part) if existing(part, "part").is_dir() else None
    if manifest is None or manifest.get("stage") not in _STAGES or not (part / PART).is_file():
        raise UserError(
            f"{part}: is not a part of an evaluation; 'perturbdiff evaluate … --shard I/N' writes them"
        )
    return manifest


def _ordered(parts: Sequence[Path]) -> list[Path]:
    """Return the parts by their number, after comparing them."""
    if not parts:
        raise UserError("no part to merge: give the folders that 'perturbdiff evaluate … --shard I/N' wrote")
    records = {part: _record(part) for part in dict.fromkeys(parts)}
    first = parts[0]
    count = int(records[first]["config"]["shard"][1])
    by_number: dict[int, Path] = {}
    for part, record in records.items():
        if different := _difference(records[first], record):
            raise UserError(f"{part}: is not of the same evaluation as {first}: {different}")
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
    return [by_number[i] for i in range(count)]


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Say in what two manifests differ that must not; empty if in nothing."""
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


def _join_differential(parts: Sequence[Path], folder: Path) -> None:
    """Copy the DE tables row group by row group, in the order of the scopes."""
    with DifferentialWriter(folder) as writer:
        for side, name in DIFFERENTIAL.items():
            groups: list[tuple[tuple[bool, Scope], Path, int]] = []
            for path in (part / name for part in parts):
                scopes = tables.differential_scopes(path) if path.is_file() else []
                groups += [((scope[0] != POOLED, scope), path, i) for i, scope in enumerate(scopes)]
            for _, path, number in sorted(groups):
                writer.add_group(side, tables.read_group(path, number))
