"""How well the sampled sets of a condition are those of its family: scores whose points are sets of cells.

The cells of a condition come in sets (wells, guides, donors) that differ by more than the draw of their cells. Two sets
are as far apart as the root of their energy distance with all pairs, which is the distance of their mean embeddings and
thus a true distance (Sejdinovic et al. 2013, Ann. Statist. 41:2263). All sets of a comparison have the same number of
cells, because the draw of the cells is a part of each distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbdiff.conditions.cell_distances import distances
from perturbdiff.evaluation.metrics import spread as sv

MOST_SETS = 39
"""Sets of a side that are compared at most: nine in ten of like sets lie within 39 others."""
MOST_CELLS = 50
"""Cells of a set that are compared at most."""
SET_METRICS = ("family_score", "set_variance_ratio", "set_range", "set_recall", "set_precision")
"""Names of the metrics of sets, in the order of the catalogue."""
SET_CHANCE = ("chance_family_score",)
_SHUFFLES = 19  # with as many, chance alone makes the true sets differ most in one condition of twenty

Floats = NDArray[np.float64]


def common_size(*sides: Sequence[np.ndarray]) -> int:
    """Return how many cells of each set to compare, at most `MOST_CELLS`: three in four sets of each side have them.

    Parameters
    ----------
    sides
        Rows of each set, of each side.

    Returns
    -------
    int
        0 if a side has no set.
    """
    if not all(len(side) for side in sides):
        return 0
    sizes = [int(np.quantile([len(rows) for rows in side], 0.25, method="lower")) for side in sides]
    return min(MOST_CELLS, *sizes)


def drawn_rows(sets: Sequence[np.ndarray], size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the rows of at most `MOST_SETS` sets that have ``size`` cells, as many drawn of each, int64 [S, size]."""
    large = [rows for rows in sets if len(rows) >= size]
    if len(large) > MOST_SETS:
        large = [large[k] for k in np.sort(rng.choice(len(large), MOST_SETS, replace=False))]
    drawn = [np.sort(rng.choice(rows, size, replace=False)) for rows in large]
    return np.array(drawn, np.int64).reshape(len(drawn), size)


@dataclass(frozen=True)
class SetDistances:
    """Mean distances between the cells of sets.

    Attributes
    ----------
    across
        Of each of S sets from each of T others, float64 [S, T].
    own, other
        Within the S sets and within the T others, float64 [S, S] and [T, T], pairs of a cell with itself among them.
    size
        Cells of a set.
    """

    across: Floats
    own: Floats
    other: Floats
    size: int

    @classmethod
    def of(cls, sets: np.ndarray, others: np.ndarray) -> SetDistances:
        """Measure sets [S, m, G] and others [T, m, G]."""
        return cls(_means(sets, others), _means(sets, sets), _means(others, others), sets.shape[1])

    def apart(self) -> tuple[Floats, Floats, Floats]:
        """Return the distances of sets in the Hilbert space of their mean embeddings: across, own, other."""
        own, other = np.diagonal(self.own), np.diagonal(self.other)
        return (
            _root(2.0 * self.across - own[:, None] - other),
            _root(2.0 * self.own - own[:, None] - own),
            _root(2.0 * self.other - other[:, None] - other),
        )

    def unbiased(self) -> tuple[Floats, Floats, Floats]:
        """Return the energy distances without pairs of a cell with itself: across, own, other."""
        share = self.size / (self.size - 1)
        own, other = np.diagonal(self.own) * share, np.diagonal(self.other) * share
        return (
            2.0 * self.across - own[:, None] - other,
            2.0 * self.own - own[:, None] - own,
            2.0 * self.other - other[:, None] - other,
        )


def _means(sets: np.ndarray, others: np.ndarray) -> Floats:
    """Return the mean distance of the cells of each set from those of each other set, float64 [S, T]."""
    shape = (len(sets), sets.shape[1], len(others), others.shape[1])
    flat = [side.reshape(-1, side.shape[2]) for side in (sets, others)]
    return distances(*flat).reshape(shape).mean(axis=(1, 3))


def _root(squared: Floats) -> Floats:
    return np.sqrt(np.maximum(squared, 0.0))


def family_score(across: Floats, own: Floats) -> float:
    """Return the energy score of a family, E‖S − T‖ − ½ E‖S − S'‖, S and S' different sampled sets and T true ones.

    The score is strictly proper: its expectation is least for sets that are drawn as the true ones are (Gneiting and
    Raftery 2007, J. Am. Stat. Assoc. 102:359, 5.1; Lyons 2013, Ann. Probab. 41:3284).

    Parameters
    ----------
    across
        Distances of the sampled from the true sets, float64 [S, T].
    own
        Distances of the sampled sets from one another, float64 [S, S].

    Returns
    -------
    float
        At least 0; NaN with fewer than two sampled sets or without a true one.
    """
    num = len(own)
    if num < 2 or not across.shape[1]:
        return float("nan")
    spread = (own.sum() - np.trace(own)) / (num * (num - 1))
    return max(0.0, float(across.mean() - 0.5 * spread))


def variance_ratio(sets: np.ndarray, others: np.ndarray, rng: np.random.Generator) -> float:
    """Return the variance component between sets over that between the true ``others``, both summed over genes.

    Returns
    -------
    float
        NaN with fewer than two sets on a side, or if the true sets do not differ more than in all of 19 shuffles of
        their cells: there is then nothing to compare with.
    """
    if min(len(sets), len(others)) < 2:
        return float("nan")
    apart = np.square(distances(*[others.reshape(-1, others.shape[2])] * 2))
    order = np.arange(len(apart))
    found = _within(apart, order, len(others))
    if any(_within(apart, rng.permutation(order), len(others)) <= found for _ in range(_SHUFFLES)):
        return float("nan")
    return float(sv.between_variance(sets).sum() / sv.between_variance(others).sum())


def _within(apart: Floats, order: np.ndarray, num: int) -> float:
    """Return the sum of ``apart`` over the pairs of cells in the same of ``num`` sets, cells taken in ``order``."""
    return float(sum(apart[np.ix_(rows, rows)].sum() for rows in order.reshape(num, -1)))


def set_range(sets: np.ndarray, others: np.ndarray) -> float:
    """Return the share of true ``others`` whose mean lies within the range of the sets along their leading axis.

    Half of the true sets give the axis along which the other half is looked at, and the other way round.

    Returns
    -------
    float
        NaN with fewer than two sets or four true ones.
    """
    if len(sets) < 2 or len(others) < 4:
        return float("nan")
    shares = []
    for first in (0, 1):
        axis = sv.leading_axis(others[first::2])
        values, seen = (side.mean(axis=1, dtype=np.float64) @ axis for side in (others[1 - first :: 2], sets))
        shares.append(sv.within_range(values, seen))
    return float(np.mean(shares))


def set_metrics(
    predicted: np.ndarray, real: np.ndarray, rng: np.random.Generator, *, other: np.ndarray | None = None
) -> dict[str, float]:
    """Compare the sampled with the true sets of one condition.

    Parameters
    ----------
    predicted, real
        log1p values float32 [S, m, G] and [T, m, G], the same m of at least 2.
    rng
        Of the shuffles.
    other
        True sets of another perturbation [T', m, G]: adds the score by chance.

    Returns
    -------
    dict
        `SET_METRICS` and, with ``other``, `SET_CHANCE`; NaN where undefined.
    """
    names: tuple[str, ...] = SET_METRICS if other is None else (*SET_METRICS, *SET_CHANCE)
    found: dict[str, float] = {name: float("nan") for name in names}
    if min(len(predicted), len(real)) < 1 or predicted.shape[1] < 2:
        return found
    between = SetDistances.of(predicted, real)
    across, own, _ = between.apart()
    found["family_score"] = family_score(across, own)
    found["set_variance_ratio"] = variance_ratio(predicted, real, rng)
    found["set_range"] = set_range(predicted, real)
    across, own, theirs = between.unbiased()
    if len(predicted) > 1:
        found["set_recall"] = sv.within_cloud(across.T, own)
    if len(real) > 1:
        found["set_precision"] = sv.within_cloud(across, theirs)
    if other is not None and len(other):
        by_chance = SetDistances(_means(predicted, other), between.own, _means(other, other), between.size)
        found["chance_family_score"] = family_score(*by_chance.apart()[:2])
    return found


def set_places(predicted: np.ndarray, real: np.ndarray) -> tuple[Floats, Floats, Floats] | None:
    """Return where sets lie along the two directions in which the true sets differ most, for a figure.

    Directions are those of the mean embeddings, so that places are in roots of energy distances. Half of the cells of
    each true set give the directions, and the other half of the cells of true and sampled sets is shown: true sets
    would lie farther apart along directions that were fitted to the draw of their own cells.

    Parameters
    ----------
    predicted, real
        log1p values [S, m, G] and [T, m, G].

    Returns
    -------
    tuple
        Places of the sampled and of the true sets, float64 [S, 2] and [T, 2], and the directions' shares [2] of the
        scatter of the true sets, the draw of cells included. None with fewer than three true sets or four cells in a
        set.
    """
    if len(real) < 3 or real.shape[1] < 4:
        return None
    fitted, sides = real[:, ::2], (predicted[:, 1::2], real[:, 1::2])
    within = np.square(SetDistances.of(fitted, fitted).apart()[1])
    centred = _products(within, within)
    lengths, vectors = np.linalg.eigh(centred)
    if lengths[-1] <= 0:
        return None
    axes = vectors[:, :-3:-1] / np.sqrt(np.maximum(lengths[:-3:-1], 1e-12))
    axes *= np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])
    places = [_products(np.square(SetDistances.of(side, fitted).apart()[0]), within) @ axes for side in sides]
    middle = places[1].mean(axis=0)
    return places[0] - middle, places[1] - middle, lengths[:-3:-1] / np.maximum(lengths, 0).sum()


def _products(squared: Floats, within: Floats) -> Floats:
    """Return the scalar products of points with some others, all less the mean of the others.

    Parameters
    ----------
    squared, within
        Squared distances of the points from the others [S, T], and of the others from one another [T, T].
    """
    return -0.5 * (squared - squared.mean(axis=1, keepdims=True) - within.mean(axis=0) + within.mean())
