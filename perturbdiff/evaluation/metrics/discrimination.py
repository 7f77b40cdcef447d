"""Perturbation discrimination: is the true change the one nearest to the predicted change?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from perturbdiff.runtime.compiled import kernel

Distance = Literal["l1", "l2", "cosine"]
F = TypeVar("F", bound=Callable[..., Any])

_ROWS = 32  # real changes that stay in the cache while all predicted ones pass by


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
    own = np.array([position.get(name, len(genes)) for name in perturbations], np.int64)
    distances = np.empty((num, num))
    kind = ("l1", "l2", "cosine").index(distance)
    _distances(_rows(real), _rows(predicted), own, kind, distances)
    place = np.argsort(np.argsort(np.asarray(perturbations), kind="stable"))
    true = np.diag(distances)[:, None]
    before = (distances < true) | ((distances == true) & (place[None, :] < place[:, None]))
    return 1.0 - before.sum(axis=1) / num


def _rows(changes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(changes, dtype=np.float64)
