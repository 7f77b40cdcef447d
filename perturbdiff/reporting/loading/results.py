"""What `evaluate` wrote, read back for the report: one `Run` per folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import LABELS
from perturbdiff.io.recognise import confusion
from perturbdiff.method import EXTERNAL_KINDS, Method
from perturbdiff.runtime import provenance, tabular, untrusted
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.files import existing

_ALL = "*"  # the perturbation of a number for all perturbations (ES)
_COLUMNS = (
    "method",
    "dataset",
    "scope_kind",
    "scope",
    "perturbation",
    "metric",
    "value",
    "n_cells",
    "definition",
)
_AGAIN = "copy it again or run evaluate again"
_COLLAPSE = ("real", "predicted", "ratio", "verdict")
_KEYS = ["scope", "perturbation"]
_MEANS = ("scope_kind", "scope", "metric", "nanmean", "n_defined", "n", "direction")

Kind = Literal["model", "baseline", "ceiling"]
Scope = tuple[str, str]  # kind (pooled, contexts, context, condition) and label
POOLED: Scope = ("pooled", "pooled")
REFERENCE = "reference"
_UNKNOWN = (float("nan"),) * 4


@dataclass(frozen=True, eq=False)
class Run:
    """One folder of `evaluate`: one method scored on one data set."""

    path: Path
    method: str
    dataset: str
    kind: Kind
    metrics: pd.DataFrame
    aggregate: pd.DataFrame
    summary: dict[str, Any]
    manifest: dict[str, Any]
    record: dict[str, Any]
    base: str = ""  # the method, before runs of it are told apart

    @property
    def made_by(self) -> Method:
        """Return what the predictions file said of how its cells were made."""
        return Method.from_json(self.summary.get("made_by"))

    @property
    def baseline(self) -> str | None:
        """Return the name of the baseline that this is, whatever the run is called, or None for models and ceilings."""
        return str(self.made_by.baseline or self.base) if self.kind == "baseline" else None

    @property
    def is_reference(self) -> bool:
        """Return whether this is a reference below the ceiling: real cells that know less than the other half."""
        return self.summary.get("kind") == REFERENCE

    @property
    def names(self) -> set[str]:
        """Return the names that a person may call this run by."""
        return {name for name in (self.method, self.base, self.baseline) if name}

    @property
    def external(self) -> bool:
        """Return whether this is an external method, trained in an environment or by a script of its own."""
        return self.kind == "baseline" and self.made_by.external

    @property
    def kind_words(self) -> str:
        """Return what kind of method this is, for reading."""
        return EXTERNAL_KINDS[str(self.made_by.baseline_kind)] if self.external else self.kind

    @cached_property
    def calibration(self) -> dict[str, Any]:
        """Return what `evaluate` kept of a calibration, empty without one."""
        found = self.summary.get("calibration")
        return found if isinstance(found, dict) else {}

    @cached_property
    def worth(self) -> dict[str, tuple[str, str]]:
        """Return verdict and reason of each metric that was calibrated."""
        found = self.calibration.get("metrics")
        entries = found.items() if isinstance(found, dict) else ()
        known = {str(name): one for name, one in entries if isinstance(one, dict)}
        return {
            name: (str(one.get("verdict", "")), str(one.get("reason", ""))) for name, one in known.items()
        }

    @cached_property
    def definition(self) -> str:
        """Return the version of the metrics' definitions."""
        return str(self.metrics["definition"].iloc[0]) if len(self.metrics) else "unknown"

    @property
    def rules(self) -> str:
        """Return the digest of the rules that the scores follow; empty for definitions without one."""
        return str(self.summary.get("rules") or "")

    @cached_property
    def contexts(self) -> list[Scope]:
        """Return the mean of the contexts and the contexts, if more than one was scored."""
        scopes = dict.fromkeys(scope for scope, _ in self._scores)
        contexts = [scope for scope in scopes if scope[0] == "context"]
        return [s for s in scopes if s[0] in ("contexts", "context")] if len(contexts) > 1 else []

    @cached_property
    def pooled(self) -> pd.DataFrame:
        """Return the rows of single perturbations over the whole pool."""
        table = self.metrics
        return _rows(table, (table["scope_kind"] == POOLED[0]) & (table["perturbation"] != _ALL))

    def table(self, name: str, kind: str | None = None) -> pd.DataFrame | None:
        """Return ``name``.parquet (of one kind of scope), or None if the folder does not hold it."""
        path = self.path / f"{name}.parquet"
        if not path.is_file():
            return None
        return tabular.read_parquet(path, _AGAIN, filters=[("scope_kind", "==", kind)] if kind else None)

    def values(self, metric: str) -> pd.Series:
        """Return one metric per condition, indexed by (scope, perturbation), at the finest scope scored.

        Cell type and batch where it was scored, else contexts, else the pool.
        """
        table = self.metrics
        wanted = (table["metric"] == metric) & (table["perturbation"] != _ALL) & table["value"].notna()
        of_metric = _rows(table, wanted)
        for kind in ("condition", "context", POOLED[0]):
            rows = _rows(of_metric, of_metric["scope_kind"] == kind)
            if len(rows):
                break
        index = pd.MultiIndex.from_arrays(
            [rows["scope"].astype(str), rows["perturbation"].astype(str)], names=_KEYS
        )
        return pd.Series(rows["value"].to_numpy(np.float64), index=index)

    def score(self, metric: str, scope: Scope = POOLED) -> tuple[float, int, int]:
        """Return a metric's mean over the perturbations where it is defined, that number, and all."""
        return self._scores.get((scope, metric), (float("nan"), 0, 0))

    def interval(self, metric: str, scope: Scope = POOLED) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of a metric's mean, or NaN where the run holds none."""
        low, high, *_ = self._further.get((scope, metric), _UNKNOWN)
        return low, high

    def chance(self, metric: str, scope: Scope = POOLED) -> float:
        """Return what the predictions score when they are given to other perturbations, or NaN if unknown."""
        return self._further.get((scope, metric), _UNKNOWN)[2]

    def split_sd(self, metric: str, scope: Scope = POOLED) -> float:
        """Return the SD of a ceiling's mean over random splits of the real cells, or NaN."""
        return self._further.get((scope, metric), _UNKNOWN)[3]

    @cached_property
    def alpha(self) -> float:
        """Return the q below which a gene counts as differentially expressed."""
        value = self.summary.get("alpha", (self.manifest.get("config") or {}).get("alpha", 0.05))
        return float(value)

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        """Return what evaluation found worth saying: records of kind, text and, mostly, count."""
        entries = self.summary.get("findings")
        return (
            [f for f in entries if isinstance(f, dict) and f.get("text")] if isinstance(entries, list) else []
        )

    @cached_property
    def collapse(self) -> pd.DataFrame | None:
        """Return the collapse check per scope (real, predicted, ratio, verdict), or None if it was not made."""
        return self._csv("collapse", ("scope_kind", "scope", "verdict"), ("scope_kind", *_COLLAPSE))

    @cached_property
    def conditions(self) -> pd.DataFrame | None:
        """Return the table of conditions (cell_type, batch, perturbation, ...), or None if there is none."""
        return self._csv("conditions", LABELS, LABELS)

    def _csv(self, name: str, texts: Sequence[str], needed: Sequence[str]) -> pd.DataFrame | None:
        """Return ``name``.csv, or None if the folder has none or it lacks a column. Columns ``texts`` are strings."""
        path = self.path / f"{name}.csv"
        if not path.is_file():
            return None
        types = dict.fromkeys(texts, str)
        table = tabular.read_csv(path, _AGAIN, dtype=types, keep_default_na=False, na_values=[""])
        return table if set(needed) <= set(table) else None

    @cached_property
    def _further(self) -> dict[tuple[Scope, str], tuple[float, float, float, float]]:
        """Return low and high end of the interval, chance, and SD over splits, of each scope and metric."""
        table = self.aggregate
        numbers = (
            pd.to_numeric(table[c], errors="coerce") if c in table else pd.Series(np.nan, table.index)
            for c in ("low", "high", "chance", "split_sd")
        )
        keys = (table[c].astype(str) for c in ("scope_kind", "scope", "metric"))
        rows = zip(*keys, *numbers, strict=True)
        return {((k, s), m): (float(a), float(b), float(c), float(d)) for k, s, m, a, b, c, d in rows}

    @cached_property
    def _scores(self) -> dict[tuple[Scope, str], tuple[float, int, int]]:
        columns = (self.aggregate[c] for c in _MEANS[:6])
        return {
            ((str(kind), str(scope)), str(metric)): (float(mean), int(defined), int(total))
            for kind, scope, metric, mean, defined, total in zip(*columns, strict=True)
            if kind != "condition"
        }


def _rows(table: pd.DataFrame, wanted: pd.Series) -> pd.DataFrame:
    return table.loc[wanted.to_numpy(bool)]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the folders of `evaluate`: models, external methods, built-in baselines, ceiling, other references.

    Runs of one method on one data set are told apart by the names of their folders.

    Raises
    ------
    UserError
        If there is no run, or a folder is not one of `evaluate`'s.
    """
    if not paths:
        raise UserError("no run to report: give one or more folders written by 'perturbdiff evaluate'")
    runs = [_read_run(Path(p)) for p in paths]
    _check_rules(runs)
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
    return sorted(runs, key=lambda r: (order[r.kind], not r.external, r.is_reference))


def _check_rules(runs: Sequence[Run]) -> None:
    """Refuse runs of one data set that were scored by different rules: their numbers mean different things."""
    by_dataset: dict[str, dict[str, Run]] = {}
    for run in runs:
        by_dataset.setdefault(run.dataset, {}).setdefault(run.rules, run)
    for dataset, first in by_dataset.items():
        if len(first) > 1:
            named = listing(
                f"{run.path} ({run.definition} {rules}".strip() + ")" for rules, run in first.items()
            )
            raise UserError(
                f"{dataset}: runs scored by different rules cannot stand in one table: {named}; evaluate them with the "
                "same definition, truth and target genes, or report them apart"
            )


def _renamed(run: Run, method: str) -> Run:
    return run if method == run.method else replace(run, method=method)


def _read_run(path: Path) -> Run:
    if other := confusion(existing(path, "folder of scores"), "a folder of scores"):
        raise UserError(f"{path}: {other}; give folders written by 'perturbdiff evaluate'")
    for name in ("metrics.parquet", "aggregate.csv"):
        if not (path / name).is_file():
            raise UserError(f"{path}: no {name}; is it a folder written by 'perturbdiff evaluate'?")
    provenance.verify(path)
    metrics = tabular.read_parquet(path / "metrics.parquet", _AGAIN)
    if lacking := [c for c in _COLUMNS if c not in metrics]:
        raise UserError(f"{path}/metrics.parquet: no column {listing(lacking)}; run evaluate again")
    for column in ("scope_kind", "scope", "perturbation", "metric"):
        metrics[column] = metrics[column].astype(str).astype("category")
    aggregate = tabular.read_csv(path / "aggregate.csv", _AGAIN, dtype={"scope": str}, keep_default_na=False)
    if lacking := [c for c in _MEANS if c not in aggregate]:
        raise UserError(f"{path}/aggregate.csv: no column {listing(lacking)}; run evaluate again")
    aggregate["nanmean"] = pd.to_numeric(aggregate["nanmean"], errors="coerce")
    summary = read_json(path / "summary.json")
    method = str(summary.get("method") or _first(metrics, "method") or path.name)
    dataset = str(summary.get("dataset") or _first(metrics, "dataset") or "data")
    manifest, record = provenance.read_manifest(path) or {}, read_json(path / "run.json")
    kind = _kind(method, summary)
    return Run(path, method, dataset, kind, metrics, aggregate, summary, manifest, record, method)


def _first(table: pd.DataFrame, column: str) -> str | None:
    return str(table[column].iloc[0]) if len(table) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's record, empty if it is missing.

    Raises
    ------
    UserError
        If it cannot be read, or holds something else.
    """
    if not path.is_file():
        return {}
    record = untrusted.read(path, "JSON")
    if not isinstance(record, dict):
        raise UserError(f"{path}: holds no record; copy it again or make it again")
    return record


def _kind(method: str, summary: dict[str, Any]) -> Kind:
    """Return what kind of run this is: the predictions file says it, else the method's name does."""
    if method == "ceiling" or summary.get("kind") in ("ceiling", REFERENCE) or summary.get("ceiling") is True:
        return "ceiling"
    made_by = Method.from_json(summary.get("made_by"))
    if made_by.baseline or made_by.recipe:
        return "baseline" if made_by.baseline else "model"
    from perturbdiff.baselines.simple import BASELINES  # here, as they load what reads stores

    return "baseline" if method in BASELINES else "model"


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: its last part, with its folder's before it where that is not enough."""
    names = []
    for path in paths:
        name = path.name
        if sum(p.name == path.name for p in paths) > 1:
            name = f"{path.absolute().parent.name}/{path.name}"
        again = sum(n == name or n.startswith(f"{name} #") for n in names)
        names.append(f"{name} #{again + 1}" if again else name)
    return names
