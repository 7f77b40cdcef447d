"""Scaled scores: 0 is the mean-response baseline, 1 a replicate; with intervals over perturbations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.evaluation.cell_eval2.metrics import METRICS, NORM_PARTS, SCORED
from perturbdiff.evaluation.cell_eval2.scores import Scores, means

SCORE = "score"
"""Name of the mean of the scaled scores in the tables."""
_TAILS = (2.5, 97.5)
_HELD = 4_000_000  # weights held at a time


@dataclass(frozen=True)
class Levels:
    """The mean of each metric, and of the scored ones both ends and the scaled score: float64 [draws] each.

    Attributes
    ----------
    method, baseline
        Means of every metric.
    replicate
        The same, means over the halvings; empty without replicates.
    splits
        Means of every halving.
    scaled
        Scaled scores of the six, and `SCORE`, their mean; NaN where one of them is not defined.
    """

    method: Scores
    baseline: Scores
    replicate: Scores
    splits: list[Scores]
    scaled: Scores


def levels(
    method: Scores, baseline: Scores, splits: Sequence[Scores], weights: np.ndarray | None = None
) -> Levels:
    """Return the means over perturbations, each drawn as often as ``weights`` [draws, M] say."""
    ours, low = means(method, weights), means(baseline, weights)
    each = [means(split, weights) for split in splits]
    high = {name: np.mean([one[name] for one in each], axis=0) for name in each[0]} if each else {}
    scaled = {name: scale(name, ours[name], low[name], high[name]) for name in SCORED} if high else {}
    if scaled:
        scaled[SCORE] = np.mean(list(scaled.values()), axis=0)
    return Levels(ours, low, high, each, scaled)


def scale(name: str, value: np.ndarray, baseline: np.ndarray, replicate: np.ndarray) -> np.ndarray:
    """Return (value − baseline) / (replicate − baseline), cut to the metric's ends.

    NaN where the replicate is not better than the baseline: this data set cannot tell. Where the method's mean is not
    defined it has the metric's lowest score.
    """
    metric = METRICS[name]
    room = replicate - baseline if metric.direction == "higher" else baseline - replicate
    worst = metric.floor if metric.floor is not None else np.inf
    gain = np.where(np.isnan(value), worst, value) - baseline
    gain = gain if metric.direction == "higher" else -gain
    found = np.divide(gain, room, out=np.full(np.shape(room), np.nan), where=room > 0)
    return np.clip(found, metric.low, metric.high)


def drawn_levels(
    method: Scores, baseline: Scores, splits: Sequence[Scores], *, draws: int, seed: tuple[int, int]
) -> Levels:
    """Return levels of ``draws`` resamples of the perturbations; the same ones for the method and both ends."""
    num = len(next(iter(method.values())))
    rng = np.random.default_rng(seed)
    step = max(_HELD // num, 1)
    parts = []
    for first in range(0, draws, step):
        size = min(step, draws - first)
        weights = rng.multinomial(num, np.full(num, 1.0 / num), size=size).astype(float)
        parts.append(levels(method, baseline, splits, weights))

    def joined(tables: Sequence[Mapping[str, np.ndarray]]) -> Scores:
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    return Levels(
        joined([p.method for p in parts]),
        joined([p.baseline for p in parts]),
        joined([p.replicate for p in parts]),
        [],
        joined([p.scaled for p in parts]),
    )


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of the draws that are defined; NaN if fewer than nine in ten are."""
    defined = draws[~np.isnan(draws)]
    if len(defined) < 0.9 * len(draws) or len(defined) < 2:
        return float("nan"), float("nan")
    low, high = np.percentile(defined, _TAILS)
    return float(low), float(high)


def table(point: Levels, draws: Levels | None, method: Scores, metrics: Sequence[str]) -> pd.DataFrame:
    """Return one row per metric and one of `SCORE`, which stands first.

    Returns
    -------
    DataFrame
        metric, mean, nanmean (the same), median, low, high (95 % interval over perturbations), n_defined, n, direction,
        scored, baseline, replicate, replicate_sd (over the halvings), scaled, scaled_low, scaled_high.
    """
    return pd.DataFrame([_row(name, point, draws, method) for name in (SCORE, *metrics)])


def _row(name: str, point: Levels, draws: Levels | None, method: Scores) -> dict[str, Any]:
    mean = name == SCORE
    values = method.get(name, method[NORM_PARTS[0]])  # of the ratio: where its numerator is defined
    defined = values[~np.isnan(values)]
    value = _first(point.scaled if mean else point.method, name)
    low, high = _ends({} if draws is None else draws.scaled if mean else draws.method, name)
    scaled_low, scaled_high = _ends({} if draws is None else draws.scaled, name)
    splits = [float(split[name][0]) for split in point.splits if name in split]
    return {
        "metric": name,
        "mean": value,
        "nanmean": value,
        "median": float(np.median(defined)) if defined.size and name in method else float("nan"),
        "low": low,
        "high": high,
        "n_defined": len(defined),
        "n": len(values),
        "direction": "higher" if mean else METRICS[name].direction,
        "scored": not mean and METRICS[name].scored,
        "baseline": _first(point.baseline, name),
        "replicate": _first(point.replicate, name),
        "replicate_sd": float(np.std(splits)) if splits else float("nan"),
        "scaled": _first(point.scaled, name),
        "scaled_low": scaled_low,
        "scaled_high": scaled_high,
    }


def _first(found: Mapping[str, np.ndarray], name: str) -> float:
    return float(found[name][0]) if name in found else float("nan")


def _ends(draws: Mapping[str, np.ndarray], name: str) -> tuple[float, float]:
    return interval(draws[name]) if name in draws else (float("nan"), float("nan"))
