"""Metrics of mean profiles and of DE genes, each a pure function over arrays (App. Metric Definitions).

Numbers follow cell-eval in the chosen definition and, for R², CellFlow. M perturbations, G genes; ``real`` and
``predicted`` are [M, G] arrays in the same order. A function returns one float64 per perturbation (ES: one in
all), NaN where the metric is not defined. `catalogue` says of each what it is, which way is
better and when it is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np

from perturbdiff.conditions.targets import Targets
from perturbdiff.evaluation.metrics.differential import DEFAULT, DEFINITIONS, Definition, Differential
from perturbdiff.evaluation.metrics.spread import Spread, weights_of_change
from perturbdiff.runtime.compiled import kernel

_ROWS = 32  # real changes that stay in the cache while all predicted ones pass by
MIN_DE = 10  # real DE genes from which on a perturbation counts in DEOver_10 and DEPrec_10
_Q_FLOOR = np.float32(1e-10)
_NOT_RANKED = np.iinfo(np.int32).max

Distance = Literal["l1", "l2", "cosine"]
F = TypeVar("F", bound=Callable[..., Any])


def _kernel(function: F) -> F:
    """Compile with sums in any order, so that the processor adds several genes at a time.

    The order is the same for every pair of rows: equal changes are at equal distances.
    """
    return kernel(function, fastmath={"reassoc", "nsz", "contract"})


@_kernel
def _absolute(x: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for g in range(x.size):
        total += abs(x[g] - y[g])
    return total


@_kernel
def _squares(x: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for g in range(x.size):
        total += (x[g] - y[g]) * (x[g] - y[g])
    return total


@_kernel
def _products(x: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for g in range(x.size):
        total += x[g] * y[g]
    return total


@_kernel
def _distances(real: np.ndarray, predicted: np.ndarray, own: np.ndarray, kind: int, out: np.ndarray) -> None:
    """Fill ``out`` [predicted, real] with distances that rank as L1 (kind 0), L2 (1) or cosine (2) distances do.

    ``own[i]`` is the gene left out for row i of ``predicted``, the number of genes if there is none.
    """
    lengths = np.empty(real.shape[0])
    for j in range(real.shape[0]):
        lengths[j] = np.sqrt(_products(real[j], real[j]))
    for first in range(0, real.shape[0], _ROWS):
        for i in range(predicted.shape[0]):
            a, b = own[i], own[i] + 1
            guess = np.sqrt(
                _products(predicted[i, :a], predicted[i, :a]) + _products(predicted[i, b:], predicted[i, b:])
            )
            for j in range(first, min(first + _ROWS, real.shape[0])):
                if kind == 0:
                    out[i, j] = _absolute(real[j, :a], predicted[i, :a]) + _absolute(
                        real[j, b:], predicted[i, b:]
                    )
                elif kind == 1:
                    out[i, j] = _squares(real[j, :a], predicted[i, :a]) + _squares(
                        real[j, b:], predicted[i, b:]
                    )
                else:
                    length = lengths[j]
                    if a < real.shape[1]:
                        length = np.sqrt(
                            _products(real[j, :a], real[j, :a]) + _products(real[j, b:], real[j, b:])
                        )
                    inner = _products(real[j, :a], predicted[i, :a]) + _products(
                        real[j, b:], predicted[i, b:]
                    )
                    scale = length * guess
                    out[i, j] = 1.0 - inner / scale if scale > 0 else 1.0


def discrimination(
    real: np.ndarray,
    predicted: np.ndarray,
    perturbations: Sequence[str],
    genes: Sequence[str],
    *,
    distance: Distance,
) -> np.ndarray:
    """1 − rank / M, rank (from 0) of the true change among all M real changes by distance to the predicted one.

    The gene that a perturbation is named after is left out for it. Equal distances rank by name. A change of
    zero is at cosine distance 1 from everything. NaN for a single perturbation, which cannot be told from others.

    Parameters
    ----------
    real, predicted
        Changes of mean log1p values, float64 [M, G].
    perturbations, genes
        Names of the M rows and G columns.
    distance
        ``l1``, ``l2`` or ``cosine``.
    """
    num = len(perturbations)
    if num < 2:
        return np.full(num, np.nan)
    position = {gene: i for i, gene in enumerate(genes)}
    own_gene = np.array([position.get(name, len(genes)) for name in perturbations], np.int64)
    distances = np.empty((num, num))
    kind = ("l1", "l2", "cosine").index(distance)
    _distances(_rows(real), _rows(predicted), own_gene, kind, distances)
    place = np.argsort(np.argsort(np.asarray(perturbations), kind="stable"))
    true = np.diag(distances)[:, None]
    before = (distances < true) | ((distances == true) & (place[None, :] < place[:, None]))
    return 1.0 - before.sum(axis=1) / num


def panel_discrimination(
    real: np.ndarray, predicted: np.ndarray, left_out: np.ndarray, *, distance: Distance
) -> np.ndarray:
    """1 − k / (M − 1), k the number of real changes closer to the predicted one than the true one is.

    Real changes as close as the true one count half. Predictions that are the same for all perturbations score .5
    in the mean, whatever they are: a perturbation's own target gene tells its name, and so do those of the others,
    so that all of them are left out. NaN for a single perturbation.

    Parameters
    ----------
    real, predicted
        Changes of mean log1p values, float64 [M, G].
    left_out
        Which genes are target genes of any perturbation, bool [G].
    distance
        ``l1``, ``l2`` or ``cosine``.
    """
    num = len(real)
    if num < 2:
        return np.full(num, np.nan)
    kept = _rows(real[:, ~left_out]), _rows(predicted[:, ~left_out])
    none, distances = np.full(num, kept[0].shape[1], np.int64), np.empty((num, num))
    _distances(*kept, none, ("l1", "l2", "cosine").index(distance), distances)
    true = np.diag(distances)[:, None]
    closer, equal = (distances < true).sum(axis=1), (distances == true).sum(axis=1) - 1
    return 1.0 - (closer + equal / 2) / (num - 1)


def _rows(changes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(changes, dtype=np.float64)


def pearson_delta(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Pearson correlation over genes of the mean changes from control; NaN where either side is constant."""
    x = real - real.mean(axis=1, keepdims=True)
    y = predicted - predicted.mean(axis=1, keepdims=True)
    lengths = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return np.divide((x * y).sum(axis=1), lengths, out=np.full(len(x), np.nan), where=lengths > 0)


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


def top_ranks(table: Differential, genes: Sequence[str]) -> np.ndarray:
    """Rank each perturbation's significant genes by falling |log2 fold change|, then smaller p, then name.

    Returns
    -------
    ndarray
        int32 [M, G], from 0; a number beyond all ranks for genes that are not significant.
    """
    names = np.argsort(np.argsort(np.asarray(genes), kind="stable"))
    ranks = np.full(table.p.shape, _NOT_RANKED, np.int32)
    for i, row in enumerate(table.significant):
        significant = np.flatnonzero(row)
        strength = -np.abs(table.log2_fold[i, significant])
        order = np.argsort(strength)
        ordered = strength[order]
        if (ordered[1:] == ordered[:-1]).any():
            order = np.lexsort((names[significant], table.p[i, significant], strength))
        ranks[i, significant[order]] = np.arange(len(significant))
    return ranks


def top_overlap(
    real: np.ndarray, predicted: np.ndarray, *, size: Literal["real", "predicted"], most: int | None = None
) -> np.ndarray:
    """Share of the k strongest significant genes that real and predicted have in common.

    Parameters
    ----------
    real, predicted
        As `top_ranks` returns them.
    size
        The side whose number of significant genes is k, and the divisor; the share is 0 where k is 0.
    most
        Upper limit of k; none by default.
    """
    k = ((real if size == "real" else predicted) != _NOT_RANKED).sum(axis=1)
    k = k if most is None else np.minimum(k, most)
    common = ((real < k[:, None]) & (predicted < k[:, None])).sum(axis=1)
    return common / np.maximum(k, 1)


def recall(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Share of the real significant genes (bool [M, G]) that are predicted significant; NaN if there are none."""
    num_real = real.sum(axis=1)
    return np.divide(
        (real & predicted).sum(axis=1), num_real, out=np.full(len(num_real), np.nan), where=num_real > 0
    )


def direction_agreement(real: Differential, predicted: Differential) -> np.ndarray:
    """Share of the real significant genes whose log2 fold change has the predicted one's sign."""
    same = (np.sign(real.log2_fold) == np.sign(predicted.log2_fold)) & real.significant
    num_real = real.significant.sum(axis=1)
    return np.divide(same.sum(axis=1), num_real, out=np.full(len(num_real), np.nan), where=num_real > 0)


def fold_change_spearman(
    real: Differential, predicted: Differential, definition: Definition = DEFINITIONS[DEFAULT]
) -> np.ndarray:
    """Spearman correlation of real and predicted fold changes over the real significant genes."""
    ranked = [table.fold if definition.ranks == "fold" else table.log2_fold for table in (real, predicted)]
    rows = zip(real.significant, *ranked, strict=True)
    return np.array([spearman(x[genes], y[genes]) for genes, x, y in rows])


def effect_size_spearman(real: Differential, predicted: Differential) -> np.ndarray:
    """Spearman correlation of the numbers of DE genes, over perturbations with at least one real DE gene, [1]."""
    num_real, num_predicted = real.significant.sum(axis=1), predicted.significant.sum(axis=1)
    return np.array([spearman(num_real[num_real > 0], num_predicted[num_real > 0])])


def areas(
    real: Differential, predicted: Differential, definition: Definition = DEFINITIONS[DEFAULT]
) -> np.ndarray:
    """Area under the ROC curve (trapezoid) and average precision Σ(Rₙ − Rₙ₋₁)Pₙ, float64 [M, 2].

    Genes are ranked by −log10 predicted q, labelled by real significance; NaN if all labels are equal.
    """
    floored = predicted.q == 0 if definition.score_floor == "zero" else predicted.q < _Q_FLOOR
    scores = -np.log10(np.where(floored, _Q_FLOOR, predicted.q))
    return np.array([areas_of(*pair) for pair in zip(real.significant, scores, strict=True)]).reshape(-1, 2)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation with average ranks; NaN for fewer than two values or a constant side."""
    return _pearson(average_ranks(x), average_ranks(y)) if len(x) > 1 else float("nan")


def average_ranks(x: np.ndarray) -> np.ndarray:
    """Return ranks from 1, equal values sharing their mean; scipy.stats would be 60 MiB for this alone."""
    _, place, copies = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(copies) - (copies - 1) / 2.0)[place]


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    lengths = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / lengths) if lengths > 0 else float("nan")


def areas_of(label: np.ndarray, score: np.ndarray) -> tuple[float, float]:
    """Return ROC area and average precision; NaN if all labels are equal."""
    if label.all() or not label.any():
        return float("nan"), float("nan")
    order = np.argsort(-score)
    ordered = score[order]
    ends = np.flatnonzero(ordered[1:] != ordered[:-1])
    last = np.append(ends, len(score) - 1)  # of each run of equal scores
    hits, taken = np.cumsum(label[order])[last].astype(np.float64), last + 1.0
    recall, false_rate = hits / hits[-1], (taken - hits) / (taken[-1] - hits[-1])
    precision = float((np.diff(recall, prepend=0.0) * hits / taken).sum())
    return float(np.trapezoid(np.append(0.0, recall), np.append(0.0, false_rate))), precision


@dataclass(frozen=True)
class Panel:
    """What the real perturbations of a scope say together.

    Attributes
    ----------
    weights
        How surely each gene changes (`spread.weights_of_change`), float64 [M, G]; NaN where it is not known.
    mean
        Mean over the mean profiles of all perturbations, or that of the controls if there is one, float64 [G].
    num
        Number of perturbations.
    """

    weights: np.ndarray
    mean: np.ndarray
    num: int

    def of(self, rows: np.ndarray) -> Panel:
        """Return the same for some perturbations, repeats allowed."""
        return Panel(self.weights[rows], self.mean, self.num)

    def without(self, profiles: np.ndarray) -> np.ndarray:
        """Return for each of these perturbations [M, G] the mean over all others, [M, G]; of one: the controls'."""
        if self.num < 2:
            return np.broadcast_to(self.mean, profiles.shape)
        return (self.num * self.mean - profiles) / (self.num - 1)


@dataclass(frozen=True)
class Comparison:
    """Real and predicted test results of the same perturbations over the same genes.

    Attributes
    ----------
    perturbations, genes
        Names of the rows and columns of both tables.
    real, predicted
        Test results.
    definition
        What the metrics follow; the tables must follow it as well.
    min_de
        Real DE genes from which on a perturbation counts in ``DEOver_10`` and ``DEPrec_10``.
    spread
        Variances over cells; without them, what needs them is NaN.
    targets
        Target genes of the perturbations; by default the genes that they are named after.
    """

    perturbations: tuple[str, ...]
    genes: tuple[str, ...]
    real: Differential
    predicted: Differential
    definition: Definition = DEFINITIONS[DEFAULT]
    min_de: int = MIN_DE
    spread: Spread | None = None
    targets: Targets | None = None

    @cached_property
    def target_genes(self) -> np.ndarray:
        """Which genes any perturbation acts on directly, bool [G]."""
        return self._known_targets.panel_columns()

    @cached_property
    def panel(self) -> Panel:
        """What the real perturbations say together."""
        mean, control = self.real.mean, self.real.control
        weights = np.full(mean.shape, np.nan)
        if self.spread is not None:
            weights = weights_of_change(mean, control, self.spread)
        return Panel(weights, mean.mean(axis=0) if len(mean) > 1 else control, len(mean))

    @cached_property
    def own_genes(self) -> np.ndarray:
        """Which genes each perturbation acts on directly, bool [M, G]."""
        return self._known_targets.own_columns(self.perturbations)

    @property
    def _known_targets(self) -> Targets:
        return self.targets or Targets.of(self.perturbations, self.genes)

    @cached_property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """`top_ranks` of real and predicted, which ten metrics share."""
        return top_ranks(self.real, self.genes), top_ranks(self.predicted, self.genes)

    @cached_property
    def areas(self) -> np.ndarray:
        """`areas` of the two tables."""
        return areas(self.real, self.predicted, self.definition)

    @cached_property
    def num_real(self) -> np.ndarray:
        """Number of real DE genes of each perturbation, int64 [M]."""
        return self.real.significant.sum(axis=1)


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
        ``expression``, ``de``, ``count``, ``further`` (of cell-eval, beyond the paper's), ``effect`` (what is
        specific to a perturbation), or ``distribution`` (scored per condition).
    formula, undefined
        In words.
    direction
        ``higher`` or ``lower`` is better; ``one``: the ratio 1 is best; ``none``.
    low, high
        Range.
    chance
        What a prediction that tells perturbations apart no better than a coin scores, in words; empty if no
        formula gives it (`perturbdiff.evaluation.metrics.bounds` measures it).
    source
        Where the definition is from.
    per_perturbation
        False for one number in all (ES).
    needs_real_de
        Without a real DE gene the value is absent and cell-eval's mean leaves it out, unlike a NaN.
    needs_min_de
        The same below `Comparison.min_de` real DE genes.
    coupled
        A perturbation's value depends by its formula on which others are scored. See also `is_coupled`.
    uses_q
        The value depends on q or on what is significant.
    compute
        From a `Comparison`; None for metrics of the cells of a condition, see `populations` and `set_metrics`.
    """

    name: str
    label: str
    column: str
    family: Literal["expression", "de", "count", "further", "effect", "distribution", "sets"]
    formula: str
    direction: Literal["higher", "lower", "one", "none"]
    low: float
    high: float
    undefined: str = "never"
    per_perturbation: bool = True
    needs_real_de: bool = False
    compute: Callable[[Comparison], np.ndarray] | None = None
    chance: str = ""
    source: str = "cell-eval"
    needs_min_de: bool = False
    coupled: bool = False
    uses_q: bool = False

    @property
    def higher(self) -> bool:
        """Whether larger values are better (False also where neither is)."""
        return self.direction == "higher"

    def is_coupled(self, definition: Definition) -> bool:
        """Whether a perturbation's value depends on which others are scored: also by a q adjusted over all."""
        return self.coupled or (self.uses_q and definition.bh_family == "all")

    def absent(self, comparison: Comparison) -> np.ndarray:
        """Return which perturbations have too few real DE genes for a value, bool [M]: not even a NaN."""
        least = comparison.min_de if self.needs_min_de else int(self.needs_real_de)
        return comparison.num_real < least
