"""Metrics of DE sets: their genes, order, fold changes, q, and the direction in which they change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbdiff.evaluation.cell_eval2.measurements import Pair
from perturbdiff.evaluation.cell_eval2.metrics import DE, FOLD_ERROR, Rules
from perturbdiff.evaluation.metrics.profile_metrics import areas_of, spearman

_MOST = (None, 50, 100, 200, 500)
_FLOOR = 1e-10  # q that stands for zero where no q is positive


def scored_set_scores(pair: Pair, rules: Rules) -> dict[str, np.ndarray]:
    """Return the two scored metrics of DE sets, float64 [M] each."""
    return {f"{DE}sig_jaccard": jaccard(pair), FOLD_ERROR: fold_error(pair, rules)}


def set_scores(pair: Pair, rules: Rules) -> dict[str, np.ndarray]:
    """Return all metrics of DE sets, float64 [M] each."""
    real = pair.significant(pair.real, targets=True)
    predicted = pair.significant(pair.predicted, targets=True)
    return {
        **scored_set_scores(pair, rules),
        **_overlaps(pair, real, predicted),
        **_counts(real, predicted),
        **_agreement(pair, real, predicted),
        **_signs(pair, real, predicted),
        f"{DE}lfc_spearman": _fold_ranks(pair, real),
        f"{DE}lfc_spearman_pos": _fold_ranks(pair, real & (pair.real.fold > 0)),
        f"{DE}lfc_spearman_neg": _fold_ranks(pair, real & (pair.real.fold < 0)),
        **_areas(pair, real),
    }


def jaccard(pair: Pair) -> np.ndarray:
    """Return shared over all DE genes, targets left out; 1 where neither side has any."""
    real = pair.significant(pair.real, targets=False)
    predicted = pair.significant(pair.predicted, targets=False)
    return _share((real & predicted).sum(axis=1), (real | predicted).sum(axis=1), empty=1.0)


def fold_error(pair: Pair, rules: Rules) -> np.ndarray:
    """Return Σ|predicted − real| / Σ|real| of log2 fold changes over the real DE genes, targets left out.

    A gene without a finite predicted fold change counts as unchanged. NaN with too few genes or no real change.
    """
    return _fold_error(pair, rules, pair.predicted.fold, pair.real.fold)


def replicate_fold_error(pair: Pair, rules: Rules, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the same between fold changes of two halves, over the DE genes and the changes of all real cells."""
    return _fold_error(pair, rules, first, second)


def _fold_error(pair: Pair, rules: Rules, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Compare row by row, over the DE genes only; what is not finite counts as unchanged."""
    error, size = np.zeros(len(one)), np.zeros(len(one))
    genes = pair.significant(pair.real, targets=False) & np.isfinite(pair.real.fold)
    for i, chosen in enumerate(genes):
        a, b = (np.where(np.isfinite(row[chosen]), row[chosen], 0.0) for row in (one[i], other[i]))
        error[i], size[i] = np.abs(a - b).sum(), np.abs(pair.real.fold[i, chosen]).sum()
    kept = (genes.sum(axis=1) >= rules.min_genes) & (size > 0)
    return np.divide(error, size, out=np.full(len(error), np.nan), where=kept)


def _share(part: np.ndarray, whole: np.ndarray, empty: float = float("nan")) -> np.ndarray:
    """Return part / whole, ``empty`` where whole is 0."""
    return np.divide(part, whole, out=np.full(len(part), empty), where=whole > 0)


def _strongest(fold: np.ndarray, genes: np.ndarray) -> np.ndarray:
    """Return the positions of ``genes`` (bool [G]) by falling |fold change|."""
    chosen = np.flatnonzero(genes)
    return chosen[np.argsort(-np.abs(fold[chosen]), kind="stable")]


def _overlaps(pair: Pair, real: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """Return overlap and precision of the strongest genes, and the overlap corrected for chance."""
    suffixes = ["" if most is None else f"_top{most}" for most in _MOST]
    names = [f"{DE}{kind}{s}" for kind in ("overlap", "precision") for s in suffixes]
    scores = {name: np.zeros(len(real)) for name in (*names, f"{DE}overlap_adjusted")}
    for i in range(len(real)):
        true = _strongest(pair.real.fold[i], real[i])
        found = _strongest(pair.predicted.fold[i], predicted[i])
        for most, suffix in zip(_MOST, suffixes, strict=True):
            for kind, size in (("overlap", len(true)), ("precision", len(found))):
                k = size if most is None else min(most, size)
                shared = len(np.intersect1d(true[:k], found[:k]))
                scores[f"{DE}{kind}{suffix}"][i] = shared / k if k else 0.0
        top = found[: len(true)]
        scores[f"{DE}overlap_adjusted"][i] = _matthews(
            len(np.intersect1d(true, top)), len(true), len(top), _num_tested(pair, i)
        )
    return scores


def _num_tested(pair: Pair, i: int) -> int:
    return int((np.isfinite(pair.real.p[i]) | np.isfinite(pair.predicted.p[i])).sum())


def _matthews(shared: int, a: int, b: int, n: int) -> float:
    """Return the Matthews correlation of two sets of a and b among n; −1 if one is empty or everything."""
    if not (0 < a < n and 0 < b < n):
        return -1.0
    return (shared * n - a * b) / (a * b * (n - a) * (n - b)) ** 0.5


def _agreement(pair: Pair, real: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """Return recall, and recall, precision and correlation of the sets corrected for chance."""
    both = (real & predicted).sum(axis=1)
    a, b = real.sum(axis=1), predicted.sum(axis=1)
    n = np.array([_num_tested(pair, i) for i in range(len(real))])
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = both / a - (b - both) / (n - a)
        precision = both / b - (a - both) / (n - b)
    return {
        f"{DE}sig_recall": _share(both, a),
        f"{DE}sig_recall_adjusted": np.where((a > 0) & (a < n), recall, -1.0),
        f"{DE}precision_adjusted": np.where((b > 0) & (b < n), precision, -1.0),
        f"{DE}sig_mcc": np.array([_matthews(*map(int, row)) for row in zip(both, a, b, n, strict=True)]),
    }


def _counts(real: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """Return numbers of DE genes, and their rank correlation over perturbations with real ones."""
    a, b = real.sum(axis=1).astype(float), predicted.sum(axis=1).astype(float)
    some = a > 0
    same = spearman(a[some], b[some])
    return {
        f"{DE}nsig_counts_real": a,
        f"{DE}nsig_counts_pred": b,
        f"{DE}nsig_spearman": np.full(len(a), same),
    }


def _signs(pair: Pair, real: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """Return the share of equal signs among the DE genes of either side."""
    known = np.isfinite(pair.real.p) & np.isfinite(pair.predicted.p)
    same = np.sign(pair.real.fold) == np.sign(pair.predicted.fold)
    match = {}
    for name, genes in (("direction_match", real & known), ("model_direction_match", predicted & known)):
        match[f"{DE}{name}"] = _share((same & genes).sum(axis=1), genes.sum(axis=1))
    return match


def _fold_ranks(pair: Pair, genes: np.ndarray) -> np.ndarray:
    """Return rank correlations of fold changes over ``genes``; one that was not tested counts as unchanged."""
    predicted = np.where(np.isfinite(pair.predicted.p), pair.predicted.fold, 0.0)
    rows = zip(pair.real.fold, predicted, genes, strict=True)
    return np.array([spearman(a[g], b[g]) for a, b, g in rows])


def _areas(pair: Pair, real: np.ndarray) -> dict[str, np.ndarray]:
    """Return the areas under both curves of −log10 of the predicted q, over the genes tested on the real side."""
    tested = np.isfinite(pair.real.p)
    q = np.stack([pair.predicted.q(i) for i in range(len(real))])
    q[np.isnan(q)] = 1.0
    positive = q[tested & (q > 0)]
    q[q == 0] = positive.min() if positive.size else _FLOOR  # one floor for all perturbations
    strength = -np.log10(q)
    found = [
        areas_of(labels[genes], score[genes])
        for labels, score, genes in zip(real, strength, tested, strict=True)
    ]
    roc, precision = np.array(found).reshape(-1, 2).T
    return {f"{DE}pr_auc": precision, f"{DE}roc_auc": roc}


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
