"""Metrics of the direction in which predicted DE genes change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbdiff.evaluation.cell_eval2.measurements import Pair
from perturbdiff.evaluation.cell_eval2.metrics import DE, Rules

_LEAST_ROOM = 0.05  # between the share of the majority sign and 1


@dataclass(frozen=True)
class _Counts:
    """Per perturbation, targets left out: float64 [M] each.

    Attributes
    ----------
    real
        Real DE genes.
    called
        Predicted DE genes that have a real direction.
    right
        Those of them whose predicted sign is the real one.
    majority
        Share of the more frequent sign among the real DE genes; NaN without any.
    """

    real: np.ndarray
    called: np.ndarray
    right: np.ndarray
    majority: np.ndarray


def scored_direction_scores(pair: Pair, rules: Rules) -> dict[str, np.ndarray]:
    """Return the two scored metrics of directions, float64 [M] each."""
    signs = _Signs(pair)
    counts = signs.counts()
    return {
        f"{DE}direction_fidelity_yield_raw": _over(counts.right, np.maximum(counts.called, counts.real)),
        f"{DE}direction_reach_raw": _over(signs.reach(rules.purity, everything=False), counts.real),
    }


def direction_scores(pair: Pair, rules: Rules) -> dict[str, np.ndarray]:
    """Return all metrics of directions, float64 [M] each."""
    signs = _Signs(pair)
    counts = signs.counts()
    fair = counts.majority + (1.0 - rules.alpha) * (1.0 - counts.majority)
    known = np.where(np.isnan(counts.majority), np.nan, counts.real)
    return {
        **scored_direction_scores(pair, rules),
        **_corrected(counts),
        f"{DE}direction_fidelity_raw": _over(counts.right, counts.called),
        f"{DE}direction_coverage": _over(counts.called, counts.real),
        f"{DE}direction_yield_raw": _over(counts.right, counts.real),
        f"{DE}direction_reach": _over(signs.reach(fair, everything=False), known),
        f"{DE}direction_reach_unbounded": _over(signs.reach(fair, everything=True), known),
        f"{DE}direction_reach_unbounded_raw": _over(signs.reach(rules.purity, everything=True), counts.real),
        **_with_targets(pair, rules),
    }


def _corrected(counts: _Counts) -> dict[str, np.ndarray]:
    """Return what is corrected for always guessing the more frequent sign.

    Without any real DE gene the right answer is to call none.
    """
    room = np.maximum(1.0 - counts.majority, _LEAST_ROOM)
    silent = np.where(counts.called == 0, 1.0, 0.0)
    gained = (_over(counts.right, counts.called) - counts.majority) / room
    covered = np.minimum(1.0, _over(counts.called, counts.real)) * gained
    covered = np.where((counts.called == 0) & ~np.isnan(counts.majority), 0.0, covered)
    surplus = counts.right - counts.majority * counts.called
    return {
        f"{DE}direction_fidelity": np.where(counts.real == 0, silent, gained),
        f"{DE}direction_fidelity_yield": np.where(counts.real == 0, silent, covered),
        f"{DE}direction_yield": _over(surplus, counts.real * room),
    }


def _with_targets(pair: Pair, rules: Rules) -> dict[str, np.ndarray]:
    """Return the three older metrics, which do not leave targets out."""
    signs = _Signs(pair, targets=True)
    counts = signs.counts()
    purity = 1.0 - rules.alpha / 2.0
    return {
        f"{DE}direction_precision": _over(counts.right, counts.called),
        f"{DE}direction_sensitivity": _over(signs.reach(purity, everything=False), counts.real),
        f"{DE}direction_sensitivity_universe": _over(signs.reach(purity, everything=True), counts.real),
    }


def _over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole; NaN where whole is 0 or NaN."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


class _Signs:
    """Which genes have a real direction, and for which of them the prediction has the same sign."""

    def __init__(self, pair: Pair, *, targets: bool = False) -> None:
        self._pair = pair
        self._real = pair.significant(pair.real, targets=targets)
        self._called = pair.significant(pair.predicted, targets=targets)
        self._shared = np.isfinite(pair.real.p) & np.isfinite(pair.predicted.p)
        if not targets:
            for row, own in zip(self._shared, pair.tested_targets, strict=True):
                row[own] = False
        self._directed = self._shared & (pair.real.fold != 0)
        self._right = self._directed & (np.sign(pair.real.fold) == np.sign(pair.predicted.fold))

    def counts(self) -> _Counts:
        up = (self._real & (self._pair.real.fold > 0)).sum(axis=1)
        votes = (self._real & (self._pair.real.fold != 0)).sum(axis=1)
        return _Counts(
            self._real.sum(axis=1).astype(float),
            (self._called & self._directed).sum(axis=1).astype(float),
            (self._called & self._right).sum(axis=1).astype(float),
            _over(np.maximum(up, votes - up), votes),
        )

    def reach(self, purity: float | np.ndarray, *, everything: bool) -> np.ndarray:
        """Return how many genes with a direction the longest start of the ranking holds that is pure enough.

        Parameters
        ----------
        purity
            Least share of right signs, one for all or one for each perturbation.
        everything
            Rank all genes, not only the real DE genes.
        """
        least = np.broadcast_to(purity, len(self._real))
        deepest = np.zeros(len(self._real))
        for i in range(len(self._real)):
            genes = self._ranked(i, self._shared[i] if everything else self._shared[i] & self._real[i])
            depth, right = np.cumsum(self._directed[i, genes]), np.cumsum(self._right[i, genes])
            with np.errstate(invalid="ignore", divide="ignore"):
                pure = (depth > 0) & (right / depth >= least[i])
            deepest[i] = depth[pure].max(initial=0)
        return deepest

    def _ranked(self, i: int, genes: np.ndarray) -> np.ndarray:
        """Return the positions of ``genes`` from the prediction's strongest on: by p, size of change and name.

        The adjusted p, which the rules name first, never falls as p rises, so that it decides nothing more.
        """
        chosen, side = np.flatnonzero(genes), self._pair.predicted
        keys = (
            self._pair.gene_order[side.genes[chosen]],
            -np.abs(side.fold[i, chosen]),
            side.p[i, chosen],
        )
        return chosen[np.lexsort(keys)]
