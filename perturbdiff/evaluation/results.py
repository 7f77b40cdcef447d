"""What `evaluate` wrote, read back for the report: one `Run` per folder, and the metrics' names and directions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from perturbdiff import provenance
from perturbdiff.errors import UserError, listing
from perturbdiff.evaluation.catalogue import METRICS
from perturbdiff.evaluation.metrics import Metric

POOLED = "pooled"
BASELINES = (
    "control",
    "mean-perturbation",
    "mean-celltype",
    "mean-batch",
    "mean-overall",
    "linear",
    "nearest-context",
    "resample",
)
_COLUMNS = ("method", "dataset", "scope", "perturbation", "metric", "value", "n_cells", "definition")


@dataclass(frozen=True)
class Column:
    """A metric as a column of the score tables; ``direction`` is higher, lower, one (best at 1) or none."""

    name: str
    label: str
    direction: str
    family: str = "other"
    meaning: str = ""

    @property
    def higher(self) -> bool:
        """Return whether larger values are better (only for directions higher and lower)."""
        return self.direction != "lower"

    @property
    def arrow(self) -> str:
        """Return the arrow that points where better is."""
        return {"higher": "↑", "lower": "↓", "one": "→ 1"}.get(self.direction, "")

    @property
    def heading(self) -> str:
        """Return the label with its arrow."""
        return f"{self.label} {self.arrow}".strip()


PDCORR, ENERGY = "PDCorr", "energy_distance"


@dataclass(frozen=True)
class Run:
    """One folder of `evaluate`: one method scored on one data set."""

    path: Path
    method: str
    dataset: str
    kind: Literal["model", "baseline", "ceiling"]
    metrics: pd.DataFrame
    aggregate: pd.DataFrame
    summary: dict[str, Any]
    manifest: dict[str, Any]
    record: dict[str, Any]

    @cached_property
    def definition(self) -> str:
        """Return the version of the metrics' definitions."""
        return str(self.metrics["definition"].iloc[0]) if len(self.metrics) else "unknown"

    @cached_property
    def scopes(self) -> list[str]:
        """Return the scopes that were scored, the pool first, then contexts, then conditions."""
        found = sorted(self.metrics["scope"].unique(), key=lambda s: (s != POOLED, "|" in s, s))
        return [str(s) for s in found]

    @property
    def main_scope(self) -> str:
        """Return the scope of the headline numbers: the pool, or the first scope there is."""
        return POOLED if POOLED in self.scopes or not self.scopes else self.scopes[0]

    def table(self, name: str, scope: str | None = None) -> pd.DataFrame | None:
        """Return ``name``.parquet (of one scope), or None if the folder does not hold it."""
        path = self.path / f"{name}.parquet"
        if not path.is_file():
            return None
        if scope is not None and "scope" in pq.read_schema(path).names:
            return pd.read_parquet(path, filters=[("scope", "==", scope)])
        return pd.read_parquet(path)

    def values(self, metric: str) -> pd.Series:
        """Return one metric per condition, indexed by (scope, perturbation), at the finest scope scored.

        Cell type × batch where it was scored, else contexts, else the pool.
        """
        rows = self.metrics[self.metrics["metric"] == metric]
        fine = rows["scope"].str.contains("|", regex=False)
        pooled = rows["scope"] == POOLED
        for wanted in (fine, ~pooled & ~fine):
            if rows.loc[wanted, "value"].notna().any():
                rows = rows[wanted]
                break
        else:
            rows = rows[pooled]
        return rows.set_index(["scope", "perturbation"])["value"].astype(float)

    def score(self, metric: str, scope: str) -> tuple[float, int, int]:
        """Return a metric's mean over the perturbations where it is defined, that number, and all."""
        row = self._scores.get((scope, metric))
        return row if row is not None else (float("nan"), 0, 0)

    @cached_property
    def _scores(self) -> dict[tuple[str, str], tuple[float, int, int]]:
        table = self.aggregate
        columns = (table[c] for c in ("scope", "metric", "nanmean", "n_defined", "n"))
        return {(str(s), str(m)): (float(v), int(d), int(n)) for s, m, v, d, n in zip(*columns, strict=True)}


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the folders of `evaluate`, models first, then baselines, then ceilings.

    Runs of one method on one data set are told apart by the names of their folders.

    Raises
    ------
    UserError
        If there is no run, or a folder is not one of `evaluate`'s.
    """
    if not paths:
        raise UserError("no run to report: give one or more folders written by 'perturbdiff evaluate'")
    runs = [_read_run(Path(p)) for p in paths]
    seen: dict[tuple[str, str], int] = {}
    for run in runs:
        seen[run.dataset, run.method] = seen.get((run.dataset, run.method), 0) + 1
    runs = [_renamed(r, f"{r.method} · {r.path.name}") if seen[r.dataset, r.method] > 1 else r for r in runs]
    names: set[tuple[str, str]] = set()
    for i, run in enumerate(runs):
        name, number = run.method, 1
        while (run.dataset, name) in names:
            number += 1
            name = f"{run.method} #{number}"
        names.add((run.dataset, name))
        runs[i] = _renamed(run, name)
    order = {"model": 0, "baseline": 1, "ceiling": 2}
    return sorted(runs, key=lambda r: order[r.kind])


def _renamed(run: Run, method: str) -> Run:
    return run if method == run.method else replace(run, method=method)


def _read_run(path: Path) -> Run:
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give folders written by 'perturbdiff evaluate'")
    for name in ("metrics.parquet", "aggregate.csv"):
        if not (path / name).is_file():
            raise UserError(f"{path}: no {name}; is it a folder written by 'perturbdiff evaluate'?")
    try:
        metrics = pd.read_parquet(path / "metrics.parquet")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}/metrics.parquet cannot be read ({error}); run evaluate again") from None
    if lacking := [c for c in _COLUMNS if c not in metrics]:
        raise UserError(f"{path}/metrics.parquet: no column {listing(lacking)}; run evaluate again")
    for column in ("scope", "perturbation", "metric"):
        metrics[column] = metrics[column].astype(str)
    text = dict.fromkeys(("scope", "metric", "direction", "definition"), str)
    aggregate = pd.read_csv(path / "aggregate.csv", dtype=text, keep_default_na=False, na_values=[""])
    if lacking := [c for c in ("scope", "metric", "nanmean", "n_defined", "n") if c not in aggregate]:
        raise UserError(f"{path}/aggregate.csv: no column {listing(lacking)}; run evaluate again")
    summary = read_json(path / "summary.json")
    method = str(summary.get("method") or _first(metrics, "method") or path.name)
    dataset = str(summary.get("dataset") or _first(metrics, "dataset") or "data")
    manifest, record = provenance.read_manifest(path) or {}, read_json(path / "run.json")
    kind = _kind(method, summary)
    return Run(path, method, dataset, kind, metrics, aggregate, summary, manifest, record)


def _first(table: pd.DataFrame, column: str) -> str | None:
    return str(table[column].iloc[0]) if len(table) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's record, empty if it is missing or holds something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _kind(method: str, summary: dict[str, Any]) -> Literal["model", "baseline", "ceiling"]:
    if method == "ceiling" or summary.get("kind") == "ceiling" or summary.get("ceiling") is True:
        return "ceiling"
    return "baseline" if method in BASELINES else "model"


def metric_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the metrics that any run holds: the catalogue's in its order, then others by name."""
    directions: dict[str, str] = {}
    for run in runs:
        table = run.aggregate
        given = table["direction"] if "direction" in table else pd.Series("none", index=table.index)
        for name, direction in zip(table["metric"], given, strict=True):
            directions.setdefault(str(name), str(direction))
    known = [
        Column(m.name, m.label, m.direction, m.family, _meaning(m))
        for m in METRICS.values()
        if m.name in directions
    ]
    others = sorted(set(directions) - set(METRICS))
    return known + [Column(name, name, directions[name]) for name in others]


def _meaning(metric: Metric) -> str:
    rule = "" if metric.undefined == "never" else f" ({metric.undefined})"
    return f"{metric.formula}{rule}"


def main_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of the score tables: the paper's 14 metrics and the energy distance."""
    return [c for c in columns if c.family in ("expression", "de") or c.name == ENERGY]


def further_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that describe the predicted populations and counts."""
    main = {c.name for c in main_columns(columns)}
    return [c for c in columns if c.name not in main]


def named(columns: Sequence[Column], name: str) -> Column | None:
    """Return the metric of that name, if it was scored."""
    return next((c for c in columns if c.name == name), None)


def score_table(runs: Sequence[Run], columns: Sequence[Column], scope: str | None = None) -> pd.DataFrame:
    """Return mean scores [methods × metric names] at a scope (default: each run's main one); NaN: undefined."""
    rows = {r.method: [r.score(m.name, scope or r.main_scope)[0] for m in columns] for r in runs}
    return pd.DataFrame.from_dict(
        rows, orient="index", columns=pd.Index([m.name for m in columns]), dtype=np.float64
    )
