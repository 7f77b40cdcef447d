"""All metrics of one context: values per perturbation, gates and worst values applied, their means, and scaled scores.

On the scale, 0 is the mean-response baseline and 1 a replicate. Intervals are over perturbations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.evaluation.cell_eval2.de_metrics import (
    direction_scores,
    scored_direction_scores,
    scored_set_scores,
    set_scores,
)
from perturbdiff.evaluation.cell_eval2.expression_metrics import expression_scores
from perturbdiff.evaluation.cell_eval2.measurements import Pair
from perturbdiff.evaluation.cell_eval2.metrics import METRICS, NORM, NORM_PARTS, SCORED, Gate, Rules

Scores = dict[str, np.ndarray]
"""Values per perturbation of each metric, float64 [M]."""


def score(pair: Pair, rules: Rules) -> Scores:
    """Return the metrics of the profile that have a value per perturbation, float64 [M] each.

    NaN: the real cells do not allow the metric for this perturbation, whatever the prediction. What a prediction
    leaves undefined where the real cells allow it has the worst value, so that silence never pays.
    """
    found = expression_scores(pair, rules)
    if rules.profile == "v2":
        found |= {**set_scores(pair, rules), **direction_scores(pair, rules)}
    else:
        found |= {**scored_set_scores(pair, rules), **scored_direction_scores(pair, rules)}
    scores = {}
    for name in rules.metrics:
        if name == NORM:
            continue
        metric, values = METRICS[name], found[name]
        if metric.gate:
            inside, constant = _gate(metric.gate, pair, rules)
            if metric.worst is not None:
                values = np.where(constant | ~np.isfinite(values), metric.worst, values)
            values = np.where(inside, values, np.nan)
        scores[name] = values
    return scores


def means(scores: Scores, weights: np.ndarray | None = None) -> Scores:
    """Return the mean of each metric over the perturbations where it counts.

    Parameters
    ----------
    scores
        What `score` returned.
    weights
        How often each perturbation is drawn, float64 [draws, M]; by default each once.

    Returns
    -------
    dict
        float64 [draws] each; NaN where no perturbation counts. `NORM` is the ratio of the sums of its two parts.
    """
    num = len(next(iter(scores.values())))
    weights = np.ones((1, num)) if weights is None else weights
    found = {name: _mean(values, weights) for name, values in scores.items()}
    if set(NORM_PARTS) <= set(scores):
        top, bottom = (scores[name] for name in NORM_PARTS)
        both = np.isfinite(top) & np.isfinite(bottom)
        top, bottom = (weights @ np.where(both, part, 0.0) for part in (top, bottom))
        found[NORM] = np.divide(top, bottom, out=np.full(len(top), np.nan), where=bottom > 0)
    return found


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    defined = ~np.isnan(values)
    counted = weights @ defined.astype(float)
    total = weights @ np.where(defined, values, 0.0)
    return np.divide(total, counted, out=np.full(len(counted), np.nan), where=counted > 0)


def _gate(gate: Gate, pair: Pair, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """Return which perturbations the real cells admit, and for which of them the prediction is constant: bool [M]."""
    real, predicted = pair.real, pair.predicted
    never = np.zeros(len(real.perturbations), bool)
    if gate == "change":
        change = predicted.change
        return np.ptp(real.change, axis=1) > 0, np.ptp(change, axis=1) == 0
    significant = real.significant
    tested = np.isfinite(real.p)
    if gate == "tested":
        return tested.sum(axis=1) >= rules.min_genes, never
    if gate == "direction":
        return (tested & (real.fold != 0)).sum(axis=1) >= rules.min_genes, never
    if gate == "counts":
        return _counts_gate(pair, significant, rules)
    num = significant.sum(axis=1)
    if gate == "de":
        return num >= rules.min_genes, never
    if gate == "two_classes":
        return (num >= rules.min_genes) & (num < tested.sum(axis=1)), never
    chosen = {"fold": significant, "fold_up": significant & (real.fold > 0)}
    genes = chosen.get(gate, significant & (real.fold < 0))
    fold = np.where(np.isfinite(predicted.p), predicted.fold, 0.0)
    enough = genes.sum(axis=1) >= rules.min_genes
    return enough & _varies(real.fold, genes), ~_varies(fold, genes)


def _varies(values: np.ndarray, genes: np.ndarray) -> np.ndarray:
    """Return whether the values of each row differ within ``genes``."""
    low = np.where(genes, values, np.inf).min(axis=1)
    return np.where(genes, values, -np.inf).max(axis=1) > low


def _counts_gate(pair: Pair, significant: np.ndarray, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    num = significant.sum(axis=1)
    some = num > 0
    admitted = some.sum() >= rules.min_genes and len(set(num[some])) > 1
    found = pair.predicted.significant.sum(axis=1)[some]
    return np.full(len(num), admitted), np.full(len(num), len(set(found)) <= 1)


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
