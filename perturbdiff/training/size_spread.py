"""How perturbations change the spread of cells' totals and of their numbers of detected genes.

A predicted cell gets its size from a control cell. A perturbation can make cells more alike, or less, and by how much is
measured on the training cells, of each perturbation over the contexts where it was seen.
"""

from __future__ import annotations

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
_RANGE = 4.0  # no spread becomes more than this many times as large or as small


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
        totals = np.log1p(np.expm1(cells).sum(axis=1, dtype=np.float64)).A1
        condition = np.searchsorted(self._start, rows, side="right") - 1
        for at, size in enumerate((totals, np.diff(cells.indptr).astype(np.float64))):
            for power in range(3):
                np.add.at(self.sums[:, at, power], condition, size**power)

    def spread(self, pool: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the number of cells of the pooled conditions, and the SD of both sizes [2]."""
        number, total, squares = self.sums[pool].sum(0).T
        mean = total / np.maximum(number, 1)
        variance = (squares - number * mean**2) / np.maximum(number - 1, 1)
        return float(number[0]), np.sqrt(np.maximum(variance, 0.0))


def size_spread(sizes: CellSizes, source: Source, vocabulary: Vocabulary) -> np.ndarray:
    """Return by how much perturbations change the spread of both sizes.

    The SD of each training condition is compared with that of its matched controls. The log ratios of a perturbation
    are averaged over its contexts by their precision, and moved towards the mean of all perturbations, the further the
    less precise they are (empirical Bayes; the variance between perturbations by DerSimonian and Laird 1986).

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
    float64 [perturbations, 2]. Row 0, and perturbations without training cells, have the mean of all. The control
    has 1, and so has everything that nothing is known of.
    """
    logs = np.zeros((vocabulary.size("perturbation"), 2))
    table = source.store.conditions
    perturbed = np.flatnonzero(source.train & ~table["is_control"].to_numpy(bool))
    pools = ControlPools(table, Rows(table, source.exclude), perturbed, quiet=True)
    label = vocabulary.encode("perturbation", table["perturbation"])
    own = [sizes.spread(np.array([c])) for c in perturbed]
    controls = [sizes.spread(pools.pool(int(c))) for c in perturbed]
    number = np.array([[a, b] for (a, _), (b, _) in zip(own, controls, strict=True)]).reshape(-1, 2)
    for column in range(2):
        spread = np.array([[a[column], b[column]] for (_, a), (_, b) in zip(own, controls, strict=True)])
        usable = (number >= _FEWEST).all(1) & (spread.reshape(-1, 2) > _EQUAL).all(1)
        if not usable.any():
            continue
        ratio = np.log(spread[usable, 0] / spread[usable, 1])
        error = (0.5 / (number[usable] - 1)).sum(1)  # variance of the log of an SD, both sides
        mean, ids, each = _shrunk(ratio, error, label[perturbed[usable]])
        logs[:, column], logs[ids, column] = mean, each
    logs[vocabulary.encode("perturbation", [vocabulary.control])] = 0.0
    return np.exp(np.clip(logs, -np.log(_RANGE), np.log(_RANGE)))


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
