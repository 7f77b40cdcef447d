"""How many perturbations, and how many cells of each, a metric needs to tell two references apart.

The rule is the sample size of a paired t-test, two-sided at 5 %, with a power of 80 %:
n = (z₀.₉₇₅ + z₀.₈)² / e² + z₀.₉₇₅² / 2, where e is the mean paired difference over its SD and the last term makes up
for the t distribution (Guenther 1981, Am. Stat. 35:243). The number of cells comes from scoring the same references
with fewer cells, which shows how e falls with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy.special import ndtri

LEVEL, POWER = 0.05, 0.8
LARGEST = 16.0
"""A number of cells is extrapolated to at most so many times the cells there are."""
_Z = float(ndtri(1 - LEVEL / 2) + ndtri(POWER))
_CORRECTION = float(ndtri(1 - LEVEL / 2)) ** 2 / 2
_FEWEST = 2
_STEEPEST = 1.0  # e of averages grows as the square root of the cells, that of gene lists faster


def effect_size(differences: np.ndarray) -> float:
    """Return the mean over the SD of paired differences, NaN with fewer than two."""
    if len(differences) < _FEWEST:
        return float("nan")
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    if spread == 0:
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / spread


def perturbations_needed(effect: float) -> float:
    """Return how many perturbations a test needs for an effect size; infinite unless it is positive, NaN if unknown."""
    if math.isnan(effect):
        return float("nan")
    if effect <= 0:
        return math.inf
    return float(max(_FEWEST, math.ceil((_Z / effect) ** 2 + _CORRECTION)))


def cells_needed(effects: Mapping[float, float], perturbations: int, cells: float) -> float:
    """Return how many cells of each condition a test over these perturbations needs.

    A line through log effect size over log number of cells tells where the effect size is large enough. Its slope
    is kept within 0 (more cells do not help) and 1.

    Parameters
    ----------
    effects
        Effect size for each share of the cells; the share 1 is among them.
    perturbations
        How many there are.
    cells
        Median number of cells of a condition.

    Returns
    -------
    float
        Cells of a condition, at least those of the smallest share that was tried. Infinite if more than `LARGEST`
        times the present number would be needed; NaN if unknown.
    """
    room = perturbations - _CORRECTION
    known = {share: e for share, e in effects.items() if e > 0 and math.isfinite(e)}
    if math.isinf(effects[1.0]) and effects[1.0] > 0:
        return cells * min(effects)
    if room <= 0 or math.isnan(effects[1.0]):
        return float("nan")
    if 1.0 not in known:
        return math.inf
    wanted, slope = _Z / math.sqrt(room), 0.5
    if len(known) > 1:
        x, y = np.log(list(known)), np.log(list(known.values()))
        slope = float(np.clip(np.polyfit(x, y, 1)[0], 0.0, _STEEPEST))
    if slope == 0:
        return math.inf if known[1.0] < wanted else cells * min(effects)
    share = math.log(wanted / known[1.0]) / slope  # its logarithm, which cannot overflow
    if share > math.log(LARGEST):
        return math.inf
    return float(math.ceil(cells * max(math.exp(share), min(effects))))
