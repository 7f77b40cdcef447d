"""From one value per perturbation to one per scope: means with intervals and chance, also over random splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.metrics.differential import DEFAULT
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.scoring.intervals import bootstrap_means
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope

ALL_PERTURBATIONS = "*"  # in the perturbation column: one number for all of them (ES)
_OF_CELLS = [name for name, m in METRICS.items() if m.compute is None]
_ROW = ("scope_kind", "scope", "perturbation", "metric", "value", "status", "n_cells", "n_predicted")
_OVER_CONTEXTS = ("contexts", "mean of contexts")


def scope_rows(
    scope: Scope,
    comparison: Comparison,
    values: Mapping[str, np.ndarray],
    sizes: Mapping[str, tuple[int, int]],
) -> pd.DataFrame:
    """Return one row per perturbation and metric of a scope.

    Parameters
    ----------
    values
        What `catalogue.score` returned for ``comparison``.
    sizes
        Real and predicted cells of each perturbation.

    Returns
    -------
    DataFrame
        scope_kind, scope, perturbation, metric, value, status, n_cells (real), n_predicted. ``status`` is ``ok``;
        ``absent`` (cell-eval leaves the perturbation out of the mean); ``undefined`` (cell-eval's mean becomes
        NaN); ``n/a`` (no number can mean anything here).
    """
    n = np.array([sizes[p] for p in comparison.perturbations])
    frames = []
    for name, found in values.items():
        single = not METRICS[name].per_perturbation
        frames.append(
            pd.DataFrame(
                {
                    "scope_kind": scope[0],
                    "scope": scope[1],
                    "perturbation": [ALL_PERTURBATIONS] if single else list(comparison.perturbations),
                    "metric": name,
                    "value": found,
                    "status": _status(name, found, comparison),
                    "n_cells": n[:, 0].sum() if single else n[:, 0],
                    "n_predicted": n[:, 1].sum() if single else n[:, 1],
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _status(name: str, values: np.ndarray, comparison: Comparison) -> np.ndarray:
    status = np.where(np.isnan(values), "undefined", "ok").astype(object)
    if METRICS[name].per_perturbation:
        status[METRICS[name].absent(comparison)] = "absent"
    alone = METRICS[name].coupled and len(comparison.perturbations) < 2 and np.isnan(values).all()
    if (comparison.num_real > 0).sum() < 2 if name == "ES" else alone:
        status[:] = "n/a"
    return status


def condition_rows(conditions: pd.DataFrame) -> pd.DataFrame:
    """Return one row per condition and metric of its cells, in the columns of `scope_rows`."""
    keys = ["scope", "perturbation", "n_cells", "n_predicted"]
    table = conditions.assign(scope=conditions["cell_type"] + "|" + conditions["batch"])
    metrics = [name for name in _OF_CELLS if name in table]
    table = table.melt(id_vars=keys, value_vars=metrics, var_name="metric", value_name="value")
    status = np.where(table["value"].isna(), "undefined", "ok").astype(object)
    return pd.DataFrame(table.assign(scope_kind="condition", status=status), columns=pd.Index(_ROW))


def condition_chance(conditions: pd.DataFrame) -> pd.DataFrame:
    """Return scope_kind, scope, metric and chance: distances to another perturbation's cells, means of a scope."""
    metrics = [name for name in _OF_CELLS if f"chance_{name}" in conditions]
    scopes: list[tuple[Scope, pd.DataFrame]] = [((POOLED, POOLED), conditions)]
    named = conditions[conditions["context"] != ""]
    labels = sorted(set(named["context"]))
    scopes += [(("context", str(x)), pd.DataFrame(named[named["context"] == x])) for x in labels]
    rows = [(*scope, name, table[f"chance_{name}"].mean()) for scope, table in scopes for name in metrics]
    return pd.DataFrame(rows, columns=pd.Index(["scope_kind", "scope", "metric", "chance"]))


def aggregate(
    metrics: pd.DataFrame,
    contexts: Mapping[str, Sequence[tuple[str, str]]],
    *,
    chance: pd.DataFrame | None = None,
    draws: int = 0,
    seed: int = 0,
    definition: str = DEFAULT,
) -> pd.DataFrame:
    """Return one row per scope and metric.

    Parameters
    ----------
    metrics
        Rows of `scope_rows` and `condition_rows`, those of a metric in the order of the perturbations' names.
    contexts
        For each context its conditions as (scope, perturbation), to average the metrics of the distribution
        over them; the pooled scope takes all conditions.
    chance
        scope_kind, scope, metric, chance: what the table shows as chance.
    draws, seed
        Of the intervals; 0 draws: none.
    definition
        Name of the definition, for the table.

    Returns
    -------
    DataFrame
        scope_kind, scope, metric, ``mean`` (cell-eval's rule: absent values are left out, one undefined value
        makes it NaN), ``nanmean`` and ``median`` over the defined values, ``low`` and ``high`` (95 % bootstrap
        interval of ``nanmean`` over perturbations, for metrics of the distribution over conditions), ``n_defined``,
        ``n``, ``chance``, direction, definition. The scope_kind ``contexts`` is the mean over contexts of their
        nanmeans; its intervals draw within the contexts. Single conditions have no intervals.
    """
    parts = _scopes(metrics, contexts)
    rows, inside = [], []
    for (kind, label), table in parts:
        summaries = [_summary(str(name), group) for name, group in table.groupby("metric", sort=False)]
        if kind in (POOLED, "context"):
            ends = _intervals(table, draws, seed)
            summaries = [row | ends.get(row["metric"], {}) for row in summaries]
        rows += [{"scope_kind": kind, "scope": label, **row} for row in summaries]
        if kind == "context":
            inside.append(table.assign(scope=label))
    rows += _over_contexts(rows, inside, draws, seed)
    columns = ["mean", "nanmean", "median", "low", "high", "n_defined", "n"]
    table = pd.DataFrame(rows, columns=pd.Index(["scope_kind", "scope", "metric", *columns]))
    table = _ordered(table.assign(chance=_chance(table, chance)))
    return table.assign(direction=[METRICS[m].direction for m in table["metric"]], definition=definition)


def _scopes(
    metrics: pd.DataFrame, contexts: Mapping[str, Sequence[tuple[str, str]]]
) -> list[tuple[Scope, pd.DataFrame]]:
    """Return the rows of each scope; those of conditions also in the pool and in their context."""
    by_scope: dict[Scope, list[pd.DataFrame]] = {}
    grouped: Any = metrics.groupby(["scope_kind", "scope"], sort=False)
    for scope, table in grouped:
        by_scope.setdefault(scope, []).append(table)
    spread = pd.DataFrame(metrics[metrics["scope_kind"] == "condition"])
    if len(spread):
        by_scope.setdefault((POOLED, POOLED), []).append(spread)
        key = pd.MultiIndex.from_arrays([spread["scope"], spread["perturbation"]])
        for label, members in contexts.items():
            by_scope.setdefault(("context", label), []).append(pd.DataFrame(spread[key.isin(list(members))]))
    return [(scope, pd.concat(tables, ignore_index=True)) for scope, tables in by_scope.items()]


def _summary(metric: str, group: pd.DataFrame) -> dict[str, Any]:
    values = group["value"].to_numpy(np.float64)
    counted = values[(group["status"] != "absent").to_numpy()]
    defined = values[~np.isnan(values)]
    return {
        "metric": metric,
        "mean": float(counted.mean()) if counted.size else float("nan"),
        "nanmean": float(defined.mean()) if defined.size else float("nan"),
        "median": float(np.median(defined)) if defined.size else float("nan"),
        "low": float("nan"),
        "high": float("nan"),
        "n_defined": int(defined.size),
        "n": len(values),
    }


def _intervals(
    table: pd.DataFrame, draws: int, seed: int, groups: str | None = None
) -> dict[str, dict[str, float]]:
    """Return ``low`` and ``high`` of each metric that is averaged over perturbations or conditions."""
    intervals: dict[str, dict[str, float]] = {}
    averaged = table[table["perturbation"] != ALL_PERTURBATIONS]
    by_rows: dict[int, list[tuple[str, pd.DataFrame]]] = {}  # metrics of perturbations, and of conditions
    for name, rows in averaged.groupby("metric", sort=False) if draws else ():
        by_rows.setdefault(len(rows), []).append((str(name), pd.DataFrame(rows)))
    for alike in by_rows.values():
        labels = None if groups is None else alike[0][1][groups].to_numpy()
        values = np.stack([rows["value"].to_numpy(np.float64) for _, rows in alike], axis=1)
        ends = bootstrap_means(values, draws=draws, seed=seed, groups=labels)
        intervals |= {
            name: {"low": float(low), "high": float(high)}
            for (name, _), low, high in zip(alike, *ends, strict=True)
        }
    return intervals


def _over_contexts(
    rows: Sequence[dict[str, Any]], inside: Sequence[pd.DataFrame], draws: int, seed: int
) -> list[dict[str, Any]]:
    """Return the means over contexts."""
    if not inside:
        return []
    of_contexts = pd.DataFrame([r for r in rows if r["scope_kind"] == "context"])
    ends = _intervals(pd.concat(inside, ignore_index=True), draws, seed, groups="scope")
    means = []
    for metric, group in of_contexts.groupby("metric", sort=False):
        statuses = group.assign(value=group["nanmean"].to_numpy(np.float64), status="ok")
        row = _summary(str(metric), statuses) | ends.get(str(metric), {})
        means.append({"scope_kind": _OVER_CONTEXTS[0], "scope": _OVER_CONTEXTS[1], **row})
    return means


def _chance(table: pd.DataFrame, chance: pd.DataFrame | None) -> np.ndarray:
    """Return the chance level of each row; for the mean over contexts the mean of theirs."""
    if chance is None or chance.empty:
        return np.full(len(table), np.nan)
    known = {(k, s, m): float(c) for k, s, m, c in chance.itertuples(index=False)}
    inside = chance[(chance["scope_kind"] == "context") & chance["chance"].notna()]
    for metric, group in inside.groupby("metric"):
        known[(*_OVER_CONTEXTS, str(metric))] = float(group["chance"].mean())
    keys = table[["scope_kind", "scope", "metric"]].itertuples(index=False, name=None)
    return np.array([known.get(key, float("nan")) for key in keys], np.float64)


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Sort by scope, pool first, and by the catalogue."""
    kinds, names = (POOLED, "contexts", "context", "condition"), list(METRICS)
    place = pd.DataFrame(
        {
            "kind": [kinds.index(k) for k in table["scope_kind"]],
            "scope": table["scope"],
            "metric": [names.index(m) for m in table["metric"]],
        }
    )
    order = place.sort_values(["kind", "scope", "metric"], kind="stable").index
    return table.loc[order].reset_index(drop=True)


_PREFIX = "split"
_KEYS = ["scope_kind", "scope", "metric"]


def joined(
    splits: Sequence[pd.DataFrame], values: Sequence[str], *, keep: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the first table with the means over all splits, and the values of each split beside them.

    Parameters
    ----------
    splits
        Tables with the same rows in the same order.
    values
        Columns to average over the splits where they are defined.
    keep
        Those of ``values`` whose numbers of each split become columns of their own, for `taken_apart`. A row that
        is ``ok`` in any split is so in the result.
    """
    table, beside = splits[0].copy(), dict[str, np.ndarray]()
    for name in values:
        numbers = np.stack([split[name].to_numpy(np.float64) for split in splits])
        count = (~np.isnan(numbers)).sum(axis=0)
        total = np.nansum(numbers, axis=0)
        table[name] = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
        if name in keep:
            beside |= {f"{_PREFIX} {k} {name}": of_split for k, of_split in enumerate(numbers)}
    if "status" in table:
        fine = np.any([split["status"].to_numpy() == "ok" for split in splits], axis=0)
        table["status"] = np.where(fine, "ok", table["status"].to_numpy(object))
    return pd.concat([table, pd.DataFrame(beside, index=table.index)], axis=1) if beside else table


def taken_apart(table: pd.DataFrame) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """Return a table of `joined` without the numbers of single splits, and that of each split; none: no list.

    Where a value is not defined in a split, that split has the mean of the others, so that the means of the splits
    are over the same rows, and their mean is that of the table.
    """
    extra = [c for c in table.columns if str(c).startswith(f"{_PREFIX} ")]
    plain = pd.DataFrame(table.drop(columns=extra))
    found: dict[str, dict[str, pd.Series]] = {}
    for column in extra:
        _, number, name = str(column).split(" ", 2)
        found.setdefault(number, {})[name] = pd.Series(table[column]).fillna(table[name])
    return plain, [plain.assign(**columns) for columns in found.values()]


def deviation(means: pd.DataFrame, of_splits: Sequence[pd.DataFrame]) -> np.ndarray:
    """Return the SD over splits (n − 1) of the mean of each scope and metric, NaN with a single split.

    Parameters
    ----------
    means
        What `aggregate.aggregate` made of the joined tables: the result follows its rows.
    of_splits
        What it made of each split.
    """
    index = pd.MultiIndex.from_frame(pd.DataFrame(means[_KEYS]))
    each = [split.set_index(_KEYS)["nanmean"].reindex(index).to_numpy(np.float64) for split in of_splits]
    if len(each) < 2:
        return np.full(len(means), np.nan)
    return np.std(np.stack(each), axis=0, ddof=1)
