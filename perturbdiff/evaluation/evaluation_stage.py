"""The stages `evaluate`, predictions against real cells, and `ceiling`, real cells against real cells."""

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
from perturbdiff.evaluation.metrics import catalogue
from perturbdiff.evaluation.metrics.bounds import chance
from perturbdiff.evaluation.metrics.collapse import collapse
from perturbdiff.evaluation.readers import inputs, pairing
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.aggregate import scope_rows
from perturbdiff.evaluation.scoring.condition_pass import Scored, score_cells
from perturbdiff.evaluation.scoring.scopes import POOLED, sizes_of, units_of
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime import provenance
from perturbdiff.runtime.files import existing

CEILING = "ceiling"

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
    settings = _settings(config, shard, method=method, dataset=dataset)
    files = {"predictions": Path(predictions), "truth": Path(truth), **_targets_file(config)}
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
            _run(stage, pairing.pair(predicted, real, config), config, names, seed, threads, shard)
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
    """Score one random half of each condition's real cells against the other, as the ceiling of any method's score.

    Halves are noisier than all cells: a full-size prediction is compared with less noisy real cells than these.

    Parameters
    ----------
    truth
        Store folder, or AnnData whose columns ``config`` names.
    split, part
        Score the conditions of this part only; all of them without a split.
    seed, threads, shard
        As in `evaluate`; ``seed`` also draws the halves.

    Returns
    -------
    Path
        ``out``, with the files of `evaluate`; the method's name is ``ceiling``.

    Raises
    ------
    UserError
        If a file is missing, or the split has no condition of the store in ``part``.
    """
    settings = _settings(config, shard, dataset=dataset, part=part)
    files = {"truth": Path(truth), **({"split": Path(split)} if split else {}), **_targets_file(config)}
    with provenance.stage(
        "ceiling", Path(out), config=settings, inputs=files, seed=seed, folder=True, force=force
    ) as stage:
        if stage.skip:
            score_tables.repeat_findings(Path(out))
        else:
            real = inputs.open_truth(existing(files["truth"], "truth"), config)
            wanted = pairing.held_out_conditions(files["split"], part, real) if split else list(real.rows)
            names = {"kind": CEILING, "method": CEILING, "dataset": dataset or real.names["dataset"]}
            halves = pairing.split_half(real, wanted, seed=seed)
            _run(stage, halves, config, names, seed, threads, shard)
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
    tables = _tables(scored, pairs, config, stage.path, seed)
    if any(unit.is_pool for unit in scored.units):
        shown = choose(scored.conditions, config.embed_conditions)
        tables.points = embed(pairs, shown, cells=config.embed_cells, seed=seed)
    tables.facts, tables.findings = _facts(pairs), _findings(pairs)
    if shard[1] == 1:
        stage.results.update(score_tables.write_folder(stage.path, tables, config, names, seed))
    else:
        tables.save(stage.path)
        stage.results.update(
            {**names, "scopes": [list(scope) for unit in scored.units for scope in unit.scopes]}
        )


def _tables(
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
    conditions = scored.conditions[scored.conditions["own"]] if len(scored.conditions) else scored.conditions
    return score_tables.Tables(
        metrics=pd.concat(metrics, ignore_index=True) if metrics else pd.DataFrame(),
        conditions=pd.DataFrame(conditions).drop(columns="own", errors="ignore").reset_index(drop=True),
        chance=pd.DataFrame(by_chance, columns=pd.Index(score_tables.CHANCE)),
        collapse=pd.DataFrame(alike, columns=pd.Index(score_tables.COLLAPSE)),
    )


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


def _settings(config: EvaluateConfig, shard: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Return what the manifest says was set; a whole run does not mention shards, and no file's folder is told."""
    part = {} if shard[1] == 1 else {"shard": list(shard)}
    names = {key: path.name for key, path in _targets_file(config).items()}
    return {**config.model_dump(), **names, **more, **part}


def _targets_file(config: EvaluateConfig) -> dict[str, Path]:
    """Return the table of target genes as an input, if there is one."""
    return {} if config.targets is None else {"targets": Path(config.targets)}


def _stem(path: Path) -> str:
    return Path(path).name.removesuffix(".h5ad").removesuffix(".zarr")
