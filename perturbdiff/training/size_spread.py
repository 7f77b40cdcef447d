"""How perturbations change the spread of cells' totals and of their numbers of detected genes.

A predicted cell gets its size from a control cell. A perturbation can make cells more alike, or less. By how much is
measured on the training cells, for each perturbation over the contexts where it was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from scipy import sparse

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.model.cell_sizes import spread_of

if TYPE_CHECKING:
    from perturbdiff.conditions.vocabulary import Vocabulary
    from perturbdiff.training.setup import Source

_FEWEST = 10  # cells of a condition
_EQUAL = 1e-3  # spread below which all cells have one size
_PRIOR_SD = 0.25  # of the slope, around 1
_ERROR = 0.79  # variance of the log spread of n + 1 sizes, times n (normal distribution)


class CellSizes:
    """Sizes of cells by their conditions, 16 bytes for each.

    A size is the log1p of the cell's total before log1p, or its number of detected genes.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    """

    def __init__(self, conditions: pd.DataFrame) -> None:
        self._start = conditions["start"].to_numpy(np.int64)
        self._condition: list[np.ndarray] = []
        self._sizes: list[np.ndarray] = []

    def add(self, rows: np.ndarray, cells: sparse.csr_matrix) -> None:
        """Count cells, log1p [n, G], by their store rows [n]."""
        grown = cells.astype(np.float64)
        grown.data = np.expm1(grown.data)
        totals = np.log1p(np.asarray(grown.sum(axis=1)).ravel())
        self._condition.append(np.searchsorted(self._start, rows, side="right") - 1)
        self._sizes.append(np.stack([totals, np.diff(cells.indptr)], axis=1).astype(np.float32))

    def spreads(self, pools: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the spread of both sizes [n, 2] and the number of cells [n] of each of n pools of conditions.

        The spread is that of `perturbdiff.model.cell_sizes.spread_of`, and 0 for fewer than two cells.
        """
        condition = np.concatenate([np.zeros(0, np.int64), *self._condition])
        order = np.argsort(condition, kind="stable")
        sizes = np.concatenate([np.zeros((0, 2), np.float32), *self._sizes])[order]
        ends = np.searchsorted(condition[order], np.arange(len(self._start) + 1))
        spreads, number = np.zeros((len(pools), 2)), np.zeros(len(pools), np.int64)
        last: np.ndarray | None = None
        for at, pool in enumerate(pools):
            if last is not None and np.array_equal(
                pool, last
            ):  # conditions of a context share their controls
                spreads[at], number[at] = spreads[at - 1], number[at - 1]
                continue
            own = np.concatenate([sizes[ends[c] : ends[c + 1]] for c in pool])
            number[at], last = len(own), pool
            if len(own) > 1:
                spreads[at] = [spread_of(torch.from_numpy(size[:, None].copy())).item() for size in own.T]
        return spreads, number


def size_spread(sizes: CellSizes, source: Source, vocabulary: Vocabulary) -> np.ndarray:
    """Return how the spread of both sizes under each perturbation follows from that of the control cells.

    The log spread of the training conditions is a line in that of their matched controls. Its slope, from 0 to 1, is
    that of all perturbations. It is 1 if controls that vary more go with perturbed cells that vary more, and 0 if they
    tell nothing, as where a few odd controls make the spread. The level is that of the perturbation over its contexts,
    by their precision, moved towards the mean of all perturbations, the further the less precise it is (empirical
    Bayes; the variance between perturbations by DerSimonian and Laird 1986).

    Parameters
    ----------
    sizes
        Of the source's cells.
    source
        A store and what training may use of it.
    vocabulary
        Of the model.

    Returns
    -------
    Factors and powers (`perturbdiff.model.cell_sizes.Spread`), float64 [perturbations, 2 sizes, 2]. Row 0, and
    perturbations without training cells, have the mean of all. The control has 1 and 1, and so has everything that
    nothing is known of.
    """
    found = np.ones((vocabulary.size("perturbation"), 2, 2))
    table = source.store.conditions
    perturbed = np.flatnonzero(source.train & ~table["is_control"].to_numpy(bool))
    pools = ControlPools(table, Rows(table, source.exclude), perturbed, quiet=True)
    label = vocabulary.encode("perturbation", table["perturbation"])[perturbed]
    own, own_cells = sizes.spreads([np.array([c]) for c in perturbed])
    control, control_cells = sizes.spreads([pools.pool(int(c)) for c in perturbed])
    enough = (own_cells >= _FEWEST) & (control_cells >= _FEWEST)
    for size in range(2):
        usable = enough & (own[:, size] > _EQUAL) & (control[:, size] > _EQUAL)
        if not usable.any():
            continue
        x, y = np.log(control[usable, size]), np.log(own[usable, size])
        power = _slope(x, y, label[usable])
        error = _ERROR * (1 / (own_cells[usable] - 1) + power**2 / (control_cells[usable] - 1))
        mean, ids, each = _shrunk(y - power * x, error, label[usable])
        found[:, size] = np.exp(mean), power
        found[ids, size, 0] = np.exp(each)
    found[vocabulary.encode("perturbation", [vocabulary.control])] = 1.0
    return found


def _slope(x: np.ndarray, y: np.ndarray, label: np.ndarray) -> float:
    """Return the slope of y on x within labels, 0 to 1; near 1 if x hardly varies (a normal prior)."""
    _, place, number = np.unique(label, return_inverse=True, return_counts=True)
    x, y = (values - (np.bincount(place, values) / number)[place] for values in (x, y))
    freedom = len(x) - len(number) - 1
    if freedom < 1 or not (x @ x) > 0:
        return 1.0
    rest = y - (x @ y) / (x @ x) * x
    prior = (rest @ rest) / freedom / _PRIOR_SD**2
    return float(np.clip((x @ y + prior) / (x @ x + prior), 0.0, 1.0))


def _shrunk(
    values: np.ndarray, variances: np.ndarray, label: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the mean of all labels, the labels, and the mean of each, moved towards that of all."""
    variances = variances + _excess(values, variances, label)
    ids, place = np.unique(label, return_inverse=True)
    precision = np.bincount(place, 1 / variances)
    means = np.bincount(place, values / variances) / precision
    between = _excess(means, 1 / precision, np.zeros(len(ids), int))
    weight = 1 / (1 / precision + between)
    mean = float(weight @ means / weight.sum())
    return mean, ids, mean + (means - mean) * between * weight


def _excess(values: np.ndarray, variances: np.ndarray, group: np.ndarray) -> float:
    """Return the variance within groups beyond that of the errors, not below 0."""
    _, place = np.unique(group, return_inverse=True)
    weight = 1 / variances
    total = np.bincount(place, weight)
    mean = np.bincount(place, weight * values) / total
    freedom = len(values) - len(total)
    scale = float(np.sum(total - np.bincount(place, weight**2) / total))
    if not freedom:
        return 0.0
    return max(0.0, float(np.sum(weight * (values - mean[place]) ** 2) - freedom) / scale)
