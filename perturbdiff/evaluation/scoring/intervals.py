"""Bootstrap intervals of means over perturbations or conditions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

LEVEL = 0.95
_HELD = 4_000_000  # weights held at a time


def bootstrap_mean(
    values: np.ndarray, *, draws: int, seed: int, groups: np.ndarray | None = None
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of ``values`` [n]; see `bootstrap_means`."""
    low, high = bootstrap_means(np.asarray(values)[:, None], draws=draws, seed=seed, groups=groups)
    return float(low[0]), float(high[0])


def bootstrap_means(
    values: np.ndarray, *, draws: int, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return 95 % percentile bootstrap intervals of the means of several columns (Efron 1979, Ann. Statist. 7:1).

    A draw takes n rows with replacement, the same ones for all columns, so that a column's interval does not
    depend on the other columns, and averages the values that are defined among them. What varies is the choice of
    perturbations: the noise of one perturbation's few cells is part of it, that of the shared controls is not,
    and intervals of few rows are too narrow (the 95 % cover some 90 % of means of 10 rows from a normal
    distribution).

    Parameters
    ----------
    values
        One row per perturbation or condition, [n, k]; NaN is left out.
    draws
        Number of draws; 0 for no intervals.
    seed
        Of the draws. Together with the order of the rows (by name, usually) it fixes the result.
    groups
        Labels [n], e.g. contexts: rows are then drawn within each group, and the mean is that over groups of
        their means.

    Returns
    -------
    tuple
        Lower and upper ends, float64 [k]; NaN for ``draws=0`` and where no group has two defined values.
    """
    values = np.asarray(values, np.float64)
    labels = np.zeros(len(values), np.int64) if groups is None else np.unique(groups, return_inverse=True)[1]
    members = [np.flatnonzero(labels == i) for i in range(labels.max(initial=-1) + 1)]
    defined = ~np.isnan(values)
    enough = np.zeros(values.shape[1], bool)
    for rows in members:
        enough |= defined[rows].sum(axis=0) >= 2
    undefined = np.full(values.shape[1], np.nan)
    if not draws or not enough.any():
        return undefined, undefined.copy()
    means = np.stack([_means(values[rows], draws, seed, i) for i, rows in enumerate(members)])
    counted = ~np.isnan(means)
    with np.errstate(invalid="ignore"):
        means = np.where(counted, means, 0.0).sum(axis=0) / counted.sum(axis=0)
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.nanpercentile(means[:, enough], (tail, 100.0 - tail), axis=0)
    ends = undefined.copy(), undefined.copy()
    ends[0][enough], ends[1][enough] = low, high
    return ends


def bootstrap_nested(groups: Sequence[np.ndarray], *, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 95 % percentile intervals of means over groups of their means, groups being drawn as well as rows.

    A draw takes as many groups with replacement as there are, and for each of them its rows with replacement
    (Davison & Hinkley 1997, Bootstrap Methods, §3.8). What varies is the choice of data sets and that of conditions
    within them; with few groups the intervals are too narrow, as with few rows.

    Parameters
    ----------
    groups
        For each group (a data set) one row per perturbation or condition, [n, k] with k in common; NaN is left out,
        and a group without any value of a column is left out of that column's means.
    draws
        Number of draws; 0 for no intervals.
    seed
        Of the draws. Together with the order of the groups and of their rows it fixes the result.

    Returns
    -------
    tuple
        Lower and upper ends, float64 [k]; NaN for ``draws=0`` and with fewer than two values in all.
    """
    tables = [np.asarray(rows, np.float64) for rows in groups]
    width = tables[0].shape[1]
    undefined = np.full(width, np.nan)
    enough = np.sum([(~np.isnan(rows)).sum(axis=0) for rows in tables], axis=0) >= 2
    if not draws or not enough.any():
        return undefined, undefined.copy()
    chosen = np.random.default_rng((seed, len(tables), 0)).integers(len(tables), size=(draws, len(tables)))
    totals, counted = np.zeros((draws, width)), np.zeros((draws, width))
    for i, rows in enumerate(tables):
        at = np.nonzero(chosen == i)[0]
        if len(rows) and len(at):
            means = _means(rows, len(at), seed, i)
            known = ~np.isnan(means)
            np.add.at(totals, at, np.where(known, means, 0.0))
            np.add.at(counted, at, known)
    with np.errstate(invalid="ignore"):
        means = totals / counted
    tail = 50.0 * (1.0 - LEVEL)
    ends = undefined.copy(), undefined.copy()
    ends[0][enough], ends[1][enough] = np.nanpercentile(means[:, enough], (tail, 100.0 - tail), axis=0)
    return ends


def _means(values: np.ndarray, draws: int, seed: int, group: int) -> np.ndarray:
    """Return the means of ``draws`` resamples of the rows of ``values``, [draws, k]; NaN where none is defined."""
    defined = ~np.isnan(values)
    filled, counted = np.where(defined, values, 0.0), defined.astype(np.float64)
    parts = []
    for weights in _weights(len(values), draws, seed, group):
        with np.errstate(invalid="ignore"):
            parts.append((weights @ filled) / (weights @ counted))
    return np.concatenate(parts)


def _weights(num: int, draws: int, seed: int, group: int) -> Iterator[np.ndarray]:
    """Yield how often each row is drawn, float64 [draws, num], in blocks of draws."""
    if num * draws <= _HELD:
        yield _table(num, draws, seed, group)
        return
    rng = np.random.default_rng((seed, group))
    per_block = max(_HELD // num, 1)
    for first in range(0, draws, per_block):
        yield _counts(rng, num, min(per_block, draws - first))


@functools.lru_cache(maxsize=2)
def _table(num: int, draws: int, seed: int, group: int) -> np.ndarray:
    return _counts(np.random.default_rng((seed, group)), num, draws)


def _counts(rng: np.random.Generator, num: int, draws: int) -> np.ndarray:
    """Count the rows of each draw: a multinomial of ``num`` trials over ``num`` rows."""
    drawn = rng.integers(num, size=(draws, num))
    drawn += num * np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=draws * num).reshape(draws, num).astype(np.float64)
