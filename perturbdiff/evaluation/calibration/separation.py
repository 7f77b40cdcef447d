"""How well a metric separates references whose order is known: a replicate, half a replicate, the mean, the control.

Values are oriented (`perturbdiff.evaluation.metrics.bounds`): more is better.
"""

from __future__ import annotations

import numpy as np

from perturbdiff.evaluation.metrics.bounds import oriented
from perturbdiff.evaluation.metrics.catalogue import METRICS

_TINY = 1e-6  # keeps the fraction finite where the negative reference is perfect


def perfect(metric: str) -> float:
    """Return the oriented value of a perfect prediction, NaN for a metric without one.

    Distances and errors are perfect at 0, although unbiased estimates of them may fall below.
    """
    known = METRICS[metric]
    best = {"higher": known.high, "lower": 0.0, "one": 1.0}.get(known.direction, np.nan)
    return oriented(best, known.direction) if np.isfinite(best) else np.nan


def dynamic_range(positive: np.ndarray, negative: np.ndarray, best: float) -> float:
    """Return how much of the way from the negative reference to a perfect score the positive one goes.

    The dynamic range fraction of Miller et al. 2025 (bioRxiv 2025.10.20.683304) as their code has it: for each
    perturbation (positive − negative) / (perfect − negative), kept within −1 and 1. Of their two summaries we
    take the median, which one perturbation cannot move.

    Parameters
    ----------
    positive, negative
        Oriented values [splits, n] of the two references. The fractions of a perturbation are averaged over splits.
    best
        See `perfect`.

    Returns
    -------
    float
        NaN where no perturbation has both values, or the metric has no perfect score. A negative reference that is
        already beyond perfect (an unbiased distance below 0) leaves no range, and is left out.
    """
    room = best - negative
    usable = np.isfinite(positive) & np.isfinite(room) & (room >= 0)
    if not usable.any():
        return float("nan")
    share = np.full(usable.shape, np.nan)
    share[usable] = (positive[usable] - negative[usable]) / (room[usable] + _TINY)
    return float(np.median(over_splits(np.clip(share, -1.0, 1.0))))


def discrimination(better: np.ndarray, worse: np.ndarray) -> float:
    """Return the share of perturbations on which the better reference scores higher; a tie counts half.

    The bound discrimination score (Vollenweider & Bühlmann 2026, bioRxiv 2026.04.20.719650, as scPertEval has it).
    That code counts a tie as lost, so that a metric that is 0 for everything scores 0; with half a point it
    scores 0.5, as one that guesses. A reference without a value loses against one that has it, and where neither has
    a value the perturbation is left out.

    Parameters
    ----------
    better, worse
        Oriented values [splits, n].

    Returns
    -------
    float
        NaN if no perturbation has a value.
    """
    known = ~(np.isnan(better) & np.isnan(worse))
    if not known.any():
        return float("nan")
    a, b = (np.where(np.isnan(side), -np.inf, side)[known] for side in (better, worse))
    return float(np.mean((a > b) + 0.5 * (a == b)))


def over_splits(values: np.ndarray) -> np.ndarray:
    """Return the mean over splits [splits, n] for each perturbation that has any value, [at most n]."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    return total[known.any(axis=0)] / known.sum(axis=0)[known.any(axis=0)]
