"""The tables of scored counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from perturbdiff.evaluation.cell_eval2.anchors import Ends, ScopeEnds
from perturbdiff.evaluation.cell_eval2.measurements import Profile, Side
from perturbdiff.evaluation.cell_eval2.metrics import SCORED, Rules
from perturbdiff.evaluation.cell_eval2.panels import Panel
from perturbdiff.evaluation.cell_eval2.scores import SCORE, Levels, Scores, table
from perturbdiff.evaluation.score_tables import differential_table, row_groups
from perturbdiff.evaluation.scoring.scopes import Scope

_CONTEXTS: Scope = ("contexts", "mean of contexts")


@dataclass(frozen=True)
class Scored:
    """One context: values per perturbation of the method and of both ends, and their means.

    Attributes
    ----------
    panel
        Its cells.
    key
        Digest of what the ends depend on.
    perturbations
        Their names, sorted; M of them.
    controls
        Profile of the real controls.
    num_tested
        Number of genes that are tested.
    sizes
        Size of each perturbation's real change, float64 [M].
    num_real, num_predicted
        Number of cells, int64 [M].
    method
        Values of the method.
    ends
        Values of both ends.
    point
        Means over perturbations.
    draws
        Means over resamples of them, if there are any.
    """

    panel: Panel
    key: str
    perturbations: tuple[str, ...]
    controls: Profile
    num_tested: int
    sizes: np.ndarray
    num_real: np.ndarray
    num_predicted: np.ndarray
    method: Scores
    ends: Ends
    point: Levels
    draws: Levels | None

    @property
    def made(self) -> ScopeEnds:
        """The ends, as they are kept."""
        return ScopeEnds(self.panel.scope, self.key, self.perturbations, self.ends)


def metric_rows(one: Scored) -> pd.DataFrame:
    """Return a row per perturbation and metric, with the values of both ends beside it."""
    frames = []
    for name, values in one.method.items():
        splits = [split[name] for split in one.ends.replicates]
        frames.append(
            pd.DataFrame(
                {
                    "scope_kind": one.panel.scope[0],
                    "scope": one.panel.scope[1],
                    "perturbation": list(one.perturbations),
                    "metric": name,
                    "value": values,
                    "status": np.where(np.isnan(values), "absent", "ok"),
                    "n_cells": one.num_real,
                    "n_predicted": one.num_predicted,
                    "baseline": one.ends.baseline[name],
                    "replicate": np.mean(splits, axis=0) if splits else np.nan,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def aggregate(scored: Sequence[Scored], rules: Rules) -> pd.DataFrame:
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


def splits(scored: Sequence[Scored], rules: Rules) -> pd.DataFrame:
    """Return the mean of each metric in each halving."""
    rows = [
        (*one.panel.scope, seed, name, float(value[0]))
        for one in scored
        for seed, split in zip(rules.split_seeds(), one.point.splits, strict=False)
        for name, value in split.items()
    ]
    return pd.DataFrame(rows, columns=pd.Index(["scope_kind", "scope", "seed", "metric", "value"]))


def conditions(scored: Sequence[Scored]) -> pd.DataFrame:
    """Return a row per condition: labels, context, numbers of cells, and the size of the perturbation's real change."""
    rows = []
    for one in scored:
        place = {name: i for i, name in enumerate(one.perturbations)}
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
                    "n_cells": int(one.num_real[i]) if first else 0,
                    "n_predicted": int(one.num_predicted[i]) if first else 0,
                    "effect": one.sizes[i],
                }
            )
    return pd.DataFrame(rows)


def tests_of(scope: Scope, side: Side, genes: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the tests of several perturbations at a time, a row per perturbation and tested gene."""
    names = [genes[int(g)] for g in side.genes]
    control = side.control.bulk[side.genes].astype(np.float32)
    for rows in row_groups(len(side.perturbations), len(names)):
        p = side.p[rows]
        columns = {
            "p": p,
            "q": np.stack([side.q(place) for place in range(len(side.p))[rows]]).astype(np.float32),
            "log2fc": side.fold[rows].astype(np.float32),
            "mean": side.bulk[rows][:, side.genes].astype(np.float32),
            "control_mean": np.broadcast_to(control, p.shape),
        }
        yield differential_table(scope, side.perturbations[rows], names, columns)


def headline(aggregate: pd.DataFrame) -> dict[str, Any]:
    """Return the scaled scores of the first scope, and their mean."""
    first = aggregate[aggregate["scope"] == aggregate["scope"].iloc[0]]
    scaled = dict(zip(first["metric"], first["scaled"].astype(float), strict=True))
    return {name: scaled[name] for name in (SCORE, *SCORED)}
