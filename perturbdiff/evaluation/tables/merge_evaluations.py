"""`merge`: the parts of one evaluation in, the folder of a single run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope
from perturbdiff.evaluation.tables import score_tables
from perturbdiff.evaluation.tables.score_tables import DIFFERENTIAL, PART, DifferentialWriter, Tables
from perturbdiff.runtime import job_shards, provenance

_STAGES = ("evaluate", "ceiling")


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
    ordered, records = job_shards.ordered([Path(part) for part in parts], "evaluate", _is_part)
    first = records[0]
    base = {key: first[key] for key in job_shards.DETERMINE}
    base["config"] = {k: v for k, v in first["config"].items() if k != "shard"}
    with provenance.stage(
        str(base["stage"]),
        Path(out),
        config={},
        inputs=job_shards.roles(ordered),
        folder=True,
        force=force,
        base=base,
    ) as stage:
        if not stage.skip:
            found = Tables.joined([Tables.load(part) for part in ordered])
            names = {key: str(first["results"][key]) for key in ("kind", "method", "dataset")}
            fields = {k: v for k, v in base["config"].items() if k in EvaluateConfig.model_fields}
            config = EvaluateConfig.model_validate(fields)
            summary = score_tables.write_folder(stage.path, found, config, names, int(base["seed"]))
            _join_differential(ordered, stage.path)
            stage.results.update(summary)
            stage.notes["parts"] = len(ordered)
    return Path(out)


def _is_part(folder: Path, manifest: Mapping[str, Any]) -> bool:
    return manifest["stage"] in _STAGES and (folder / PART).is_file()


def _join_differential(parts: Sequence[Path], folder: Path) -> None:
    """Copy the DE tables row group by row group, in the order of the scopes."""
    with DifferentialWriter(folder) as writer:
        for side, name in DIFFERENTIAL.items():
            groups: list[tuple[tuple[bool, Scope], Path, int]] = []
            for path in (part / name for part in parts):
                scopes = score_tables.differential_scopes(path) if path.is_file() else []
                groups += [((scope[0] != POOLED, scope), path, i) for i, scope in enumerate(scopes)]
            for _, path, number in sorted(groups):
                writer.add_group(side, score_tables.read_group(path, number))
