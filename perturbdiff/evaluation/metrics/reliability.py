"""From the score of one half of the real cells against the other to that of whole samples: Spearman–Brown.

The ceiling run compares halves, each with half the cells. If a score is the correlation of two measurements with
independent errors, two samples of twice the size would correlate by 2r / (1 + r) (Spearman 1910, Brit. J. Psychol.
3:271; Brown 1910, Brit. J. Psychol. 3:296). cell-eval 0.8.2 applies this to the means of all its bounded metrics,
and `full_depth` gives those numbers.

The report and `aggregate.csv` show the halves' own score, uncorrected:

* the formula holds for correlations. For others it is not a correction: an AUROC of 0.5, no better than a coin,
  becomes 0.67; a discrimination score at its chance level becomes better than chance;
* both halves are compared with the same real controls, so that their errors are not independent;
* a measured number can be looked up per condition and has an interval. Full-size predictions meet a truth with less
  noise than these halves, so that a good model may come out above it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perturbdiff.evaluation.metrics.catalogue import METRICS

_OTHERS = ("mse", "mae", "mse_delta", "mae_delta", "de_nsig_counts_real", "de_nsig_counts_pred")
CORRECTED = tuple(name for name, m in METRICS.items() if m.column and m.column not in _OTHERS)
"""Metrics whose split-half means cell-eval 0.8.2 corrects: its bounded ones for which higher is better."""


def spearman_brown(half: np.ndarray | float) -> np.ndarray:
    """Return 2r / (1 + r), the reliability of two samples of twice the size; NaN where r is not positive.

    Parameters
    ----------
    half
        Reliability r between halves, at most 1; any shape.

    Returns
    -------
    ndarray
        float64 in the shape of ``half``.
    """
    r = np.asarray(half, np.float64)
    return np.divide(2.0 * r, 1.0 + r, out=np.full(r.shape, np.nan), where=r > 0)


def full_depth(means: Mapping[str, float]) -> dict[str, float]:
    """Return the ceiling that cell-eval 0.8.2 reports for split-half means, NaN for what it does not correct.

    Parameters
    ----------
    means
        ``mean`` of a ceiling run by metric, as in ``aggregate.csv``.
    """
    return {n: float(spearman_brown(mean)) if n in CORRECTED else float("nan") for n, mean in means.items()}
