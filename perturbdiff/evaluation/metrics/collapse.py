"""The collapse check: whether the predictions of different perturbations are alike although the truth is not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

MOST_PAIRS = 19_900  # pairs kept for a picture: all of them up to 200 perturbations
_MOST_ROWS = 2_000  # perturbations whose correlations with each other are taken
_STILL = 1e-6  # a change of this norm is rounding noise and has no direction


@dataclass(frozen=True)
class Pairs:
    """Pearson correlations over genes of the mean changes of pairs of perturbations.

    ``first`` and ``second`` are row numbers (int64), ``first`` < ``second``; ``real`` and ``predicted`` float64,
    NaN where a change has no direction.
    """

    first: np.ndarray
    second: np.ndarray
    real: np.ndarray
    predicted: np.ndarray


@dataclass(frozen=True)
class Collapse:
    """Whether the predictions of different perturbations are alike.

    Attributes
    ----------
    real, predicted
        Median over pairs of perturbations of the correlation of their mean changes; NaN if none has one.
    ratio
        Median over perturbations of the norm of the predicted change over the norm of the real one.
    pairs
        The pairs; beyond 200 perturbations an even selection of them.
    """

    real: float
    predicted: float
    ratio: float
    pairs: Pairs

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


def collapse(real: np.ndarray, predicted: np.ndarray) -> Collapse | None:
    """Compare how alike predicted changes are between perturbations with how alike the real ones are.

    Parameters
    ----------
    real, predicted
        Mean changes from control in log1p units, [perturbations × genes], rows and columns in the same order.
        Beyond 2,000 perturbations the correlations are those of 2,000 evenly spaced rows; the ratio is of all.

    Returns
    -------
    Collapse or None
        None with fewer than two perturbations or genes.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if real.shape != predicted.shape:
        raise ValueError(f"real changes {real.shape} and predicted changes {predicted.shape} differ in shape")
    if min(real.shape) < 2:
        return None
    rows = np.unique(np.linspace(0, len(real) - 1, min(len(real), _MOST_ROWS)).round().astype(np.int64))
    first, second = np.triu_indices(len(rows), k=1)
    x, y = (_correlations(changes[rows])[first, second] for changes in (real, predicted))
    kept = slice(None, None, -(-len(first) // MOST_PAIRS))
    length = np.linalg.norm(real, axis=1)
    ratio = np.linalg.norm(predicted, axis=1) / np.where(length > 0, length, np.nan)
    pairs = Pairs(rows[first[kept]], rows[second[kept]], x[kept], y[kept])
    return Collapse(_median(x), _median(y), _median(ratio), pairs)


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


def shared(real: pd.DataFrame, predicted: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return both tables of `changes` on the perturbations and genes that they share; a missing change is 0."""
    rows, genes = real.index.intersection(predicted.index), real.columns.intersection(predicted.columns)
    x, y = (table.loc[rows, genes].fillna(0.0) for table in (real, predicted))
    return x, y


def _median(values: np.ndarray) -> float:
    defined = values[~np.isnan(values)]
    return float(np.median(defined)) if defined.size else float("nan")


def _correlations(x: np.ndarray) -> np.ndarray:
    """Pearson correlations between rows; NaN for rows that are constant up to rounding."""
    centred = x - x.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centred, axis=1)
    scaled = centred / np.where(length > _STILL, length, np.nan)[:, None]
    return np.clip(scaled @ scaled.T, -1.0, 1.0)
