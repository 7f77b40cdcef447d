"""`evaluate`: predictions and truth in, a folder of tables out; `ceiling`: how well real cells predict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from perturbdiff import provenance
from perturbdiff.config import EvaluateConfig
from perturbdiff.evaluation import catalogue, embedding, inputs, pairing
from perturbdiff.evaluation.aggregate import aggregate, tidy
from perturbdiff.evaluation.differential import Differential
from perturbdiff.evaluation.metrics import DEFINITION
from perturbdiff.evaluation.scoring import POOLED, Scored, score_cells
from perturbdiff.files import existing

CEILING = "ceiling"
_CSV_ROWS = 200_000  # a table with more rows has no CSV twin


def evaluate(
    predictions: Path,
    truth: Path,
    out: Path,
    config: EvaluateConfig,
    *,
    method: str | None = None,
    dataset: str | None = None,
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
        Folder to write: metrics (.parquet, .csv), aggregate.csv, de_real.parquet, de_pred.parquet,
        conditions.csv, embedding.parquet and summary.json. ``docs/metrics.md`` says what is in them.
    method, dataset
        Names in the tables; by default what the files say, else their names.
    seed
        Of the cells drawn for energy distances and the embedding.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a file is missing or unreadable, or scale, genes, conditions or controls do not match.
    """
    settings = {**config.model_dump(), "method": method, "dataset": dataset}
    files = {"predictions": Path(predictions), "truth": Path(truth)}
    with provenance.stage(
        "evaluate", Path(out), config=settings, inputs=files, seed=seed, folder=True, force=force
    ) as stage:
        if not stage.skip:
            predicted = inputs.open_predictions(files["predictions"], config)
            real = inputs.open_truth(files["truth"], config, control=predicted.control)
            names = {
                "method": method or predicted.names.get("method") or _stem(predictions),
                "dataset": dataset or predicted.names.get("dataset") or real.names["dataset"],
            }
            _run(stage, pairing.pair(predicted, real, config), config, {"kind": "predictions", **names}, seed)
    return Path(out)


def ceiling(
    truth: Path,
    out: Path,
    config: EvaluateConfig,
    *,
    split: Path | None = None,
    part: str = "test",
    dataset: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    shard: tuple[int, int] = (0, 1),
    force: bool = False,
) -> Path:
    """Score one random half of each condition's real cells against the other: the data's own ceiling.

    Half the cells are half the evidence: full-size predictions meet a truth with less noise than these halves.

    Parameters
    ----------
    truth
        Store folder, or AnnData whose columns ``config`` names.
    split, part
        Score the conditions of this part only; all of them without a split.

    Returns
    -------
    Path
        ``out``, with the files of `evaluate`; the method's name is ``ceiling``.

    Raises
    ------
    UserError
        If a file is missing, or the split has no condition of the store in ``part``.
    """
    settings = {**config.model_dump(), "dataset": dataset, "part": part}
    files = {"truth": Path(truth), **({"split": Path(split)} if split else {})}
    with provenance.stage(
        "ceiling", Path(out), config=settings, inputs=files, seed=seed, folder=True, force=force
    ) as stage:
        if not stage.skip:
            real = inputs.open_truth(existing(files["truth"], "truth"), config)
            wanted = pairing.held_out_conditions(files["split"], part, real) if split else list(real.rows)
            names = {"kind": CEILING, "method": CEILING, "dataset": dataset or real.names["dataset"]}
            _run(stage, pairing.split_half(real, wanted, seed=seed), config, names, seed)
    return Path(out)


def _run(
    stage: provenance.Stage,
    pairs: pairing.Pairing,
    config: EvaluateConfig,
    names: dict[str, str],
    seed: int,
) -> None:
    """Score ``pairs`` and write every table into the stage's folder."""
    scored = score_cells(pairs, alpha=config.alpha, max_cells=config.max_cells, seed=seed)
    values = {scope: catalogue.score(found) for scope, found in scored.comparisons.items()}
    metrics = tidy(scored, values)
    metrics = pd.concat(
        [pd.DataFrame({k: [names[k]] * len(metrics) for k in ("method", "dataset")}), metrics], axis=1
    )
    means = aggregate(metrics, _members(scored.conditions))
    shown = embedding.choose(scored.conditions, config.embed_conditions)
    points = embedding.embed(pairs, shown, cells=config.embed_cells, seed=seed)
    summary = {**names, "definition": DEFINITION, **_facts(pairs, scored), "headline": _headline(means)}
    _write_tables(stage.path, metrics, means, scored.conditions, points)
    for side in ("real", "predicted"):
        name = "de_pred.parquet" if side == "predicted" else "de_real.parquet"
        _write_differential(stage.path / name, scored, side)
    (stage.path / "summary.json").write_text(provenance.as_json(_plain(summary)))
    stage.results.update(_plain(summary))


def _members(conditions: pd.DataFrame) -> dict[str, list[tuple[str, str]]]:
    """Return each context's conditions as (scope, perturbation)."""
    scope = conditions["cell_type"] + "|" + conditions["batch"]
    keys = list(zip(scope, conditions["perturbation"], strict=True))
    found: dict[str, list[tuple[str, str]]] = {}
    for context, key in zip(conditions["context"], keys, strict=True):
        found.setdefault(str(context), []).append(key)
    return found


def _facts(pairs: pairing.Pairing, scored: Scored) -> dict[str, Any]:
    contexts = [label for kind, label in scored.comparisons if kind != POOLED]
    return {
        "num_conditions": len(pairs.conditions),
        "num_perturbations": len(pairs.perturbations),
        "num_contexts": len(contexts),
        "contexts": contexts,
        "num_genes": len(pairs.genes),
        "num_cells_real": int(scored.conditions["n_cells"].sum()),
        "num_cells_predicted": int(scored.conditions["n_predicted"].sum()),
        "num_controls": scored.num_controls,
        "control": pairs.control,
        "largest_predicted_value": pairs.predicted.highest,
        **pairs.facts,
    }


def _headline(means: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the mean over defined values per metric: pooled, and the mean of the contexts."""
    chosen = means[means["scope_kind"].isin([POOLED, "contexts"])]
    return {
        str(kind): dict(zip(group["metric"], group["nanmean"].astype(float), strict=True))
        for kind, group in chosen.groupby("scope_kind", sort=False)
    }


def _write_tables(
    folder: Path, metrics: pd.DataFrame, means: pd.DataFrame, conditions: pd.DataFrame, points: pd.DataFrame
) -> None:
    metrics.to_parquet(folder / "metrics.parquet", index=False)
    if len(metrics) <= _CSV_ROWS:
        metrics.to_csv(folder / "metrics.csv", index=False)
    means.to_csv(folder / "aggregate.csv", index=False)
    conditions.to_csv(folder / "conditions.csv", index=False)
    points.to_parquet(folder / "embedding.parquet", index=False)


def _write_differential(path: Path, scored: Scored, side: str) -> None:
    """Write one side's tests, a row per scope, perturbation and gene, one scope at a time."""
    writer: pq.ParquetWriter | None = None
    try:
        for (kind, label), comparison in scored.comparisons.items():
            found: Differential = getattr(comparison, side)
            table = _differential_table(kind, label, comparison.perturbations, comparison.genes, found)
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _differential_table(
    kind: str, label: str, perturbations: tuple[str, ...], genes: tuple[str, ...], found: Differential
) -> pa.Table:
    rows, columns = found.p.shape

    def repeated(names: tuple[str, ...], codes: np.ndarray) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(list(names)))

    return pa.table(
        {
            "scope_kind": repeated((kind,), np.zeros(rows * columns)),
            "scope": repeated((label,), np.zeros(rows * columns)),
            "perturbation": repeated(perturbations, np.repeat(np.arange(rows), columns)),
            "gene": repeated(genes, np.tile(np.arange(columns), rows)),
            "p": found.p.ravel(),
            "q": found.q.ravel(),
            "log2fc": found.log2_fold.ravel(),
            "mean": found.mean.ravel().astype(np.float32),
            "control_mean": np.tile(found.control.astype(np.float32), rows),
        }
    )


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return ``record`` with NaN as null, which JSON knows."""
    return json.loads(json.dumps(record, default=float), parse_constant=lambda _: None)


def _stem(path: Path) -> str:
    return Path(path).name.removesuffix(".h5ad").removesuffix(".zarr")
