"""Negative-binomial counts of simulated cells, drawn cell by cell from counters.

Every uniform number is a hash of (seed, cell, position), so a cell's counts do not depend on how cells are
grouped into blocks. Counts are found by inversion of the exact distribution function; most zeros are told
without computing a probability.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_INVERSES = 1.0 / np.arange(1.0, 4097.0)


class Counts(NamedTuple):
    """A block of cells in CSR form: non-zeros per cell ``[n]`` int64, ``indices`` and ``data`` int32."""

    per_cell: NDArray[np.int64]
    indices: NDArray[np.int32]
    data: NDArray[np.int32]


@numba.njit(nogil=True, inline="always")
def _hash(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(nogil=True, inline="always")
def _uniform(key: Any, position: Any) -> Any:
    """Return number ``position`` of stream ``key``, in (0, 1)."""
    return (
        np.float64(_hash(key + np.uint64(position) * _GOLDEN) >> np.uint64(11)) + 0.5
    ) / 9007199254740992.0


@numba.njit(nogil=True, inline="always")
def _normal(key: Any, position: Any) -> Any:
    radius = np.sqrt(-2.0 * np.log(_uniform(key, 2 * position)))
    return radius * np.cos(2.0 * np.pi * _uniform(key, 2 * position + 1))


@numba.njit(nogil=True, inline="always")
def _cell_key(seed: Any, cell: Any) -> Any:
    return _hash(_hash(np.uint64(seed) * _GOLDEN + np.uint64(1)) ^ (np.uint64(cell) * _GOLDEN))


@numba.njit(nogil=True)
def _negative_binomial(u: float, mean: float, dispersion: float, inverses: Any) -> int:
    """Return the smallest k whose cumulative probability exceeds ``u``."""
    size = 1.0 / dispersion
    odds = dispersion * mean
    p = np.exp(-size * np.log1p(odds))
    step = odds / (1.0 + odds)
    total, k = p, 0
    while u >= total:
        inverse = inverses[k] if k < len(inverses) else 1.0 / (k + 1.0)
        p *= step * (k + size) * inverse
        k += 1
        total += p
        if p < 1e-18 and k > mean:  # the tail that double precision cannot tell from 1
            break
    return k


@numba.njit(nogil=True)
def draw_escapes(seed: int, cells: Any, probability: Any) -> Any:
    """Return which of the ``cells`` [n] escape their perturbation, with ``probability`` [n] each."""
    escaped = np.zeros(len(cells), np.bool_)
    for i in range(len(cells)):
        escaped[i] = _uniform(_cell_key(seed, cells[i]), 0) < probability[i]
    return escaped


@numba.njit(nogil=True)
def _draw(
    seed: int,
    cells: Any,
    rows: Any,
    rates: Any,
    programmes: Any,
    log_depth: Any,
    depth_spread: float,
    dispersion: Any,
    inverses: Any,
    per_cell: Any,
    indices: Any,
    data: Any,
) -> int:
    kinds, genes = programmes.shape
    rate = np.empty(genes, np.float32)
    filled = 0
    first = np.uint64(2 * kinds + 4)  # positions 0 and 1: escape; 2, 3: depth; then activities; then genes
    for i in range(len(cells)):
        key = _cell_key(seed, cells[i])
        rate[:] = 0.0
        for k in range(kinds):
            activity = np.float32(_normal(key, k + 2))
            for j in range(genes):
                rate[j] += activity * programmes[k, j]
        whole = 0.0
        for j in range(genes):
            rate[j] = rates[rows[i], j] * np.exp(rate[j])
            whole += np.float64(rate[j])
        scale = np.exp(log_depth[rows[i]] + depth_spread * _normal(key, 1)) / whole
        start = filled
        for j in range(genes):
            mean = rate[j] * scale
            u = _uniform(key, first + np.uint64(j))
            if u < 1.0 - mean:  # P(0) >= exp(-mean) >= 1 - mean
                continue
            k = _negative_binomial(u, mean, dispersion[j], inverses)
            if k > 0:
                indices[filled] = j
                data[filled] = k
                filled += 1
        per_cell[i] = filled - start
    return filled


def draw_counts(
    seed: int,
    cells: NDArray[np.int64],
    rows: NDArray[np.int64],
    rates: NDArray[np.float32],
    programmes: NDArray[np.float32],
    *,
    depth: NDArray[np.float64],
    depth_spread: float,
    dispersion: NDArray[np.float64],
) -> Counts:
    """Draw the counts of a block of cells.

    Parameters
    ----------
    seed
        Seed of the experiment.
    cells
        Cell numbers ``[n]``; a cell's draw depends on its number and the parameters alone.
    rows
        Row of ``rates`` ``[n]`` that holds each cell's population.
    rates
        Expected expression ``[U, G]`` of populations of cells, in any unit.
    programmes
        Log-expression loadings ``[K, G]`` of the activities in which cells of a population differ; activities
        are standard normal.
    depth
        Median ``[U]`` of the expected depth of a population's cells, in counts.
    depth_spread
        Standard deviation of a cell's log depth about it.
    dispersion
        Negative-binomial φ ``[G]``, positive.

    Returns
    -------
    Counts
        The block in CSR form, genes in increasing order.
    """
    capacity = len(cells) * rates.shape[1]
    per_cell = np.zeros(len(cells), np.int64)
    indices, data = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    filled = _draw(
        seed, cells, rows, rates, programmes, np.log(depth), float(depth_spread), dispersion, _INVERSES,
        per_cell, indices, data,
    )  # fmt: skip
    return Counts(per_cell, indices[:filled], data[:filled])
