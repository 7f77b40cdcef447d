"""`merge`: the parts of one evaluation in, the folder of a single run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.score_tables import DIFFERENTIAL, PART, DifferentialWriter, Tables, write_folder
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope
from perturbdiff.runtime import job_shards

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
    with job_shards.merging(
        parts, out, "evaluate", _is_part, unsharded={}, folder=True, force=force
    ) as merge:
        if not merge.stage.skip:
            first, folder = merge.records[0], merge.stage.path
            names = {key: str(first["results"][key]) for key in ("kind", "method", "dataset")}
            config = EvaluateConfig.model_validate(
                {k: v for k, v in merge.config.items() if k in EvaluateConfig.model_fields}
            )
            tables = Tables.joined([Tables.load(part) for part in merge.parts])
            summary = write_folder(folder, tables, config, names, int(first["seed"]))
            _join_differential(merge.parts, folder)
            merge.stage.results.update(summary)
    return Path(out)


def _is_part(folder: Path, manifest: Mapping[str, Any]) -> bool:
    return manifest["stage"] in _STAGES and (folder / PART).is_file()


def _join_differential(parts: Sequence[Path], folder: Path) -> None:
    """Copy the DE tables row group by row group, in the order of the scopes."""
    with DifferentialWriter(folder) as writer:
        for side, name in DIFFERENTIAL.items():
            groups: list[tuple[tuple[bool, Scope], Path, int]] = []
            for path in (part / name for part in parts):
                scopes = _scopes(path) if path.is_file() else []
                groups += [((scope[0] != POOLED, scope), path, i) for i, scope in enumerate(scopes)]
            for _, path, number in sorted(groups):
                with pq.ParquetFile(path) as file:
                    writer.add_group(side, file.read_row_group(number))


def _scopes(path: Path) -> list[Scope]:
    """Return the scope of each row group of a DE table."""
    with pq.ParquetFile(path) as file:
        names = ["scope_kind", "scope"]
        first = [file.read_row_group(i, columns=names).slice(0, 1) for i in range(file.num_row_groups)]
    return [(t["scope_kind"][0].as_py(), t["scope"][0].as_py()) for t in first]
