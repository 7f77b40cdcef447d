"""From one value per perturbation to one per scope, and from several runs to paired comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import wilcoxon

from perturbdiff.errors import UserError
from perturbdiff.evaluation.catalogue import METRICS
from perturbdiff.evaluation.metrics import DEFINITION
from perturbdiff.evaluation.scoring import POOLED, Scored

ALL_PERTURBATIONS = "*"  # in the perturbation column: one number for all of them (ES)
_BOOTSTRAP = 2000
_DISTRIBUTION = [name for name, m in METRICS.items() if m.family == "distribution"]


def tidy(scored: Scored, values: dict[tuple[str, str], dict[str, np.ndarray]]) -> pd.DataFrame:
    """Return one row per scope, perturbation and metric.

    Parameters
    ----------
    scored
        The pass over the cells.
    values
        For each scope what `catalogue.score` returned.

    Returns
    -------
    DataFrame
        scope_kind (pooled, context, condition), scope, perturbation, metric, value, status, n_cells (real),
        n_predicted, definition. ``status`` is ``ok``; ``absent`` (cell-eval leaves the perturbation out of the
        mean); ``undefined`` (cell-eval's mean becomes NaN); ``n/a`` (no number can mean anything here).
    """
    frames = []
    for (kind, label), metrics in values.items():
        comparison, sizes = scored.comparisons[kind, label], scored.sizes[kind, label]
        n = np.array([sizes[p] for p in comparison.perturbations])
        for name, found in metrics.items():
            single = not METRICS[name].per_perturbation
            frames.append(
                pd.DataFrame(
                    {
                        "scope_kind": kind,
                        "scope": label,
                        "perturbation": [ALL_PERTURBATIONS] if single else list(comparison.perturbations),
                        "metric": name,
                        "value": found,
                        "status": _status(name, found, comparison.real.significant),
                        "n_cells": n[:, 0].sum() if single else n[:, 0],
                        "n_predicted": n[:, 1].sum() if single else n[:, 1],
                    }
                )
            )
    frames.append(_conditions(scored.conditions))
    return pd.concat(frames, ignore_index=True).assign(definition=DEFINITION)


def _status(name: str, values: np.ndarray, significant: np.ndarray) -> np.ndarray:
    status = np.where(np.isnan(values), "undefined", "ok").astype(object)
    if METRICS[name].needs_real_de:
        status[~significant.any(axis=1)] = "absent"
    alone = {"ES": significant.any(axis=1).sum() < 2}.get(
        name, name.startswith("PDS") and len(significant) < 2
    )
    if alone:
        status[:] = "n/a"
    return status


def _conditions(conditions: pd.DataFrame) -> pd.DataFrame:
    keys = ["scope", "perturbation", "n_cells", "n_predicted"]
    table = conditions.assign(scope=conditions["cell_type"] + "|" + conditions["batch"])
    table = table.melt(id_vars=keys, value_vars=_DISTRIBUTION, var_name="metric", value_name="value")
    return table.assign(
        scope_kind="condition", status=np.where(table["value"].isna(), "undefined", "ok").astype(object)
    )


def aggregate(metrics: pd.DataFrame, contexts: dict[str, list[tuple[str, str]]]) -> pd.DataFrame:
    """Return one row per scope and metric.

    Parameters
    ----------
    metrics
        As `tidy` returns them.
    contexts
        For each context its conditions as (scope, perturbation), to average the metrics of the distribution
        over them; the pooled scope takes all conditions.

    Returns
    -------
    DataFrame
        scope_kind, scope, metric, ``mean`` (cell-eval's rule: absent values are left out, one undefined value
        makes it NaN), ``nanmean`` and ``median`` over the defined values, ``n_defined``, ``n``, direction,
        definition. The scope_kind ``contexts`` is the mean over contexts of their nanmeans.
    """
    parts = [metrics]
    spread = pd.DataFrame(metrics[metrics["scope_kind"] == "condition"])
    if len(spread):
        key = pd.MultiIndex.from_arrays([spread["scope"], spread["perturbation"]])
        parts.append(spread.assign(scope_kind=POOLED, scope=POOLED))
        for label, members in contexts.items():
            parts.append(pd.DataFrame(spread[key.isin(members)]).assign(scope_kind="context", scope=label))
    keys = ["scope_kind", "scope", "metric"]
    grouped: Any = pd.concat(parts, ignore_index=True).groupby(keys, sort=False)
    rows = [{**dict(zip(keys, key, strict=True)), **_summary(group)} for key, group in grouped]
    table = pd.concat([pd.DataFrame(rows), _over_contexts(rows)], ignore_index=True)
    kinds, names = (POOLED, "contexts", "context", "condition"), list(METRICS)
    place = pd.DataFrame(
        {
            "kind": [kinds.index(k) for k in table["scope_kind"]],
            "scope": table["scope"],
            "metric": [names.index(m) for m in table["metric"]],
        }
    )
    order = place.sort_values(["kind", "scope", "metric"], kind="stable").index
    table = table.loc[order].reset_index(drop=True)
    return table.assign(direction=[METRICS[m].direction for m in table["metric"]], definition=DEFINITION)


def _summary(group: pd.DataFrame) -> dict[str, float]:
    values = group["value"].to_numpy(np.float64)
    counted = values[(group["status"] != "absent").to_numpy()]
    defined = values[~np.isnan(values)]
    return {
        "mean": float(counted.mean()) if counted.size else float("nan"),
        "nanmean": float(defined.mean()) if defined.size else float("nan"),
        "median": float(np.median(defined)) if defined.size else float("nan"),
        "n_defined": int(defined.size),
        "n": len(values),
    }


def _over_contexts(rows: Sequence[dict]) -> pd.DataFrame:
    found = pd.DataFrame([r for r in rows if r["scope_kind"] == "context"])
    if found.empty:
        return found
    rows = []
    for metric, group in found.groupby("metric", sort=False):
        values = group["nanmean"].to_numpy(np.float64)
        statuses = group.assign(value=values, status="ok")
        rows.append(
            {"scope_kind": "contexts", "scope": "mean of contexts", "metric": metric, **_summary(statuses)}
        )
    return pd.DataFrame(rows)


def read_runs(folders: Iterable[Path]) -> pd.DataFrame:
    """Return the tidy metrics of several runs of `evaluate`, with the folder's name in column ``run``.

    Raises
    ------
    UserError
        If a folder is not one of `evaluate`'s.
    """
    tables = []
    for folder in map(Path, folders):
        path = folder / "metrics.parquet"
        if not path.is_file():
            raise UserError(f"{folder}: no metrics.parquet; give folders written by 'perturbdiff evaluate'")
        tables.append(pd.read_parquet(path).assign(run=folder.name))
    if not tables:
        raise UserError("no run given; give folders written by 'perturbdiff evaluate'")
    return pd.concat(tables, ignore_index=True)


def paired(
    runs: pd.DataFrame,
    method: str,
    against: str,
    *,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare two methods on the conditions where both are defined.

    A condition is a perturbation in a context (or, for metrics of the distribution, in a cell type and batch).

    Parameters
    ----------
    runs
        As `read_runs` returns it.
    method, against
        Two names in column ``method``.
    metrics
        Names; none: all that have a better direction and one value per perturbation.
    seed
        Of the bootstrap.

    Returns
    -------
    DataFrame
        One row per dataset and metric: n, win_rate of ``method`` (a tie is half), difference (mean of
        method − against, in the metric's unit), low and high (95 % bootstrap interval over conditions),
        p (Wilcoxon signed-rank, two-sided; NaN if all differences are zero), direction.

    Raises
    ------
    UserError
        If a method is not in ``runs``.
    """
    for name in (method, against):
        if name not in set(runs["method"]):
            raise UserError(f"no run of method '{name}'; there are {', '.join(sorted(set(runs['method'])))}")
    kinds = np.where(runs["metric"].isin(_DISTRIBUTION), "condition", "context")
    table = runs[(runs["scope_kind"] == kinds) & (runs["perturbation"] != ALL_PERTURBATIONS)]
    keys = ["dataset", "metric", "scope", "perturbation"]
    values = table.pivot_table(index=keys, columns="method", values="value", observed=True)
    rows = []
    groups: Any = values.groupby(["dataset", "metric"], sort=False)
    for (dataset, metric), group in groups:
        wanted = METRICS[metric].direction != "none" if metrics is None else metric in metrics
        if wanted and method in group and against in group:
            both = group[[method, against]].dropna()
            if len(both):
                a, b = both[method].to_numpy(np.float64), both[against].to_numpy(np.float64)
                rows.append({"dataset": dataset, "metric": metric, **_paired(a, b, metric, seed)})
    columns = ["dataset", "metric", "n", "win_rate", "difference", "low", "high", "p", "direction"]
    return pd.DataFrame(rows, columns=pd.Index(columns))


def _paired(a: np.ndarray, b: np.ndarray, metric: str, seed: int) -> dict[str, object]:
    direction = METRICS[metric].direction
    if direction == "one":
        gain = np.abs(np.log(np.maximum(b, 1e-9))) - np.abs(np.log(np.maximum(a, 1e-9)))
    else:
        gain = (a - b) * (1.0 if direction == "higher" else -1.0)
    difference = a - b
    rng = np.random.default_rng(seed)
    draws = [difference[rng.integers(len(a), size=len(a))].mean() for _ in range(_BOOTSTRAP)]
    low, high = np.percentile(draws, (2.5, 97.5))
    return {
        "n": len(a),
        "win_rate": float(((gain > 0) + 0.5 * (gain == 0)).mean()),
        "difference": float(difference.mean()),
        "low": float(low),
        "high": float(high),
        "p": float(np.asarray(wilcoxon(gain))[1]) if np.any(gain != 0) else float("nan"),
        "direction": direction,
    }
