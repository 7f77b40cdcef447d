"""The two ends of a score: what predictions reach by chance, and what real cells reach against real cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

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
