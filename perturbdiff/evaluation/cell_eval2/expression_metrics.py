"""Metrics of profiles: errors, corrected for sampling noise or not, and discrimination."""

from __future__ import annotations

import numpy as np

from perturbdiff.evaluation.cell_eval2.measurements import Pair, Side
from perturbdiff.evaluation.cell_eval2.metrics import NORM_PARTS, Rules
from perturbdiff.evaluation.metrics.profile_metrics import panel_discrimination


def expression_scores(pair: Pair, rules: Rules) -> dict[str, np.ndarray]:
    """Return all metrics of profiles, float64 [M] each."""
    real, predicted = pair.real, pair.predicted
    error = predicted.bulk - real.bulk
    change_error = predicted.change - real.change
    plain, capped, distance = unbiased_errors(pair)
    return {
        "expr_mae": np.abs(error).mean(axis=1),
        "expr_mse": (error**2).mean(axis=1),
        "delta_mae": np.abs(change_error).mean(axis=1),
        "delta_mse": (change_error**2).mean(axis=1),
        "delta_pearson": _correlations(predicted.change, real.change),
        **discrimination(pair),
        "expr_mse_unbiased": plain,
        NORM_PARTS[0]: capped,
        NORM_PARTS[1]: distance,
        "expr_real_mass_ratio": np.expm1(real.bulk).sum(axis=1) / rules.bulk_depth,
    }


def _correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Pearson correlations of rows; NaN for a constant one."""
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norms > 0, np.clip(np.einsum("ij,ij->i", a, b) / norms, -1.0, 1.0), np.nan)


def discrimination(pair: Pair) -> dict[str, np.ndarray]:
    """Return for each distance the share of other real changes farther from the predicted one than the right one.

    The targets of all perturbations are left out; of equal distances half count as farther. 1 for a single
    perturbation. If every gene is a target there is nothing to compare with: NaN.
    """
    left_out = np.zeros(pair.real.bulk.shape[1], bool)
    for own in pair.targets:
        left_out[own] = True
    num = len(pair.targets)
    if left_out.all() or num == 1:
        alone = np.full(num, np.nan if left_out.all() else 1.0)
        return dict.fromkeys(("pds_l1", "pds_l2", "pds_cosine"), alone)
    predicted, real = pair.predicted.change[:, ~left_out], pair.real.change[:, ~left_out]
    return {
        "pds_l1": panel_discrimination(pair.real.change, pair.predicted.change, left_out, distance="l1"),
        "pds_l2": _farther(_euclidean(predicted, real)),
        "pds_cosine": _farther(_cosine(predicted, real)),
    }


def _euclidean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * (a @ b.T)
    return np.sqrt(np.maximum(squares, 0.0))


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return cosine distances; 1 from and to a change of zero."""
    norms = np.sqrt((a**2).sum(axis=1))[:, None] * np.sqrt((b**2).sum(axis=1))[None, :]
    likeness = np.divide(a @ b.T, norms, out=np.zeros_like(norms), where=norms != 0)
    return np.clip(1.0 - likeness, 0.0, 2.0)


def _farther(distances: np.ndarray) -> np.ndarray:
    """Return 1 − k/(n − 1) with k the nearer ones plus half of the equal ones, row by row."""
    n = len(distances)
    own = distances.diagonal()[:, None]
    rank = (distances < own).sum(axis=1) + ((distances == own).sum(axis=1) - 1) / 2.0
    return 1.0 - rank / (n - 1)


def unbiased_errors(pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean squared distances less sampling noise, float64 [M] each; a perturbation's own targets are left out.

    Returns
    -------
    tuple
        Predicted to real; the same with the prediction's noise capped; real to control.
    """
    real, predicted = pair.real, pair.predicted
    num_genes = np.array([real.bulk.shape[1] - len(own) for own in pair.targets], float)
    weight = np.divide(1.0, num_genes, out=np.zeros_like(num_genes), where=num_genes > 0)
    error = _squares(predicted.bulk - real.bulk, pair)
    capped = _capped_noise(pair, weight)
    away = _squares(real.change, pair)
    numerators = (
        error - predicted.noise - real.noise,
        error - capped - real.noise,
        away - real.noise - real.control.noise,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        plain, best, distance = (np.where(num_genes > 0, n / num_genes, np.nan) for n in numerators)
    return plain, best, distance


def _squares(difference: np.ndarray, pair: Pair) -> np.ndarray:
    """Return each row's sum of squares without its own targets."""
    total = np.einsum("ij,ij->i", difference, difference)
    return total - np.array([(d[own] ** 2).sum() for d, own in zip(difference, pair.targets, strict=True)])


def _capped_noise(pair: Pair, weight: np.ndarray) -> np.ndarray:
    """Return the noise that is subtracted for the predictions, float64 [M].

    At most that of the real cells; and all of it is shrunk by one factor where the predicted profiles vary less
    between perturbations than independent noise of this size would make them.
    """
    capped = np.minimum(pair.predicted.noise, pair.real.noise)
    claimed = float((capped * weight).sum())
    if claimed <= 0:
        return capped
    return capped * min(1.0, _spread(pair.predicted, pair, weight) / claimed)


def _spread(side: Side, pair: Pair, weight: np.ndarray) -> float:
    """Return the weighted squared deviations from the mean profile, summed; targets are left out of their own row."""
    deviation = side.bulk - side.bulk.mean(axis=0)
    first, second = weight @ deviation, weight @ (deviation**2)
    weights = np.full(deviation.shape[1], weight.sum())
    rows = np.full(deviation.shape[1], float(len(weight)))
    for d, own, w in zip(deviation, pair.targets, weight, strict=True):
        first[own] -= w * d[own]
        second[own] -= w * d[own] ** 2
        weights[own] -= w
        rows[own] -= 1
    kept = (rows >= 2) & (weights > 0)
    return float(np.maximum(second[kept] - first[kept] ** 2 / weights[kept], 0.0).sum())
