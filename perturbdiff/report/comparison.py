"""Comparing methods: paired differences with bootstrap intervals, scaled scores, and the collapse check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

_DRAWS = 2000


@dataclass(frozen=True)
class Paired:
    """How method a fares against method b on the conditions where both are scored.

    ``rate`` counts a tie as half a win; ``gain`` is the mean advantage of a, positive where a is better.
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
        Of the bootstrap over conditions (2,000 draws).
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
        Same shape; a metric on which all methods are equal is 1 throughout, undefined scores stay NaN.
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
    """Return 1 for the best, 2 for the second, ...; equal scores share a rank, undefined ones have NaN.

    ``direction`` is higher, lower, one (closest to 1 is best) or none (no ranks).
    """
    if direction == "none":
        return pd.Series(np.nan, index=scores.index)
    if direction == "one":
        return (scores - 1.0).abs().rank(method="min")
    return scores.rank(ascending=direction == "lower", method="min")


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


@dataclass(frozen=True)
class Collapse:
    """Whether the predictions of different perturbations are alike.

    ``pairs`` has a row per pair of perturbations: columns first, second, real, predicted (Pearson correlations
    of their mean changes over genes). ``ratio`` is the median over perturbations of the norm of the predicted
    change over the norm of the real one.
    """

    pairs: pd.DataFrame
    real: float
    predicted: float
    ratio: float

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


def collapse(real: pd.DataFrame, predicted: pd.DataFrame) -> Collapse | None:
    """Compare how alike predicted changes are between perturbations with how alike the real ones are.

    Parameters
    ----------
    real, predicted
        Changes [perturbations × genes], see `changes`. Only shared perturbations and genes are used.

    Returns
    -------
    Collapse or None
        None with fewer than two perturbations.
    """
    rows, genes = real.index.intersection(predicted.index), real.columns.intersection(predicted.columns)
    if len(rows) < 2 or len(genes) < 2:
        return None
    x, y = (t.loc[rows, genes].to_numpy(np.float64, na_value=0.0) for t in (real, predicted))
    first, second = np.triu_indices(len(rows), k=1)
    pairs = pd.DataFrame(
        {
            "first": rows.to_numpy()[first],
            "second": rows.to_numpy()[second],
            "real": _correlations(x)[first, second],
            "predicted": _correlations(y)[first, second],
        }
    )
    length = np.linalg.norm(x, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.linalg.norm(y, axis=1) / np.where(length > 0, length, np.nan)
    return Collapse(pairs, *(_median(v) for v in (pairs["real"], pairs["predicted"], ratio)))


def _median(values: Any) -> float:
    numbers = np.asarray(values, np.float64)
    return float(np.median(numbers[~np.isnan(numbers)])) if not np.isnan(numbers).all() else float("nan")


def _correlations(x: np.ndarray) -> np.ndarray:
    """Pearson correlations between rows; NaN for rows that are constant up to rounding."""
    centred = x - x.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centred, axis=1)
    length = np.where(length > 1e-6, length, np.nan)[:, None]
    return np.clip((centred / length) @ (centred / length).T, -1.0, 1.0)
