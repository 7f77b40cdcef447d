"""The stage `evaluate`: predictions against real cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

from perturbdiff.conditions.condition import Condition, conditions_of
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation import score_tables
from perturbdiff.evaluation.cell_eval2.count_stage import check_settings, score_counts
from perturbdiff.evaluation.cell_eval2.rules import DEFINITION
from perturbdiff.evaluation.metrics import catalogue
from perturbdiff.evaluation.metrics.bounds import chance
from perturbdiff.evaluation.metrics.collapse import collapse
from perturbdiff.evaluation.pseudobulk import write_pseudobulk
from perturbdiff.evaluation.readers import inputs, pairing
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.aggregate import scope_rows
from perturbdiff.evaluation.scoring.condition_pass import Scored, score_cells
from perturbdiff.evaluation.scoring.scopes import POOLED, sizes_of, units_of
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError

_EXTRA, _TURNS = 10, 8  # further directions of the subspace iteration, and its number of steps


def choose(conditions: pd.DataFrame, most: int) -> list[Condition]:
    """Return at most ``most`` conditions by falling real effect, each perturbation once while there are others.

    Conditions smaller than the median are left out, because the mean of few cells is mostly noise.
    """
    large = pd.DataFrame(conditions[conditions["n_cells"] >= conditions["n_cells"].median()])
    ranked = large.sort_values(["effect", "perturbation"], ascending=[False, True], kind="stable")
    again = ranked["perturbation"].duplicated().astype(int)
    ranked = ranked.assign(again=again).sort_values("again", kind="stable").head(most)
    return conditions_of(ranked)


def embed(pairing: Pairing, conditions: list[Condition], *, cells: int, seed: int) -> pd.DataFrame:
    """Project cells onto two principal components fitted on the real perturbed and control cells.

    Parameters
    ----------
    conditions
        Which conditions to show, see `choose`.
    cells
        Most cells of each kind in a condition.

    Returns
    -------
    DataFrame
        condition ("cell type|batch|perturbation"), source (real, predicted, control), x, y (log1p units),
        explained_x, explained_y (shares of variance).
    """
    columns = ["condition", "source", "x", "y", "explained_x", "explained_y"]
    rng = np.random.default_rng(seed)
    labels, blocks = [], []
    for condition in conditions:
        sources = (
            ("real", pairing.real, pairing.real.rows[condition]),
            ("predicted", pairing.predicted, pairing.predicted.rows[condition]),
            ("control", pairing.real, pairing.controls.get(condition.group, np.array([], np.int64))),
        )
        for source, side, rows in sources:
            drawn = rows if len(rows) <= cells else np.sort(rng.choice(rows, cells, replace=False))
            blocks.append(side.cells(drawn))
            labels += [(str(condition), source)] * len(drawn)
    if not labels:
        return pd.DataFrame(columns=pd.Index(columns))
    table = pd.DataFrame(labels, columns=pd.Index(columns[:2]))
    everything: Sparse = sp.vstack(blocks, format="csr")
    real = everything[(table["source"] != "predicted").to_numpy()]
    if min(real.shape) < 2:
        return pd.DataFrame(columns=pd.Index(columns))
    with threadpool_limits(1, "blas"):  # sums keep their order
        axes, centre, shares = _principal(real, seed)
        points = everything @ axes.T - centre @ axes.T
    signs = np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])
    table["x"], table["y"] = (points * np.where(signs == 0, 1.0, signs)).astype(np.float32).T
    return table.assign(explained_x=np.float32(shares[0]), explained_y=np.float32(shares[1]))


def _principal(cells: Sparse, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first two principal axes, float64 [2, G], the mean [G] and the axes' shares of the variance.

    Subspace iteration (Halko et al. 2011, SIAM Rev. 53:217, algorithm 4.4); the cells stay sparse.
    """
    cells = cells.astype(np.float64)
    centre = np.asarray(cells.mean(axis=0)).ravel()
    total = float((cells.data**2).sum() - len(cells.indptr[1:]) * (centre**2).sum())
    basis = np.random.default_rng(seed).standard_normal((cells.shape[1], min(2 + _EXTRA, *cells.shape)))
    for _ in range(_TURNS):
        scores = cells @ basis - centre @ basis
        basis = np.linalg.qr(cells.T @ scores - np.outer(centre, scores.sum(axis=0)))[0]
    _, lengths, turned = np.linalg.svd(cells @ basis - centre @ basis, full_matrices=False)
    return (turned @ basis.T)[:2], centre, lengths[:2] ** 2 / total if total > 0 else np.zeros(2)


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
        Folder to write: metrics (.parquet, .csv), aggregate.csv, collapse.csv, de_real.parquet, de_pred.parquet,
        conditions.csv, embedding.parquet and summary.json. ``docs/scoring.md`` says what is in them.
    method, dataset
        Names in the tables; by default what the files say, else their names.
    seed
        Of the cells drawn for distances and the embedding, of chance and of the intervals.
    threads
        Threads that compare; by default the processors that this process may use. The result does not depend on it.
    shard
        (I, N): write part I of N, to be joined by `perturbdiff.evaluation.merge_scores.merge`.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a file is missing or unreadable, or scale, genes, conditions or controls do not match.
    """
    if config.definition == DEFINITION:
        check_settings(config, shard)
    if config.replicate_column is not None and (shard[1] > 1 or config.definition == DEFINITION):
        other = "--shard" if shard[1] > 1 else f"--definition {DEFINITION}"
        raise UserError(
            f"DE of pseudobulks (--replicate-col) does not go with {other}; leave one of them out"
        )
    settings = settings_of(config, shard, method=method, dataset=dataset)
    files = {"predictions": Path(predictions), "truth": Path(truth), **targets_file(config)}
    with provenance.stage(
        "evaluate", Path(out), config=settings, inputs=files, seed=seed, folder=True, force=force
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
            if config.definition == DEFINITION:
                found = score_counts(stage.path, predicted, real, config, names, seed=seed, threads=threads)
                stage.results.update(found)
            else:
                _run(stage, pairing.pair(predicted, real, config), config, names, seed, threads, shard)
    return Path(out)


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
        facts=_facts(pairs),
        findings=_findings(pairs),
    )
    if any(unit.is_pool for unit in scored.units):
        shown = choose(scored.conditions, config.embed_conditions)
        tables.points = embed(pairs, shown, cells=config.embed_cells, seed=seed)
    return tables


def own_conditions(scored: Scored) -> pd.DataFrame:
    """Return the conditions whose cells were compared here."""
    conditions = scored.conditions[scored.conditions["own"]] if len(scored.conditions) else scored.conditions
    return pd.DataFrame(conditions).drop(columns="own", errors="ignore").reset_index(drop=True)


def _facts(pairs: pairing.Pairing) -> dict[str, Any]:
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
        **pairs.facts,
    }


def _findings(pairs: pairing.Pairing) -> list[dict[str, Any]]:
    """Return the remarks on the inputs, which name files without their folders, because scores are shared."""
    paths = {pairs.predicted.reader.path, pairs.real.reader.path}
    found = [dict(entry) for entry in pairs.findings]
    for path in sorted(paths, key=lambda one: -len(str(one))):
        found = [{**entry, "text": entry["text"].replace(str(path), path.name)} for entry in found]
    return found


def settings_of(config: EvaluateConfig, shard: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Return what the manifest says was set; a whole run does not mention shards, and no file's folder is told."""
    part = {} if shard[1] == 1 else {"shard": list(shard)}
    names = {key: path.name for key, path in targets_file(config).items()}
    return {**config.model_dump(), **names, **more, **part}


def targets_file(config: EvaluateConfig) -> dict[str, Path]:
    """Return the table of target genes as an input, if there is one."""
    return {} if config.targets is None else {"targets": Path(config.targets)}


def _stem(path: Path) -> str:
    return Path(path).name.removesuffix(".h5ad").removesuffix(".zarr")
