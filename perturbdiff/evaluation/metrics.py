"""The paper's 14 metrics and the counts of DE genes, each a pure function over arrays (App. Metric Definitions).

Numbers follow cell-eval 0.6.6 and, for R², CellFlow. M perturbations, G genes; ``real`` and ``predicted`` are
[M, G] arrays in the same order. A function returns one float64 per perturbation (ES: one in all), NaN where
the metric is not defined. `METRICS` says of each what it is, which way is better and when it is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import rankdata

from perturbdiff.evaluation.differential import Differential

DEFINITION = "cell-eval-0.6.6"
Distance = Literal["l1", "l2", "cosine"]
_Q_FLOOR = np.float32(1e-10)  # what a q of exactly zero becomes before its logarithm


def pearson_delta(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Pearson correlation over genes of the mean changes from control; NaN where either side is constant."""
    return np.array([_pearson(x, y) for x, y in zip(real, predicted, strict=True)])


def mean_squared_error(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Mean over genes of the squared difference of the mean log1p values."""
    return ((predicted - real) ** 2).mean(axis=1)


def mean_absolute_error(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Mean over genes of the absolute difference of the mean log1p values."""
    return np.abs(predicted - real).mean(axis=1)


def r_squared(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """1 − Σ(real − predicted)² / Σ(real − its mean over genes)² of mean log1p values.

    Where the real profile is constant: 1 if the prediction is equal, else 0 (scikit-learn's rule).
    """
    residual = ((real - predicted) ** 2).sum(axis=1)
    total = ((real - real.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ordinary = 1.0 - residual / total
    return np.where(total > 0, ordinary, (residual == 0).astype(np.float64))


def discrimination(
    real: np.ndarray,
    predicted: np.ndarray,
    perturbations: Sequence[str],
    genes: Sequence[str],
    *,
    distance: Distance,
) -> np.ndarray:
    """1 − rank / M, rank (from 0) of the true change among all M real changes by distance to the predicted one.

    The gene that a perturbation is named after is left out for it. Equal distances rank by position, that is by
    name. NaN for a single perturbation, which cannot be told from others.
    """
    num = len(perturbations)
    if num < 2:
        return np.full(num, np.nan)
    position = {gene: i for i, gene in enumerate(genes)}
    scores = np.empty(num)
    for i, name in enumerate(perturbations):
        effects, guess = real, predicted[i]
        if name in position:
            keep = np.arange(len(genes)) != position[name]
            effects, guess = real[:, keep], guess[keep]
        order = np.argsort(_distances(effects, guess, distance), kind="stable")
        scores[i] = 1.0 - float(np.flatnonzero(order == i)[0]) / num
    return scores


def _distances(effects: np.ndarray, guess: np.ndarray, distance: str) -> np.ndarray:
    if distance == "l1":
        return np.abs(effects - guess).sum(axis=1)
    if distance == "l2":
        return np.linalg.norm(effects - guess, axis=1)
    lengths = np.linalg.norm(effects, axis=1) * np.linalg.norm(guess)
    return 1.0 - (effects @ guess) / np.where(lengths == 0, 1.0, lengths)


def ranked_genes(table: Differential, i: int) -> np.ndarray:
    """Return perturbation ``i``'s significant genes by falling |log2 fold change|, then p, then position."""
    genes = np.flatnonzero(table.significant[i])
    return genes[np.lexsort((genes, table.p[i, genes], -np.abs(table.log2_fold[i, genes])))]


def top_overlap(
    real: Differential, predicted: Differential, *, size: Literal["real", "predicted"]
) -> np.ndarray:
    """Share of the k strongest significant genes that real and predicted have in common.

    k is the number of significant genes on the side that ``size`` names, and the divisor; 0 where it is 0.
    """
    scores = np.zeros(len(real.p))
    for i in range(len(scores)):
        first, second = ranked_genes(real, i), ranked_genes(predicted, i)
        k = len(first) if size == "real" else len(second)
        scores[i] = np.intersect1d(first[:k], second[:k]).size / k if k else 0.0
    return scores


def direction_agreement(real: Differential, predicted: Differential) -> np.ndarray:
    """Share of the real significant genes whose log2 fold change has the predicted one's sign."""
    same = (np.sign(real.log2_fold) == np.sign(predicted.log2_fold)) & real.significant
    found = real.significant.sum(axis=1)
    return np.divide(same.sum(axis=1), found, out=np.full(len(found), np.nan), where=found > 0)


def fold_change_spearman(real: Differential, predicted: Differential) -> np.ndarray:
    """Spearman correlation of real and predicted fold changes over the real significant genes."""
    rows = zip(real.significant, real.fold, predicted.fold, strict=True)
    return np.array([spearman(x[genes], y[genes]) for genes, x, y in rows])


def effect_size_spearman(real: Differential, predicted: Differential) -> np.ndarray:
    """Spearman correlation of the numbers of DE genes, over perturbations with at least one real DE gene, [1]."""
    found, called = real.significant.sum(axis=1), predicted.significant.sum(axis=1)
    return np.array([spearman(found[found > 0], called[found > 0])])


def area_under_roc(real: Differential, predicted: Differential) -> np.ndarray:
    """Area under the ROC curve (trapezoid) of −log10 predicted q for real significance."""
    return np.array([_areas(*pair)[0] for pair in zip(real.significant, _scores(predicted), strict=True)])


def average_precision(real: Differential, predicted: Differential) -> np.ndarray:
    """Average precision Σ(Rₙ − Rₙ₋₁)Pₙ of −log10 predicted q for real significance."""
    return np.array([_areas(*pair)[1] for pair in zip(real.significant, _scores(predicted), strict=True)])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation with average ranks; NaN for fewer than two values or a constant side."""
    return _pearson(rankdata(x), rankdata(y)) if len(x) > 1 else float("nan")


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    lengths = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / lengths) if lengths > 0 else float("nan")


def _scores(table: Differential) -> np.ndarray:
    return -np.log10(np.where(table.q == 0, _Q_FLOOR, table.q))


def _areas(label: np.ndarray, score: np.ndarray) -> tuple[float, float]:
    """Return ROC area and average precision; NaN if all labels are equal."""
    if label.all() or not label.any():
        return float("nan"), float("nan")
    order = np.argsort(-score, kind="stable")
    last = np.append(np.flatnonzero(np.diff(score[order])), len(score) - 1)  # the last of each run of ties
    hits, taken = np.cumsum(label[order])[last].astype(np.float64), last + 1.0
    recall, false_rate = hits / hits[-1], (taken - hits) / (taken[-1] - hits[-1])
    precision = float((np.diff(recall, prepend=0.0) * hits / taken).sum())
    return float(np.trapezoid(np.append(0.0, recall), np.append(0.0, false_rate))), precision


@dataclass(frozen=True)
class Comparison:
    """Real and predicted test results of the same perturbations (sorted by name) over the same genes."""

    perturbations: tuple[str, ...]
    genes: tuple[str, ...]
    real: Differential
    predicted: Differential


@dataclass(frozen=True)
class Metric:
    """What a metric is.

    Attributes
    ----------
    name, label
        Name in tables and name for people (the paper's).
    column
        cell-eval's column; empty if it has none.
    family
        ``expression``, ``de``, ``count`` (of cell-eval), or ``distribution`` (scored per condition).
    formula, undefined
        In words.
    direction
        ``higher`` or ``lower`` is better; ``one``: the ratio 1 is best; ``none``.
    low, high
        Range.
    per_perturbation
        False for one number in all (ES).
    needs_real_de
        Without a real DE gene the value is absent and cell-eval's mean leaves it out, unlike a NaN.
    compute
        From a `Comparison`; None for metrics of the distribution, see `perturbdiff.evaluation.distances`.
    """

    name: str
    label: str
    column: str
    family: Literal["expression", "de", "count", "distribution"]
    formula: str
    direction: Literal["higher", "lower", "one", "none"]
    low: float
    high: float
    undefined: str = "never"
    per_perturbation: bool = True
    needs_real_de: bool = False
    compute: Callable[[Comparison], np.ndarray] | None = None

    @property
    def higher(self) -> bool:
        """Whether larger values are better (False also where neither is)."""
        return self.direction == "higher"
