"""The stage `ceiling`: real cells against real cells, over several random splits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation import score_tables
from perturbdiff.evaluation.cell_eval2.count_stage import check_settings, score_ends
from perturbdiff.evaluation.cell_eval2.metrics import DEFINITION
from perturbdiff.evaluation.evaluation_stage import (
    own_conditions,
    save,
    tables_of,
)
from perturbdiff.evaluation.metrics import catalogue
from perturbdiff.evaluation.metrics.populations import DISTRIBUTION
from perturbdiff.evaluation.metrics.set_metrics import SET_METRICS
from perturbdiff.evaluation.readers import inputs, pairing
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.references import DUPLICATE, pair_reference
from perturbdiff.evaluation.scoring.aggregate import joined, scope_rows
from perturbdiff.evaluation.scoring.condition_pass import Scored, score_cells
from perturbdiff.evaluation.scoring.scopes import sizes_of
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.files import existing
from perturbdiff.runtime.seeds import state

CEILING, REFERENCE, ENDS = "ceiling", "reference", "ends"
"""Kinds of folders of scores that hold no predictions."""


def ceiling(
    truth: Path,
    out: Path,
    config: EvaluateConfig,
    *,
    reference: str = DUPLICATE,
    split: Path | None = None,
    part: str = "test",
    dataset: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    shard: tuple[int, int] = (0, 1),
    force: bool = False,
) -> Path:
    """Score one random half of each condition's real cells against the other, as the ceiling of any method's score.

    Each half's changes are measured from its own half of the controls, so that the noise of the controls does not
    make the halves alike. The values are means over ``config.ceiling_splits`` splits. Halves are noisier than all
    cells: a full-size prediction is compared with less noisy real cells than these.

    Parameters
    ----------
    truth
        Store folder, or AnnData whose columns ``config`` names.
    reference
        Another of `perturbdiff.evaluation.references.REFERENCES` to score in place of the half.
    split, part
        Score the conditions of this part only; all of them without a split.
    seed, threads, shard
        As in `evaluate`; ``seed`` also draws the halves.

    Returns
    -------
    Path
        ``out``, with the files of `evaluate`; the method's name is ``ceiling``, or that of the reference.
        ``split_sd`` in aggregate.csv is the SD over splits of the mean. DE tables, embedding, collapse check and
        chance (but for that of distances) are those of the first split. By the definition cell-eval2 it holds both ends
        of the scale instead, for ``ends`` of `evaluate`.

    Raises
    ------
    UserError
        If a file is missing, or the split has no condition of the store in ``part``.
    """
    by_counts = config.definition == DEFINITION
    if by_counts:
        check_settings(config, shard)
        if reference != DUPLICATE:
            raise UserError(f"--reference {reference}: {DEFINITION} has two ends of its own; leave it out")
    method = CEILING if reference == DUPLICATE else reference
    settings = inputs.settings_of(config, shard, dataset=dataset, part=part, reference=reference)
    files = {"truth": Path(truth), **({"split": Path(split)} if split else {}), **inputs.files_of(config)}
    known = provenance.determinants("ceiling", settings, files, seed)
    with provenance.stage(
        "ceiling", Path(out), config=settings, inputs=files, base=known, folder=True, force=force
    ) as stage:
        if stage.skip:
            score_tables.repeat_findings(Path(out))
        else:
            real = inputs.open_truth(existing(files["truth"], "truth"), config)
            wanted = pairing.held_out_conditions(files["split"], part, real) if split else list(real.rows)
            kind = CEILING if reference == DUPLICATE else REFERENCE
            names = {"kind": kind, "method": method, "dataset": dataset or real.names["dataset"]}
            if by_counts:
                truth_hash = known["inputs"]["truth"]["sha256"]
                given = {"seed": seed, "threads": threads, "truth_hash": truth_hash}
                stage.results.update(
                    score_ends(stage.path, real, wanted, config, {**names, "kind": ENDS}, **given)
                )
                return Path(out)
            pair = partial(pair_reference, real, wanted, reference)
            score = partial(score_cells, config=config, seed=seed, threads=threads, shard=shard)
            tables, scored = _over_splits(pair, score, config, stage.path, seed)
            save(stage, tables, scored, config, names, seed, whole=shard[1] == 1)
    return Path(out)


def _over_splits(
    pair: Callable[..., Pairing],
    score: Callable[[Pairing], Scored],
    config: EvaluateConfig,
    folder: Path,
    seed: int,
) -> tuple[score_tables.Tables, Scored]:
    """Return the tables with means over the splits, and what the pass over the first split found."""
    first, *others = split_seeds(seed, config.ceiling_splits)
    pairs = pair(seed=first)
    scored = score(pairs)
    tables = tables_of(scored, pairs, config, folder, seed)
    metrics, conditions = [tables.metrics], [tables.conditions]
    for number in others:
        pairs = pair(seed=number, quiet=True)
        again = score(pairs)
        metrics.append(_metric_rows(again, pairs, config))
        conditions.append(own_conditions(again))
    if len(tables.metrics):
        tables.metrics = joined(metrics, ["value"], keep=["value"])
    if len(tables.conditions):
        numbers = tables.conditions.select_dtypes("number").columns.difference(
            ["n_cells", "n_predicted", "n_distinct", "n_sets", "n_predicted_sets"]
        )
        kept = [name for name in numbers if name in (*DISTRIBUTION, *SET_METRICS)]
        tables.conditions = joined(conditions, list(numbers), keep=kept)
    tables.facts["splits"] = config.ceiling_splits
    return tables, scored


def _metric_rows(scored: Scored, pairs: Pairing, config: EvaluateConfig) -> pd.DataFrame:
    """Return the values of a further split, in the order of `tables_of`."""
    rows = [pd.DataFrame()]
    for tested in scored.tested:
        comparison = tested.comparison(config)
        values = catalogue.score(comparison, scored.wanted.table)
        sizes = sizes_of(tested.unit, pairs)
        rows += [scope_rows(scope, comparison, values, sizes) for scope in tested.unit.scopes]
    return pd.concat(rows, ignore_index=True)


def split_seeds(seed: int, number: int) -> list[int]:
    """Return the seeds of some splits, the same for every reference."""
    return [state(seed, k) for k in range(number)]
