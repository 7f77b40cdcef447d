"""The tables of an evaluation, and the folder that they are written to."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from perturbdiff.conditions.condition import LABELS
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.calibration import verdicts
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.scoring.aggregate import (
    aggregate,
    condition_chance,
    condition_rows,
    deviation,
    taken_apart,
)
from perturbdiff.evaluation.scoring.limits import limits
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope
from perturbdiff.runtime import provenance, tabular, untrusted
from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

DIFFERENTIAL = {"real": "de_real.parquet", "predicted": "de_pred.parquet"}
CHANCE = ("scope_kind", "scope", "metric", "chance")
COLLAPSE = ("scope_kind", "scope", "real", "predicted", "ratio", "verdict")
PART = "part.json"
"""File that marks a part of an evaluation."""
_CSV_ROWS = 200_000  # a table with more rows is not written as CSV too
_GROUP_ROWS = 1 << 19  # rows of a row group of the DE tables
_FRAMES = ("metrics", "conditions", "chance", "collapse", "points", "sets")


@dataclass
class Tables:
    """The scores of some scopes.

    Attributes
    ----------
    metrics
        Rows of `aggregate.scope_rows`.
    conditions
        The conditions whose cells were compared, as `scoring.Scored` has them.
    chance
        scope_kind, scope, metric, chance of the metrics of `metrics`.
    collapse
        scope_kind, scope, real, predicted, ratio, verdict.
    points
        The embedding; empty in a part without the pool.
    sets
        Places of sets; empty in a part without the pool, or where sets are not known.
    facts
        Facts about the inputs, the same in every part; only ``largest_predicted_value`` is of the cells read.
    findings
        Remarks on the inputs.
    """

    metrics: pd.DataFrame = field(default_factory=pd.DataFrame)
    conditions: pd.DataFrame = field(default_factory=pd.DataFrame)
    chance: pd.DataFrame = field(default_factory=pd.DataFrame)
    collapse: pd.DataFrame = field(default_factory=pd.DataFrame)
    points: pd.DataFrame = field(default_factory=pd.DataFrame)
    sets: pd.DataFrame = field(default_factory=pd.DataFrame)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write a part."""
        for name in _FRAMES:
            if len(table := getattr(self, name)):
                table.to_parquet(folder / f"{name}.parquet", index=False)
        record = {"facts": self.facts, "findings": self.findings}
        (folder / PART).write_text(provenance.as_json(record))

    @classmethod
    def load(cls, folder: Path) -> Tables:
        """Read a part."""
        paths = {name: folder / f"{name}.parquet" for name in _FRAMES}
        frames = {
            name: tabular.read_parquet(path, "make this part again")
            for name, path in paths.items()
            if path.is_file()
        }
        record = untrusted.read(folder / PART, "JSON")
        try:
            return cls(**frames, facts=dict(record["facts"]), findings=list(record["findings"]))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{folder / PART}: is no record of a part; make this part again") from None

    @classmethod
    def joined(cls, parts: Sequence[Tables]) -> Tables:
        """Return the tables of all parts in the order of a single run."""
        frames = {}
        for name in _FRAMES:
            if tables := [t for part in parts if len(t := getattr(part, name))]:
                frames[name] = pd.concat(tables, ignore_index=True)
        for name in ("metrics", "chance", "collapse"):
            if name in frames:
                frames[name] = _by_scope(frames[name])
        if "conditions" in frames:
            frames["conditions"] = frames["conditions"].sort_values(list(LABELS), ignore_index=True)
        highest = max(part.facts["largest_predicted_value"] for part in parts)
        facts = {**parts[0].facts, "largest_predicted_value": highest}
        return cls(**frames, facts=facts, findings=parts[0].findings)


def _by_scope(table: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by scope, pool first, those of a scope staying as they are."""
    order = [
        i
        for _, i in sorted(
            ((kind != POOLED, kind, label), i)
            for i, (kind, label) in enumerate(zip(table["scope_kind"], table["scope"], strict=True))
        )
    ]
    return table.iloc[order].reset_index(drop=True)


def write_folder(
    folder: Path, tables: Tables, config: EvaluateConfig, names: dict[str, str], seed: int
) -> dict[str, Any]:
    """Write all tables but those of DE; return the summary, which is written too. Log what limits the scores.

    Parameters
    ----------
    names
        kind, method and dataset.
    seed
        Of the intervals.
    """
    conditions, by_condition = taken_apart(tables.conditions)
    metrics, by_perturbation = taken_apart(tables.metrics)
    metrics = pd.concat([metrics, condition_rows(conditions)], ignore_index=True)
    who = pd.DataFrame({k: [names[k]] * len(metrics) for k in ("method", "dataset")})
    metrics = pd.concat([who, metrics.assign(definition=config.definition)], axis=1)
    chance = pd.concat(
        [t for t in (tables.chance, condition_chance(conditions)) if len(t)] or [pd.DataFrame()]
    )
    members, named = _members(conditions), {"seed": seed, "definition": config.definition}
    means = aggregate(metrics, members, chance=chance, draws=config.bootstrap, **named)
    if "splits" in tables.facts:
        number = tables.facts["splits"]
        both = zip(
            by_perturbation or [pd.DataFrame()] * number, by_condition or [conditions] * number, strict=True
        )
        rows = (pd.concat([some, condition_rows(other)], ignore_index=True) for some, other in both)
        of_splits = [aggregate(table, members, **named) for table in rows]
        means["split_sd"] = deviation(means, of_splits)
    if calibrated := tables.facts.get("calibration"):
        means = means.assign(**verdicts.columns(calibrated["metrics"], list(means["metric"])))
    limiting = limits(metrics, conditions, tables.collapse, config, num_genes=int(tables.facts["num_genes"]))
    for finding in limiting:
        logger.warning("%s: %s", names["method"], finding["text"])
    summary = {
        **names,
        "definition": config.definition,
        "alpha": config.alpha,
        "min_de": config.min_de,
        "num_conditions": len(conditions),
        "num_cells_real": int(conditions["n_cells"].sum()),
        "num_cells_predicted": int(conditions["n_predicted"].sum()),
        **tables.facts,
        "headline": _headline(means),
        "collapse": tables.collapse.to_dict("records"),
        "findings": [*tables.findings, *limiting],
    }
    metrics.to_parquet(folder / "metrics.parquet", index=False)
    if len(metrics) <= _CSV_ROWS:
        tabular.write_csv(metrics, folder / "metrics.csv")
    tabular.write_csv(means, folder / "aggregate.csv")
    tabular.write_csv(conditions, folder / "conditions.csv")
    tabular.write_csv(pd.DataFrame(tables.collapse, columns=pd.Index(COLLAPSE)), folder / "collapse.csv")
    tables.points.to_parquet(folder / "embedding.parquet", index=False)
    if len(tables.sets):
        tables.sets.to_parquet(folder / "sets.parquet", index=False)
    summary = _plain(summary)
    (folder / "summary.json").write_text(provenance.as_json(summary))
    return summary


def repeat_findings(folder: Path) -> None:
    """Log again what an evaluation that was made before found."""
    summary = untrusted.read(folder / "summary.json", "JSON") if (folder / "summary.json").is_file() else {}
    for finding in summary.get("findings", ()):
        logger.warning("%s: %s", summary.get("method"), finding.get("text"))


def _members(conditions: pd.DataFrame) -> dict[str, list[tuple[str, str]]]:
    """Return each context's conditions as (scope, perturbation)."""
    scope = conditions["cell_type"] + "|" + conditions["batch"]
    keys = list(zip(scope, conditions["perturbation"], strict=True))
    members: dict[str, list[tuple[str, str]]] = {}
    for context, key in zip(conditions["context"], keys, strict=True):
        if context != "":
            members.setdefault(str(context), []).append(key)
    return members


def _headline(means: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the mean over defined values per metric: pooled, and the mean of the contexts."""
    chosen = means[means["scope_kind"].isin([POOLED, "contexts"])]
    return {
        str(kind): dict(zip(group["metric"], group["nanmean"].astype(float), strict=True))
        for kind, group in chosen.groupby("scope_kind", sort=False)
    }


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return ``record`` with NaN as null, which JSON knows."""
    return json.loads(json.dumps(record, default=float), parse_constant=lambda _: None)


def row_groups(num: int, width: int) -> Iterator[slice]:
    """Yield ranges of ``num`` perturbations whose tests of ``width`` genes fill a row group of the DE tables."""
    step = max(1, _GROUP_ROWS // max(1, width))
    return (slice(first, first + step) for first in range(0, num, step))


class DifferentialWriter:
    """Writes the DE tables of both sides, scope after scope, in row groups of a scope's perturbations.

    Use as a context manager.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = {side: folder / name for side, name in DIFFERENTIAL.items()}
        self._writers: dict[str, pq.ParquetWriter] = {}

    def add(self, scope: Scope, comparison: Comparison) -> None:
        """Write a scope."""
        genes = comparison.genes
        for side in DIFFERENTIAL:
            results = getattr(comparison, side)
            for rows in row_groups(len(comparison.perturbations), len(genes)):
                p = results.p[rows]
                columns = {
                    "p": p,
                    "q": results.q[rows],
                    "log2fc": results.log2_fold[rows],
                    "mean": results.mean[rows].astype(np.float32),
                    "control_mean": np.broadcast_to(results.control.astype(np.float32), p.shape),
                }
                self.add_group(
                    side, differential_table(scope, comparison.perturbations[rows], genes, columns)
                )

    def add_group(self, side: str, table: pa.Table) -> None:
        """Write a row group."""
        if side not in self._writers:
            self._writers[side] = pq.ParquetWriter(self._paths[side], table.schema, compression="zstd")
        self._writers[side].write_table(table, row_group_size=max(1, len(table)))

    def __enter__(self) -> DifferentialWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()


def differential_table(
    scope: Scope, perturbations: Sequence[str], genes: Sequence[str], columns: Mapping[str, np.ndarray]
) -> pa.Table:
    """Return a row per perturbation and gene.

    Parameters
    ----------
    columns
        Values of each further column, [perturbations, genes].
    """
    num, width = len(perturbations), len(genes)

    def repeated(names: Sequence[str], codes: np.ndarray) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32)), pa.array(list(names), pa.string())
        )

    labels = {
        "scope_kind": repeated(scope[:1], np.zeros(num * width)),
        "scope": repeated(scope[1:], np.zeros(num * width)),
        "perturbation": repeated(perturbations, np.repeat(np.arange(num), width)),
        "gene": repeated(genes, np.tile(np.arange(width), num)),
    }
    return pa.table({**labels, **{name: values.ravel() for name, values in columns.items()}})
