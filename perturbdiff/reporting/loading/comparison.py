"""Comparing methods: paired differences with bootstrap intervals, scaled scores, and the collapse check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from perturbdiff.evaluation.metrics.collapse import Collapse, collapse, shared

_DRAWS = 2000


@dataclass(frozen=True)
class Paired:
    """How method a fares against method b on the conditions where both are scored.

    ``rate`` counts a tie as half a win. ``gain`` is the mean advantage of a, positive where a is better.
    Intervals are percentile bootstrap intervals (95 %) over conditions.
    """

    n: int
    wins: int
    ties: int
    rate: float
    rate_interval: tuple[float, float]
    gain: float
    gain_interval: tuple[float, float]


def paired(a: pd.Series, b: pd.Series) -> pd.DataFrame:
    """Return the conditions on which both are defined, with columns ``a`` and ``b``."""
    return pd.concat({"a": a, "b": b}, axis=1, join="inner").dropna().sort_index()


def compare(pairs: pd.DataFrame, *, higher: bool, seed: int = 0) -> Paired:
    """Return wins and mean advantage of ``a`` over ``b``.

    Parameters
    ----------
    pairs
        Columns ``a`` and ``b``, one row per condition, at least one.
    higher
        Whether larger values are better.
    seed
        Seed of the bootstrap over conditions (2,000 draws).
    """
    advantage = (pairs["a"] - pairs["b"]).to_numpy() * (1.0 if higher else -1.0)
    won = (advantage > 0) + 0.5 * (advantage == 0)
    rng = np.random.default_rng(seed)
    drawn = np.empty((_DRAWS, 2))
    for i in range(_DRAWS):
        rows = rng.integers(len(pairs), size=len(pairs))
        drawn[i] = won[rows].mean(), advantage[rows].mean()
    (low_rate, low_gain), (high_rate, high_gain) = np.percentile(drawn, (2.5, 97.5), axis=0)
    return Paired(
        n=len(pairs),
        wins=int((advantage > 0).sum()),
        ties=int((advantage == 0).sum()),
        rate=float(won.mean()),
        rate_interval=(float(low_rate), float(high_rate)),
        gain=float(advantage.mean()),
        gain_interval=(float(low_gain), float(high_gain)),
    )


def win_rates(values: Mapping[str, pd.Series], *, higher: bool) -> pd.DataFrame:
    """Compare every method with every other on the conditions where both are scored.

    Parameters
    ----------
    values
        One metric per condition of each method.
    higher
        Whether larger values are better.

    Returns
    -------
    DataFrame
        A row per ordered pair with a shared condition: method, against, rate (a tie is half a win), n.
    """
    methods = list(values)
    keys = pd.Index(sorted({key for column in values.values() for key in column.index}))
    matrix = np.full((len(keys), len(methods)), np.nan)
    for i, column in enumerate(values.values()):
        matrix[keys.get_indexer(pd.Index(column.index)), i] = column.to_numpy(np.float64)
    matrix *= 1.0 if higher else -1.0
    rows = []
    for i, j in np.ndindex(len(methods), len(methods)):
        both = np.isfinite(matrix[:, i]) & np.isfinite(matrix[:, j])
        if i == j or not both.any():
            continue
        gap = matrix[both, i] - matrix[both, j]
        rate = float(((gap > 0) + 0.5 * (gap == 0)).mean())
        rows.append({"method": methods[i], "against": methods[j], "rate": rate, "n": int(both.sum())})
    return pd.DataFrame(rows, columns=pd.Index(["method", "against", "rate", "n"]))


def scaled(scores: pd.DataFrame, higher: dict[str, bool]) -> pd.DataFrame:
    """Scale each metric to [0, 1] over the methods, 1 the best of them.

    Parameters
    ----------
    scores
        Methods × metrics.
    higher
        For each metric whether larger values are better.

    Returns
    -------
    DataFrame
        Same shape. A metric on which all methods are equal is 1 throughout, undefined scores stay NaN.
    """
    columns = {}
    for name in scores.columns:
        values = scores[name].to_numpy(np.float64) * (1.0 if higher[str(name)] else -1.0)
        defined = values[np.isfinite(values)]
        low, high = (defined.min(), defined.max()) if defined.size else (0.0, 0.0)
        even = np.where(np.isfinite(values), 1.0, np.nan)
        columns[name] = (values - low) / (high - low) if high > low else even
    return pd.DataFrame(columns, index=scores.index)


def ranks(scores: pd.Series, direction: str) -> pd.Series:
    """Return 1 for the best, 2 for the second, .... Equal scores share a rank, undefined ones have NaN.

    ``direction`` is higher, lower, one (closest to 1 is best) or none (no ranks).
    """
    if direction == "none":
        return pd.Series(np.nan, index=scores.index)
    if direction == "one":
        return (scores - 1.0).abs().rank(method="min")
    return scores.rank(ascending=direction == "lower", method="min")


@dataclass(frozen=True)
class Alike:
    """The collapse check of a run with its pairs by name: columns first, second, real, predicted."""

    found: Collapse
    pairs: pd.DataFrame


def alike(real: pd.DataFrame, predicted: pd.DataFrame) -> Alike | None:
    """Compare how alike predicted changes are between perturbations with how alike the real ones are.

    Parameters
    ----------
    real, predicted
        Changes [perturbations × genes], see `perturbdiff.evaluation.metrics.collapse.changes`. What both have is used.

    Returns
    -------
    Alike or None
        None with fewer than two perturbations or genes.
    """
    x, y = shared(real, predicted)
    result = collapse(x.to_numpy(np.float64), y.to_numpy(np.float64))
    if result is None:
        return None
    names, pairs = x.index.to_numpy(), result.pairs
    columns = {"first": names[pairs.first], "second": names[pairs.second]}
    return Alike(result, pd.DataFrame({**columns, "real": pairs.real, "predicted": pairs.predicted}))
