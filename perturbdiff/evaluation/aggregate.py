"""From one value per perturbation to one per scope, and from several runs to paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

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
