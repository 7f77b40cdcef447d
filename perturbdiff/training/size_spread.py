"""How perturbations change the spread of cells' totals and of their numbers of detected genes.

A predicted cell gets its size from a control cell. A perturbation can make cells more alike, or less. By how much is
measured on the training cells, for each perturbation over the contexts where it was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from perturbdiff.conditions.control_matching import ControlPools, Rows

if TYPE_CHECKING:
    from perturbdiff.conditions.vocabulary import Vocabulary
    from perturbdiff.training.setup import Source

_FEWEST = 10  # cells of a condition
_EQUAL = 1e-3  # spread below which all cells have one size
_PRIOR_SD = 0.25  # of the slope, around 1


class CellSizes:
    """Sums over the cells of each condition, from which means and spreads of their sizes follow.

    A size is the log1p of the cell's total before log1p, or its number of detected genes.

    Parameters
    ----------
    conditions
        `Store.conditions`.

    Attributes
    ----------
    sums
        float64 [n_conditions, 2, 3]: of both sizes the number of cells, the sum and the sum of squares.
    """

    def __init__(self, conditions: pd.DataFrame) -> None:
        self._start = conditions["start"].to_numpy(np.int64)
        self.sums = np.zeros((len(conditions), 2, 3))

    def add(self, rows: np.ndarray, cells: sparse.csr_matrix) -> None:
        """Count cells, log1p [n, G], by their store rows [n]."""
        grown = cells.astype(np.float64)
        grown.data = np.expm1(grown.data)
        totals = np.log1p(np.asarray(grown.sum(axis=1)).ravel())
        condition = np.searchsorted(self._start, rows, side="right") - 1
        for at, size in enumerate((totals, np.diff(cells.indptr).astype(np.float64))):
            for power in range(3):
                np.add.at(self.sums[:, at, power], condition, size**power)

    def spreads(self, pools: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the SD of both sizes [n, 2] and the number of cells [n] of each of n pools of conditions."""
        sums = np.array([self.sums[pool].sum(0) for pool in pools]).reshape(-1, 2, 3)
        number, total, squares = np.moveaxis(sums, -1, 0)
        variance = (squares - total**2 / np.maximum(number, 1)) / np.maximum(number - 1, 1)
        return np.sqrt(np.maximum(variance, 0.0)), number[:, 0]


def size_spread(sizes: CellSizes, source: Source, vocabulary: Vocabulary) -> np.ndarray:
    """Return how the spread of both sizes under each perturbation follows from that of the control cells.

    The log SD of the training conditions is a line in the log SD of their matched controls. Its slope, from 0 to 1, is
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
        error = 0.5 / (own_cells[usable] - 1) + power**2 * 0.5 / (control_cells[usable] - 1)  # of a log SD
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
