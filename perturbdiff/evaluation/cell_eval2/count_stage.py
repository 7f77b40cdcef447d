"""`evaluate --definition cell-eval2`: both sides in, the folder of scores out."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.cell_eval2.anchors import Scores, baseline, replicates
from perturbdiff.evaluation.cell_eval2.measurements import Pair, Side, measure, reference_of
from perturbdiff.evaluation.cell_eval2.metrics import SCORED
from perturbdiff.evaluation.cell_eval2.panels import Panel, Panels, panels_of
from perturbdiff.evaluation.cell_eval2.rules import DEFINITION, RULES, Rules
from perturbdiff.evaluation.cell_eval2.scaled_scores import SCORE, Levels, drawn_levels, levels, table
from perturbdiff.evaluation.readers.cells_by_condition import Cells
from perturbdiff.evaluation.score_tables import DifferentialWriter
from perturbdiff.evaluation.scoring.scopes import Scope
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_CONTEXTS: Scope = ("contexts", "mean of contexts")
_CSV_ROWS = 200_000  # a table with more rows is not written as CSV too


@dataclass(frozen=True)
class _Scored:
    """One context: values per perturbation of the method and both ends, and their means."""

    panel: Panel
    pair: Pair
    method: Scores
    baseline: Scores
    replicates: list[Scores]
    point: Levels
    draws: Levels | None


def check_settings(config: EvaluateConfig, shard: tuple[int, int]) -> None:
    """Raise a `UserError` for settings that the rules of cell-eval2 leave no choice of."""
    fixed = {
        "--metrics": bool(config.metrics),
        "--predicted-controls": config.controls == "own",
        "--shard": shard[1] > 1,
    }
    if chosen := [option for option, given in fixed.items() if given]:
        raise UserError(
            f"the rules of {DEFINITION} leave no choice of {listing(chosen)}; leave it out, or take another definition"
        )


def score_counts(
    folder: Path,
    predictions: Cells,
    truth: Cells,
    config: EvaluateConfig,
    names: dict[str, str],
    *,
    seed: int,
    threads: int | None,
) -> dict[str, Any]:
    """Score counts by the rules that ``config`` names, write all tables into ``folder`` and return the summary.

    Raises
    ------
    UserError
        As `panels_of`, and if a value is no count.
    """
    rules = RULES[config.rules]
    panels = panels_of(predictions, truth, config, rules)
    scored = []
    with DifferentialWriter(folder) as writer:
        for number, panel in enumerate(panels.panels):
            one = _score(panel, panels, rules, threads, config.bootstrap, (seed, number))
            scored.append(one)
            for side, measured in (("real", one.pair.real), ("predicted", one.pair.predicted)):
                for place in range(len(measured.perturbations)):
                    writer.add_group(side, _tests(panel.scope, measured, place, panels.genes))
    digest = panels.digest(rules, [one.pair.real.reference for one in scored])
    _note_ends(scored, panels)
    marks = {"definition": DEFINITION, "rules": digest}
    metrics = pd.concat([_metric_rows(one) for one in scored], ignore_index=True)
    metrics = metrics.assign(**marks)
    for place, key in enumerate(("method", "dataset")):
        metrics.insert(place, key, names[key])
    aggregate = _aggregate(scored, rules).assign(chance=np.nan, **marks)
    conditions = _conditions(scored)
    metrics.to_parquet(folder / "metrics.parquet", index=False)
    if len(metrics) <= _CSV_ROWS:
        tabular.write_csv(metrics, folder / "metrics.csv")
    tabular.write_csv(aggregate, folder / "aggregate.csv")
    tabular.write_csv(_splits(scored, rules).assign(**marks), folder / "replicates.csv")
    tabular.write_csv(conditions, folder / "conditions.csv")
    summary = {
        **names,
        **marks,
        "profile": rules.profile,
        "parameters": asdict(rules),
        "alpha": rules.alpha,
        "num_conditions": len(conditions),
        "num_perturbations": len({c.perturbation for p in panels.panels for c in p.conditions}),
        "num_cells_real": int(conditions["n_cells"].sum()),
        "num_cells_predicted": int(conditions["n_predicted"].sum()),
        "num_controls": sum(len(one.panel.real.controls) for one in scored),
        "num_genes": len(panels.genes),
        "num_genes_tested": {one.panel.scope[1]: int(one.pair.real.reference.tested.sum()) for one in scored},
        "contexts": [p.scope[1] for p in panels.panels if p.scope[0] == "context"],
        "control": truth.control,
        "controls": config.controls,
        "made_by": predictions.made_by.to_json(),
        "targets": _told_targets(panels),
        **panels.notes.facts,
        "scaled": _headline(aggregate),
        "findings": _without_folders(panels, [predictions.reader.path, truth.reader.path]),
    }
    summary = json.loads(json.dumps(summary, default=float), parse_constant=lambda _: None)
    (folder / "summary.json").write_text(provenance.as_json(summary))
    return summary


def _score(
    panel: Panel, panels: Panels, rules: Rules, threads: int | None, draws: int, seed: tuple[int, int]
) -> _Scored:
    """Measure both sides of a context, the baseline and the replicates, one after the other."""
    from perturbdiff.evaluation.cell_eval2.scores import score

    cells = panel.real
    reference = reference_of(cells.read, cells.controls, rules)
    real = measure(cells.read, cells.rows, reference, rules, threads=threads, label="real cells")
    predicted = measure(panels.read, panel.predicted, reference, rules, threads=threads, label="predictions")
    order = np.argsort(np.argsort(np.array(panels.genes, dtype=object), kind="stable"))
    pair = Pair(real, predicted, panels.positions(real.perturbations), order)
    method, low = score(pair, rules), baseline(pair, cells, rules, threads=threads)
    high = replicates(pair, cells, rules, threads=threads)
    point = levels(method, low, high)
    drawn = drawn_levels(method, low, high, draws=draws, seed=seed) if draws else None
    return _Scored(panel, pair, method, low, high, point, drawn)


def _metric_rows(one: _Scored) -> pd.DataFrame:
    """Return a row per perturbation and metric, with the values of both ends beside it."""
    real, predicted = one.pair.real, one.pair.predicted
    frames = []
    for name, values in one.method.items():
        splits = [split[name] for split in one.replicates]
        frames.append(
            pd.DataFrame(
                {
                    "scope_kind": one.panel.scope[0],
                    "scope": one.panel.scope[1],
                    "perturbation": list(real.perturbations),
                    "metric": name,
                    "value": values,
                    "status": np.where(np.isnan(values), "absent", "ok"),
                    "n_cells": real.num_cells,
                    "n_predicted": predicted.num_cells,
                    "baseline": one.baseline[name],
                    "replicate": np.mean(splits, axis=0) if splits else np.nan,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _aggregate(scored: Sequence[_Scored], rules: Rules) -> pd.DataFrame:
    """Return a row per scope and metric; of several contexts their mean comes first."""
    parts = []
    for one in scored:
        rows = table(one.point, one.draws, one.method, rules.metrics)
        parts.append(rows.assign(scope_kind=one.panel.scope[0], scope=one.panel.scope[1]))
    if len(parts) > 1:
        parts.insert(0, _mean_of_contexts(parts))
    found = pd.concat(parts, ignore_index=True)
    first = ["scope_kind", "scope", "metric"]
    return pd.DataFrame(found, columns=pd.Index([*first, *(c for c in found if c not in first)]))


def _mean_of_contexts(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the means over contexts; intervals are of single contexts only."""
    numbers = ["mean", "nanmean", "median", "baseline", "replicate", "replicate_sd", "scaled"]
    rows = parts[0].assign(scope_kind=_CONTEXTS[0], scope=_CONTEXTS[1])
    for column in numbers:
        rows[column] = np.mean([part[column].to_numpy(float) for part in parts], axis=0)
    rows["n_defined"] = rows["n"] = len(parts)
    for column in ("low", "high", "scaled_low", "scaled_high"):
        rows[column] = np.nan
    return rows


def _splits(scored: Sequence[_Scored], rules: Rules) -> pd.DataFrame:
    """Return the mean of each metric in each halving."""
    rows = [
        (*one.panel.scope, seed, name, float(value[0]))
        for one in scored
        for seed, split in zip(rules.split_seeds(), one.point.splits, strict=False)
        for name, value in split.items()
    ]
    return pd.DataFrame(rows, columns=pd.Index(["scope_kind", "scope", "seed", "metric", "value"]))


def _conditions(scored: Sequence[_Scored]) -> pd.DataFrame:
    """Return a row per condition: labels, context, numbers of cells, and the size of the perturbation's real change."""
    rows = []
    for one in scored:
        sizes = np.linalg.norm(one.pair.real.change, axis=1)
        place = {name: i for i, name in enumerate(one.pair.real.perturbations)}
        shared: dict[str, int] = {}
        for condition in one.panel.conditions:
            shared[condition.perturbation] = shared.get(condition.perturbation, 0) + 1
        for condition in one.panel.conditions:
            i = place[condition.perturbation]
            first = shared.pop(condition.perturbation, 0) > 0
            rows.append(
                {
                    "cell_type": condition.cell_type,
                    "batch": condition.batch,
                    "perturbation": condition.perturbation,
                    "context": one.panel.scope[1] if one.panel.scope[0] == "context" else "",
                    "n_cells": int(one.pair.real.num_cells[i]) if first else 0,
                    "n_predicted": int(one.pair.predicted.num_cells[i]) if first else 0,
                    "effect": sizes[i],
                }
            )
    return pd.DataFrame(rows)


def _tests(scope: Scope, side: Side, place: int, genes: Sequence[str]) -> pa.Table:
    """Return the tests of one perturbation, a row per tested gene."""
    tested = np.flatnonzero(side.reference.tested)
    num = len(tested)

    def repeated(name: str) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num, np.int32)), pa.array([name]))

    codes = pa.array(np.arange(num, dtype=np.int32))
    return pa.table(
        {
            "scope_kind": repeated(scope[0]),
            "scope": repeated(scope[1]),
            "perturbation": repeated(side.perturbations[place]),
            "gene": pa.DictionaryArray.from_arrays(
                codes, pa.array([genes[int(g)] for g in tested], pa.string())
            ),
            "p": side.p[place, tested],
            "q": side.q[place, tested].astype(np.float32),
            "log2fc": side.fold[place, tested].astype(np.float32),
            "mean": side.bulk[place, tested].astype(np.float32),
            "control_mean": side.reference.profile.bulk[tested].astype(np.float32),
        }
    )


def _note_ends(scored: Sequence[_Scored], panels: Panels) -> None:
    """Say where there is no replicate, or one that is not better than the baseline."""
    for one in scored:
        label = one.panel.scope[1]
        if not one.replicates:
            text = f"{label}: too few cells to halve, so that there is no replicate and no scaled score"
            panels.notes.add("replicate", text, len(one.pair.targets))
            continue
        if unclear := [name for name in SCORED if np.isnan(one.point.scaled[name][0])]:
            text = (
                f"{label}: a replicate is no better than the mean response by {listing(unclear)}, so that these data "
                "cannot tell, and there is no mean of the six scaled scores"
            )
            panels.notes.add("replicate", text, len(unclear))
        sizes = np.array([len(rows) for rows in one.panel.real.rows.values()])
        if small := int((sizes < 2).sum()):
            text = f"{label}: {small} perturbations of one cell cannot be halved and are not part of the replicate"
            panels.notes.add("few_cells", text, small)


def _told_targets(panels: Panels) -> dict[str, Any]:
    targets = panels.targets
    return {
        "source": targets.source or "names of the perturbations",
        "with_target": len(targets.genes) - len(targets.without),
        "without": list(targets.without),
        "unmeasured": list(targets.unmeasured),
        "unknown": list(targets.unknown),
    }


def _headline(aggregate: pd.DataFrame) -> dict[str, Any]:
    """Return the scaled scores of the first scope, and their mean."""
    first = aggregate[aggregate["scope"] == aggregate["scope"].iloc[0]]
    scaled = dict(zip(first["metric"], first["scaled"].astype(float), strict=True))
    return {name: scaled[name] for name in (SCORE, *SCORED)}


def _without_folders(panels: Panels, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the remarks, which name files without their folders, because scores are shared."""
    found = [dict(entry) for entry in panels.notes.entries]
    for path in sorted(set(paths), key=lambda one: -len(str(one))):
        found = [{**entry, "text": entry["text"].replace(str(path), path.name)} for entry in found]
    return found
