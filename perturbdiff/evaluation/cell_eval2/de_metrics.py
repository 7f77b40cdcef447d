"""Metrics of DE sets, their order, fold changes and q."""

from __future__ import annotations

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
