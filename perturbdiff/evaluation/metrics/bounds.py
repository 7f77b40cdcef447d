"""What scores are read against: chance, real cells against real cells, and the check for collapsed predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from perturbdiff.evaluation.metrics.catalogue import METRICS, score
from perturbdiff.evaluation.metrics.differential import Differential
from perturbdiff.evaluation.metrics.profile_metrics import Comparison

PAIRS = 250  # mismatched pairs scored at most: a metric of SD 0.2 over pairs has a standard error of 0.013
_PAIRS_HELD = 32  # whose tables are in memory at a time
_OTHERS = ("mse", "mae", "mse_delta", "mae_delta", "de_nsig_counts_real", "de_nsig_counts_pred")


def chance(
    comparison: Comparison, names: Sequence[str] | None = None, *, draws: int = 20, seed: int = 0
) -> dict[str, float]:
    """Return the mean of each metric over predictions given to other perturbations of the same scope.

    The perturbations are put on a ring in random order and every prediction is passed on by a number of places:
    a derangement, in which no prediction keeps its perturbation and any other is equally likely. Up to
    ``draws`` such numbers are taken, all of them (hence all pairs) if there are no more perturbations than
    that, but only as many as make `PAIRS` mismatched pairs; of more than `PAIRS` perturbations, that many evenly
    spaced on the ring, passed on once. q and the DE genes stay those of the prediction, adjusted in its own
    place. The mean is over defined values, as ``nanmean``.

    ES, one number for all perturbations, is the mean over derangements of all of them. The discrimination scores
    are the mean over all ranks: ½, or (M + 1) / (2M) in the definitions of cell-eval.

    Parameters
    ----------
    comparison
        Of one scope.
    names
        Metrics of pseudobulks and DE genes; none for all.
    draws
        Derangements at most.
    seed
        Of the ring and the numbers of places.

    Returns
    -------
    dict
        NaN for counts, with fewer than two perturbations, and where no mismatched pair has a value.

    Raises
    ------
    ValueError
        If a name is not one of the catalogue or is scored on the cells of a condition.
    """
    chosen = [n for n, m in METRICS.items() if m.compute is not None] if names is None else list(names)
    if unknown := [n for n in chosen if n not in METRICS or METRICS[n].compute is None]:
        raise ValueError(f"no metric of pseudobulks or DE genes: {', '.join(unknown)}")
    levels = dict.fromkeys(chosen, float("nan"))
    num = len(comparison.perturbations)
    if num < 2 or draws < 1:
        return levels
    rng = np.random.default_rng(seed)
    ring, places = rng.permutation(num), 1 + rng.permutation(num - 1)[:draws]
    levels |= {n: _mean_rank(comparison) for n in chosen if n.startswith("PDS")}
    levels |= {n: 0.5 for n in chosen if n == "centroid_accuracy"}
    levels |= _per_pair(comparison, [n for n in chosen if _is_per_pair(n)], ring, places)
    return levels | _per_scope(
        comparison, [n for n in chosen if not METRICS[n].per_perturbation], ring, places
    )


def _mean_rank(comparison: Comparison) -> float:
    """Return the mean of a discrimination score over all ranks that the true change can have."""
    num = len(comparison.perturbations)
    return 0.5 if comparison.definition.left_out == "panel" else (num + 1) / (2 * num)


def _is_per_pair(name: str) -> bool:
    metric = METRICS[name]
    return metric.per_perturbation and not _is_ranked(name) and metric.family != "count"


def _is_ranked(name: str) -> bool:
    """Whether a value is a place among all perturbations, of which a pair cannot tell."""
    return name == "centroid_accuracy" or name.startswith("PDS")


def _per_pair(
    comparison: Comparison, names: list[str], ring: np.ndarray, places: np.ndarray
) -> dict[str, float]:
    """Score mismatched pairs, a row of a comparison each."""
    if not names:
        return {}
    num = len(ring)
    starts = np.unique(np.linspace(0, num - 1, min(num, PAIRS)).round().astype(np.int64))
    places = places[: max(PAIRS // num, 1)]
    predicted = ring[np.tile(starts, len(places))]
    real = ring[(starts[None, :] + places[:, None]).ravel() % num]
    if any(METRICS[name].coupled for name in names):
        _ = comparison.panel  # found once, before it is shared by the pairs
    blocks = np.arange(_PAIRS_HELD, len(real), _PAIRS_HELD)
    scores: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for one, other in zip(np.split(real, blocks), np.split(predicted, blocks), strict=True):
        for name, of_pairs in score(_paired(comparison, one, other), names).items():
            scores[name].append(of_pairs)
    return {name: _mean(np.concatenate(of_pairs)) for name, of_pairs in scores.items()}


def _paired(comparison: Comparison, real: np.ndarray, predicted: np.ndarray) -> Comparison:
    """Return a comparison whose rows set the real change of one perturbation beside a prediction of another."""
    pairs = Comparison(
        tuple(comparison.perturbations[i] for i in real),
        comparison.genes,
        _rows(comparison.real, real),
        _rows(comparison.predicted, predicted),
        comparison.definition,
        comparison.min_de,
        None if comparison.spread is None else comparison.spread.paired(real, predicted),
    )
    if "panel" in comparison.__dict__:  # that of the scope, whichever of its perturbations are paired
        pairs.__dict__["panel"] = comparison.panel.of(real)
    if "ranks" in comparison.__dict__:  # of the same rows, already found for the scores themselves
        pairs.__dict__["ranks"] = (comparison.ranks[0][real], comparison.ranks[1][predicted])
    return pairs


def _per_scope(
    comparison: Comparison, names: list[str], ring: np.ndarray, places: np.ndarray
) -> dict[str, float]:
    """Score metrics that give one number for all perturbations (ES: of the numbers of DE genes)."""
    values: dict[str, list[float]] = {name: [] for name in names}
    guesser = np.empty_like(ring)
    for place in places if names else ():
        guesser[np.roll(ring, -place)] = ring
        passed_on = replace(
            comparison.predicted, significant=np.take(comparison.predicted.significant, guesser, axis=0)
        )
        for name, value in score(replace(comparison, predicted=passed_on), names).items():
            values[name].append(float(value[0]))
    return {name: _mean(np.array(of_places)) for name, of_places in values.items()}


def _rows(table: Differential, rows: np.ndarray) -> Differential:
    """Return the results of some perturbations, repeats allowed."""
    arrays = {f.name: getattr(table, f.name) for f in fields(table)}
    return replace(table, **{name: a[rows] for name, a in arrays.items() if a.ndim == 2})


def _mean(values: np.ndarray) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else float("nan")


CORRECTED = tuple(name for name, m in METRICS.items() if m.column and m.column not in _OTHERS)
"""Metrics whose split-half means cell-eval 0.8.2 corrects: its bounded ones for which higher is better."""


def spearman_brown(half: np.ndarray | float) -> np.ndarray:
    """Return 2r / (1 + r), the reliability of two samples of twice the size; NaN where r is not positive.

    Parameters
    ----------
    half
        Reliability r between halves, at most 1; any shape.

    Returns
    -------
    ndarray
        float64 in the shape of ``half``.
    """
    r = np.asarray(half, np.float64)
    return np.divide(2.0 * r, 1.0 + r, out=np.full(r.shape, np.nan), where=r > 0)


def full_depth(means: Mapping[str, float]) -> dict[str, float]:
    """Return the ceiling that cell-eval 0.8.2 reports for split-half means, NaN for what it does not correct.

    Parameters
    ----------
    means
        ``mean`` of a ceiling run by metric, as in ``aggregate.csv``.
    """
    return {n: float(spearman_brown(mean)) if n in CORRECTED else float("nan") for n, mean in means.items()}


MOST_PAIRS = 19_900  # pairs kept for a picture: all of them up to 200 perturbations
_MOST_ROWS = 2_000  # perturbations whose correlations with each other are taken
_STILL = 1e-6  # a change of this norm is rounding noise and has no direction


@dataclass(frozen=True)
class Pairs:
    """Pearson correlations over genes of the mean changes of pairs of perturbations.

    ``first`` and ``second`` are row numbers (int64), ``first`` < ``second``; ``real`` and ``predicted`` float64,
    NaN where a change has no direction.
    """

    first: np.ndarray
    second: np.ndarray
    real: np.ndarray
    predicted: np.ndarray


@dataclass(frozen=True)
class Collapse:
    """Whether the predictions of different perturbations are alike.

    Attributes
    ----------
    real, predicted
        Median over pairs of perturbations of the correlation of their mean changes; NaN if none has one.
    ratio
        Median over perturbations of the norm of the predicted change over the norm of the real one.
    pairs
        The pairs; beyond 200 perturbations an even selection of them.
    """

    real: float
    predicted: float
    ratio: float
    pairs: Pairs

    @property
    def verdict(self) -> str:
        """Return what the numbers say, in a phrase."""
        if not np.isfinite(self.predicted):
            return "no change predicted"
        if self.ratio < 1 / 3:
            return "hardly any change predicted"
        if self.predicted > 0.9 and self.predicted - self.real > 0.1:
            return "collapsed: nearly one answer for all"
        if self.predicted - self.real > 0.2:
            return "more alike than the truth"
        if self.real - self.predicted > 0.2:
            return "less alike than the truth"
        return "as different as the truth"


def collapse(real: np.ndarray, predicted: np.ndarray) -> Collapse | None:
    """Compare how alike predicted changes are between perturbations with how alike the real ones are.

    Parameters
    ----------
    real, predicted
        Mean changes from control in log1p units, [perturbations × genes], rows and columns in the same order.
        Beyond 2,000 perturbations the correlations are those of 2,000 evenly spaced rows; the ratio is of all.

    Returns
    -------
    Collapse or None
        None with fewer than two perturbations or genes.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if real.shape != predicted.shape:
        raise ValueError(f"real changes {real.shape} and predicted changes {predicted.shape} differ in shape")
    if min(real.shape) < 2:
        return None
    rows = np.unique(np.linspace(0, len(real) - 1, min(len(real), _MOST_ROWS)).round().astype(np.int64))
    first, second = np.triu_indices(len(rows), k=1)
    x, y = (_correlations(changes[rows])[first, second] for changes in (real, predicted))
    kept = slice(None, None, -(-len(first) // MOST_PAIRS))
    length = np.linalg.norm(real, axis=1)
    ratio = np.linalg.norm(predicted, axis=1) / np.where(length > 0, length, np.nan)
    pairs = Pairs(rows[first[kept]], rows[second[kept]], x[kept], y[kept])
    return Collapse(_median(x), _median(y), _median(ratio), pairs)


def changes(table: pd.DataFrame) -> pd.DataFrame:
    """Return each perturbation's mean change from control, [perturbations × genes] in log1p units.

    Parameters
    ----------
    table
        One scope of ``de_real`` or ``de_pred``: perturbation, gene, mean and control_mean (log1p).
    """
    delta = table["mean"].to_numpy(np.float64) - table["control_mean"].to_numpy(np.float64)
    keys = {name: table[name].astype(str).to_numpy() for name in ("perturbation", "gene")}
    return pd.DataFrame({**keys, "delta": delta}).pivot(index="perturbation", columns="gene", values="delta")


def shared(real: pd.DataFrame, predicted: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return both tables of `changes` on the perturbations and genes that they share; a missing change is 0."""
    rows, genes = real.index.intersection(predicted.index), real.columns.intersection(predicted.columns)
    x, y = (table.loc[rows, genes].fillna(0.0) for table in (real, predicted))
    return x, y


def _median(values: np.ndarray) -> float:
    defined = values[~np.isnan(values)]
    return float(np.median(defined)) if defined.size else float("nan")


def _correlations(x: np.ndarray) -> np.ndarray:
    """Pearson correlations between rows; NaN for rows that are constant up to rounding."""
    centred = x - x.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centred, axis=1)
    scaled = centred / np.where(length > _STILL, length, np.nan)[:, None]
    return np.clip(scaled @ scaled.T, -1.0, 1.0)


Values = TypeVar("Values", float, np.ndarray)


def oriented(values: Values, direction: str) -> Values:
    """Return values so that more is better: as they are, negated, or minus their distance from 1, else NaN.

    Parameters
    ----------
    values
        Values of a metric, any shape.
    direction
        ``higher``, ``lower``, ``one`` or ``none``, as in the catalogue.
    """
    given: Any = values
    if direction == "higher":
        return given
    if direction == "lower":
        return -given
    return -abs(given - 1.0) if direction == "one" else given * float("nan")
