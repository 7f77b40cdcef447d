"""How well a metric separates references whose order is known: a replicate, half a replicate, the mean, the control.

A reference is scored by one number for each metric and perturbation. Values are then oriented
(`perturbdiff.evaluation.metrics.bounds`): more is better.

How many perturbations, and how many cells of each, a metric needs to tell two references apart, is the sample size of a
paired t-test, two-sided at 5 %, with a power of 80 %: n = (z₀.₉₇₅ + z₀.₈)² / e² + z₀.₉₇₅² / 2, where e is the mean
paired difference over its SD and the last term makes up for the t distribution (Guenther 1981, Am. Stat. 35:243). The
number of cells comes from scoring the same references with fewer cells, which shows how e falls with them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.special import ndtri

from perturbdiff.conditions.condition import Condition
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.calibration.verdicts import FEWEST
from perturbdiff.evaluation.metrics import catalogue
from perturbdiff.evaluation.metrics.bounds import oriented
from perturbdiff.evaluation.metrics.catalogue import METRICS
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.readers.cell_sources import KnownSets, Sets
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.aggregate import ALL_PERTURBATIONS
from perturbdiff.evaluation.scoring.condition_pass import Scored, score_cells
from perturbdiff.evaluation.scoring.scopes import POOLED, Scope
from perturbdiff.runtime.large_arrays import PackedRows

_LEAST = 2  # cells of a condition that are kept

Look = Callable[[Scope, Comparison], None]


def comparable(pairs: Pairing) -> Pairing:
    """Return the pairing whose pool alone is scored, if that holds enough perturbations.

    With fewer than `FEWEST` of them, each context counts for itself.
    """
    several = len({(pairs.contexts[c], c.perturbation) for c in pairs.conditions if c in pairs.contexts})
    num = len(pairs.perturbations)
    return pairs if num < FEWEST and several > num else replace(pairs, contexts={})


def thinned(pairs: Pairing, share: float, *, seed: int) -> Pairing:
    """Return a pairing with a share of the cells and of the sets of each condition, drawn at random; controls stay.

    The cells and sets of a smaller share are among those of a larger one.
    """
    sides = {
        "real": replace(pairs.real, rows=_drawn(pairs.real.rows, share, seed)),
        "predicted": replace(pairs.predicted, rows=_drawn(pairs.predicted.rows, share, seed + 1)),
    }
    sets = pairs.sets
    if sets is not None:
        sets = KnownSets(_drawn_sets(sets.real, share, seed), _drawn_sets(sets.predicted, share, seed + 1))
    return replace(pairs, **sides, sets=sets)


def _drawn_sets(sets: Sets, share: float, seed: int) -> dict[Condition, list[np.ndarray]]:
    numbers = {condition: np.arange(len(all_sets)) for condition, all_sets in sets.items()}
    return {c: [sets[c][k] for k in kept] for c, kept in _drawn(numbers, share, seed).items()}


def _drawn(rows: Mapping[Condition, np.ndarray], share: float, seed: int) -> Mapping[Condition, np.ndarray]:
    def drawn(condition: Condition, size: int) -> np.ndarray:
        order = np.random.default_rng((seed, zlib.crc32(str(condition).encode()))).permutation(size)
        return np.sort(rows[condition][order[: numbers[condition]]])

    sizes = {condition: len(some) for condition, some in rows.items()}
    numbers = {c: max(min(_LEAST, size), round(share * size)) for c, size in sizes.items()}
    return PackedRows(sum(numbers.values()), ((c, drawn(c, size)) for c, size in sizes.items()))


def score_reference(
    pairs: Pairing,
    config: EvaluateConfig,
    *,
    seed: int = 0,
    threads: int | None = None,
    look: Look | None = None,
) -> pd.DataFrame:
    """Score the cells of a pairing.

    Parameters
    ----------
    pairs
        As `comparable` returns it.
    look
        Called with each comparison, from which more may be read.

    Returns
    -------
    DataFrame
        A row per perturbation (or "context|perturbation", see `comparable`), a column per metric, float64. A number
        for all perturbations stands in the row ``*``. Metrics of a condition's cells are means over the conditions of
        a row.
    """
    scored = score_cells(pairs, config, seed=seed, threads=threads)
    by_context = any(kind != POOLED for unit in scored.units for kind, _ in unit.scopes)
    tables = [_of_cells(scored, by_context=by_context)]
    for tested in scored.tested:
        comparison = tested.comparison(config)
        for scope in tested.unit.scopes:
            if (scope[0] != POOLED) == by_context:
                tables.append(_of_profiles(scope, comparison, scored.wanted.table))
                if look is not None:
                    look(scope, comparison)
    together = pd.concat(tables).groupby(level=0).first()  # of each metric one table has a value
    return pd.DataFrame(together, columns=pd.Index([m for m in catalogue.METRICS if m in together.columns]))


def _label(scope: Scope, perturbation: str) -> str:
    return perturbation if scope[0] == POOLED else f"{scope[1]}|{perturbation}"


def _of_profiles(scope: Scope, comparison: Comparison, metrics: tuple[str, ...]) -> pd.DataFrame:
    values = catalogue.score(comparison, metrics)
    rows = pd.Index([_label(scope, p) for p in comparison.perturbations], name="unit")
    table = pd.DataFrame(
        {n: v for n, v in values.items() if catalogue.METRICS[n].per_perturbation}, index=rows
    )
    single = {n: float(v[0]) for n, v in values.items() if not catalogue.METRICS[n].per_perturbation}
    if single and scope[0] == POOLED:
        table = pd.concat([table, pd.DataFrame(single, index=pd.Index([ALL_PERTURBATIONS], name="unit"))])
    return table.astype(np.float64)


def _of_cells(scored: Scored, *, by_context: bool) -> pd.DataFrame:
    names = [*scored.wanted.distribution, *scored.wanted.sets]
    own = pd.DataFrame(scored.conditions[scored.conditions["own"]])
    unit = own["perturbation"].astype(str)
    if by_context:
        unit = own["context"].astype(str) + "|" + unit
    return pd.DataFrame(own.assign(unit=unit).groupby("unit")[names].mean().astype(np.float64))


_TINY = 1e-6  # keeps the fraction finite where the negative reference is perfect


def perfect(metric: str) -> float:
    """Return the oriented value of a perfect prediction, NaN for a metric without one.

    Distances and errors are perfect at 0, although unbiased estimates of them may fall below.
    """
    known = METRICS[metric]
    best = {"higher": known.high, "lower": 0.0, "one": 1.0}.get(known.direction, np.nan)
    return oriented(best, known.direction) if np.isfinite(best) else np.nan


def dynamic_range(positive: np.ndarray, negative: np.ndarray, best: float) -> float:
    """Return how much of the way from the negative reference to a perfect score the positive one goes.

    The dynamic range fraction of Miller et al. 2025 (bioRxiv 2025.10.20.683304) as their code has it: for each
    perturbation (positive − negative) / (perfect − negative), kept within −1 and 1. Of their two summaries we
    take the median, which one perturbation cannot move.

    Parameters
    ----------
    positive, negative
        Oriented values [splits, n] of the two references. The fractions of a perturbation are averaged over splits.
    best
        See `perfect`.

    Returns
    -------
    float
        NaN where no perturbation has both values, or the metric has no perfect score. A negative reference that is
        already beyond perfect (an unbiased distance below 0) leaves no range, and is left out.
    """
    room = best - negative
    usable = np.isfinite(positive) & np.isfinite(room) & (room >= 0)
    if not usable.any():
        return float("nan")
    share = np.full(usable.shape, np.nan)
    share[usable] = (positive[usable] - negative[usable]) / (room[usable] + _TINY)
    return float(np.median(over_splits(np.clip(share, -1.0, 1.0))))


def discrimination(better: np.ndarray, worse: np.ndarray) -> float:
    """Return the share of perturbations on which the better reference scores higher; a tie counts half.

    The bound discrimination score (Vollenweider & Bühlmann 2026, bioRxiv 2026.04.20.719650, as scPertEval has it).
    That code counts a tie as lost, so that a metric that is 0 for everything scores 0; with half a point it
    scores 0.5, as one that guesses. A reference without a value loses against one that has it, and where neither has
    a value the perturbation is left out.

    Parameters
    ----------
    better, worse
        Oriented values [splits, n].

    Returns
    -------
    float
        NaN if no perturbation has a value.
    """
    known = ~(np.isnan(better) & np.isnan(worse))
    if not known.any():
        return float("nan")
    a, b = (np.where(np.isnan(side), -np.inf, side)[known] for side in (better, worse))
    return float(np.mean((a > b) + 0.5 * (a == b)))


def over_splits(values: np.ndarray) -> np.ndarray:
    """Return the mean over splits [splits, n] for each perturbation that has any value, [at most n]."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    return total[known.any(axis=0)] / known.sum(axis=0)[known.any(axis=0)]


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
