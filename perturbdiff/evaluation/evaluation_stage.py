"""The stage `evaluate`: predictions against real cells; and `merge`, which joins the parts of one evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation import score_tables
from perturbdiff.evaluation.calibration import verdicts
from perturbdiff.evaluation.cell_eval2.count_stage import check_settings, score_counts
from perturbdiff.evaluation.cell_eval2.metrics import DEFINITION
from perturbdiff.evaluation.embedding import choose, embed, place_sets
from perturbdiff.evaluation.metrics import catalogue
from perturbdiff.evaluation.metrics.bounds import chance, collapse
from perturbdiff.evaluation.pseudobulk_de import write_pseudobulk
from perturbdiff.evaluation.readers import inputs, pairing
from perturbdiff.evaluation.readers.remarks import Findings
from perturbdiff.evaluation.score_tables import DIFFERENTIAL, PART, DifferentialWriter, Tables, write_folder
from perturbdiff.evaluation.scoring.aggregate import scope_rows
from perturbdiff.evaluation.scoring.condition_pass import Scored, score_cells
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope, sizes_of, units_of
from perturbdiff.runtime import job_shards, provenance
from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)


def evaluate(
    predictions: Path,
    truth: Path,
    out: Path,
    config: EvaluateConfig,
    *,
    method: str | None = None,
    dataset: str | None = None,
    calibration: Path | None = None,
    ends: Path | None = None,
    seed: int = 0,
    threads: int | None = None,
    shard: tuple[int, int] = (0, 1),
    force: bool = False,
) -> Path:
    """Score predicted cells against the real cells of the same conditions.

    Parameters
    ----------
    predictions
        AnnData (h5ad or zarr) of predicted cells, log1p, as `perturbdiff.predictions` writes it.
    truth
        Store folder, or AnnData whose columns ``config`` names.
    out
        Folder to write: metrics (.parquet, .csv), aggregate.csv, collapse.csv, de_real.parquet, de_pred.parquet,
        conditions.csv, embedding.parquet, sets.parquet (where sets are known) and summary.json. ``docs/scoring.md``
        says what is in them.
    method, dataset
        Names in the tables; by default what the files say, else their names.
    calibration
        Folder of `perturbdiff.evaluation.calibration.calibrate` on the same truth: what it says of each metric
        stands beside the scores.
    ends
        Folder of an earlier evaluation by cell-eval2 of the same truth, whose mean response and replicates are read
        instead of made again.
    seed
        Of the cells drawn for distances and the embedding, of chance and of the intervals.
    threads
        Threads that compare; by default the processors that this process may use. The result does not depend on it.
    shard
        (I, N): write part I of N, to be joined by `perturbdiff.evaluation.score_tables.merge`.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a file is missing or unreadable, or scale, genes, conditions or controls do not match, or the calibration
        is of another truth or definition.
    """
    _check_options(config, shard, calibration, ends)
    settings = inputs.settings_of(config, shard, method=method, dataset=dataset)
    files = {"predictions": Path(predictions), "truth": Path(truth), **inputs.files_of(config)}
    files |= {"calibration": Path(calibration)} if calibration else {}
    files |= {"ends": Path(ends)} if ends else {}
    known = provenance.determinants("evaluate", settings, files, seed)
    with provenance.stage(
        "evaluate", Path(out), config=settings, inputs=files, base=known, folder=True, force=force
    ) as stage:
        if stage.skip:
            score_tables.repeat_findings(Path(out))
        else:
            inputs.check_roles(files["predictions"], files["truth"])
            predicted = inputs.open_predictions(
                files["predictions"], config, ours=not inputs.is_store(files["truth"])
            )
            real = inputs.open_truth(files["truth"], config, control=predicted.control)
            names = {
                "method": method or predicted.names.get("method") or _stem(predictions),
                "dataset": dataset or predicted.names.get("dataset") or real.names["dataset"],
            }
            names = {"kind": "predictions", **names}
            truth_hash = known["inputs"]["truth"]["sha256"]
            if config.definition == DEFINITION:
                found = score_counts(
                    stage.path,
                    predicted,
                    real,
                    config,
                    names,
                    seed=seed,
                    threads=threads,
                    truth_hash=truth_hash,
                    ends=ends,
                )
                stage.results.update(found)
            else:
                pairs = pairing.pair(predicted, real, config)
                if calibration:
                    pairs.facts["calibration"] = verdicts.facts(calibration, truth_hash, config.definition)
                _run(stage, pairs, config, names, seed, threads, shard)
    return Path(out)


def _check_options(
    config: EvaluateConfig, shard: tuple[int, int], calibration: Path | None, ends: Path | None
) -> None:
    """Raise a `UserError` if options do not go together."""
    if config.definition == DEFINITION:
        check_settings(config, shard)
        if calibration:
            raise UserError(f"--calibration: {DEFINITION} has anchors of its own; leave the calibration out")
    elif ends:
        raise UserError(f"--ends: only {DEFINITION} has two ends of a scale; leave it out")
    if config.replicate_column is not None and (shard[1] > 1 or config.definition == DEFINITION):
        other = "--shard" if shard[1] > 1 else f"--definition {DEFINITION}"
        raise UserError(
            f"DE of pseudobulks (--replicate-col) does not go with {other}; leave one of them out"
        )


def _run(
    stage: provenance.Stage,
    pairs: pairing.Pairing,
    config: EvaluateConfig,
    names: dict[str, str],
    seed: int,
    threads: int | None,
    shard: tuple[int, int],
) -> None:
    """Score ``pairs`` and write every table into the stage's folder, or those of a part."""
    scored = score_cells(pairs, config, seed=seed, threads=threads, shard=shard)
    tables = tables_of(scored, pairs, config, stage.path, seed)
    if config.replicate_column is not None:
        facts, findings = write_pseudobulk(stage.path, pairs, scored, config)
        for finding in findings:
            logger.warning("%s: %s", names["method"], finding["text"])
        tables.facts |= facts
        tables.findings += findings
    save(stage, tables, scored, config, names, seed, whole=shard[1] == 1)


def save(
    stage: provenance.Stage,
    tables: score_tables.Tables,
    scored: Scored,
    config: EvaluateConfig,
    names: dict[str, str],
    seed: int,
    *,
    whole: bool,
) -> None:
    """Write the tables into the stage's folder: all that a folder of scores has, or those of a part."""
    if whole:
        stage.results.update(score_tables.write_folder(stage.path, tables, config, names, seed))
    else:
        tables.save(stage.path)
        stage.results.update(
            {**names, "scopes": [list(scope) for unit in scored.units for scope in unit.scopes]}
        )


def tables_of(
    scored: Scored, pairs: pairing.Pairing, config: EvaluateConfig, folder: Path, seed: int
) -> score_tables.Tables:
    """Score one scope after the other; write its DE tables if tests were made."""
    metrics, by_chance, alike = [], [], []
    with score_tables.DifferentialWriter(folder) as writer:
        for tested in scored.tested:
            comparison = tested.comparison(config)
            values = catalogue.score(comparison, scored.wanted.table)
            levels = chance(comparison, scored.wanted.table, seed=seed)
            likeness = collapse(comparison.real.delta, comparison.predicted.delta)
            sizes = sizes_of(tested.unit, pairs)
            for scope in tested.unit.scopes:
                metrics.append(scope_rows(scope, comparison, values, sizes))
                by_chance += [(*scope, name, level) for name, level in levels.items()]
                if likeness is not None:
                    numbers = (likeness.real, likeness.predicted, likeness.ratio)
                    alike.append((*scope, *numbers, likeness.verdict))
                if scored.wanted.tests:
                    writer.add(scope, comparison)
    tables = score_tables.Tables(
        metrics=pd.concat(metrics, ignore_index=True) if metrics else pd.DataFrame(),
        conditions=own_conditions(scored),
        chance=pd.DataFrame(by_chance, columns=pd.Index(score_tables.CHANCE)),
        collapse=pd.DataFrame(alike, columns=pd.Index(score_tables.COLLAPSE)),
        facts=_facts(pairs, scored),
        findings=_findings(pairs, scored),
    )
    if any(unit.is_pool for unit in scored.units):
        shown = choose(scored.conditions, config.embed_conditions)
        tables.points = embed(pairs, shown, cells=config.embed_cells, seed=seed)
        if scored.wanted.sets:
            tables.sets = place_sets(pairs, shown, seed=seed)
    return tables


def own_conditions(scored: Scored) -> pd.DataFrame:
    """Return the conditions whose cells were compared here."""
    conditions = scored.conditions[scored.conditions["own"]] if len(scored.conditions) else scored.conditions
    return pd.DataFrame(conditions).drop(columns="own", errors="ignore").reset_index(drop=True)


def _facts(pairs: pairing.Pairing, scored: Scored) -> dict[str, Any]:
    """Return what is the same in every part of an evaluation."""
    contexts = [label for unit in units_of(pairs) for kind, label in unit.scopes if kind != POOLED]
    return {
        "num_perturbations": len(pairs.perturbations),
        "num_contexts": len(contexts),
        "contexts": contexts,
        "num_genes": len(pairs.genes),
        "num_controls": sum(len(rows) for rows in pairs.controls.values()),
        "control": pairs.control,
        "largest_predicted_value": pairs.predicted.highest,
        "num_target_genes": len(scored.targets.panel),
        "targets": scored.targets.source or "names",
        **pairs.facts,
    }


def _findings(pairs: pairing.Pairing, scored: Scored) -> list[dict[str, Any]]:
    """Return the remarks on the inputs, which name files without their folders, because scores are shared."""
    paths = {pairs.predicted.reader.path, pairs.real.reader.path}
    found = [dict(entry) for entry in (*pairs.findings, *_target_findings(scored))]
    for path in sorted(paths, key=lambda one: -len(str(one))):
        found = [{**entry, "text": entry["text"].replace(str(path), path.name)} for entry in found]
    return found


def _target_findings(scored: Scored) -> list[dict[str, Any]]:
    """Log and return what of the table of target genes did not match; nothing without a table."""
    notes = Findings()
    for text, count, warn in scored.targets.remarks() if scored.targets.source else ():
        notes.add("targets", text, count, warn=warn)
    return notes.entries


def _stem(path: Path) -> str:
    return Path(path).name.removesuffix(".h5ad").removesuffix(".zarr")


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
