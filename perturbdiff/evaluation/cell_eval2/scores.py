"""All metrics of one context: their values per perturbation, gates and worst values applied, and their means."""

from __future__ import annotations

import numpy as np

from perturbdiff.evaluation.cell_eval2.de_metrics import scored_set_scores, set_scores
from perturbdiff.evaluation.cell_eval2.direction_metrics import direction_scores, scored_direction_scores
from perturbdiff.evaluation.cell_eval2.expression_metrics import expression_scores
from perturbdiff.evaluation.cell_eval2.measurements import Pair
from perturbdiff.evaluation.cell_eval2.metrics import METRICS, NORM, NORM_PARTS, Gate
from perturbdiff.evaluation.cell_eval2.rules import Rules

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
