"""The two ends of the scale: the mean response given to every perturbation, and one half of the cells for the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.cell_eval2.de_metrics import replicate_fold_error
from perturbdiff.evaluation.cell_eval2.measurements import Pair, Read, Side, measure, reference_of
from perturbdiff.evaluation.cell_eval2.metrics import FOLD_ERROR
from perturbdiff.evaluation.cell_eval2.rules import Rules
from perturbdiff.evaluation.cell_eval2.scores import score
from perturbdiff.io.matrices import Sparse

Scores = dict[str, np.ndarray]


@dataclass(frozen=True)
class RealCells:
    """Where the real cells of a context are.

    Attributes
    ----------
    read
        Reads counts.
    rows
        Rows of each perturbation.
    controls
        Rows of the controls, ascending.
    control
        Label of the control.
    """

    read: Read
    rows: Mapping[str, np.ndarray]
    controls: np.ndarray
    control: str


def mean_response(real: Side, targets: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean count per cell over perturbations, each with the same weight, float64 [G].

    A perturbation says nothing of its own targets, whose counts only tell that they were targeted. NaN for genes that
    every perturbation targets.
    """
    means = real.sums / real.num_cells[:, None]
    total, counted = means.sum(axis=0), np.full(means.shape[1], float(len(means)))
    for row, own in zip(means, targets, strict=True):
        total[own] -= row[own]
        counted[own] -= 1
    return np.divide(total, counted, out=np.full(len(total), np.nan), where=counted > 0)


def baseline(pair: Pair, cells: RealCells, rules: Rules, *, threads: int | None = None) -> Scores:
    """Score the mean response as the prediction of every perturbation.

    Each predicted cell is a control cell drawn with replacement, its counts times the mean response over the mean of
    the controls, gene by gene; there are as many as the perturbation has real cells. So the cells vary as real ones do.
    """
    control = pair.real.reference.profile.sums / len(cells.controls)
    response = mean_response(pair.real, pair.targets)
    response = np.where(np.isnan(response), control, response)
    factor = np.divide(response, control, out=np.zeros_like(control), where=control > 0)
    rng = np.random.default_rng(rules.baseline_seed)
    drawn = {
        name: cells.controls[rng.integers(0, len(cells.controls), size=int(size))]
        for name, size in zip(pair.real.perturbations, pair.real.num_cells, strict=True)
    }

    def read(rows: np.ndarray) -> Sparse:
        counts = cells.read(rows)
        values = (counts.data * factor[counts.indices]).astype(np.float32).astype(np.float64)
        return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)

    predicted = measure(read, drawn, pair.real.reference, rules, threads=threads, label="baseline")
    return score(replace(pair, predicted=predicted), rules)


def halves(cells: RealCells, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return rows of two halves of equal size of each perturbation and of the controls, which have their label.

    Of an odd number of cells one is left out, and a group of one cell.
    """
    rng = np.random.default_rng(seed)
    first, second = {}, {}
    for name, rows in sorted({**cells.rows, cells.control: cells.controls}.items()):
        order, size = rng.permutation(rows), len(rows) // 2
        if size:
            first[name], second[name] = np.sort(order[:size]), np.sort(order[size : 2 * size])
    return first, second


def replicates(pair: Pair, cells: RealCells, rules: Rules, *, threads: int | None = None) -> list[Scores]:
    """Score one half of the real cells as the prediction of the other, once for each seed of the rules.

    Each half has its own half of the controls: with the same controls on both sides their noise would be in both
    changes and look like agreement. The error of fold changes is that between the halves over the DE genes of all real
    cells, as for a prediction. Perturbations of one cell are NaN. Nothing if there are too few cells to halve.
    """
    if len(cells.controls) < 2 or max(map(len, cells.rows.values())) < 2:
        return []
    return [_replicate(pair, cells, rules, seed, threads) for seed in rules.split_seeds()]


def _replicate(pair: Pair, cells: RealCells, rules: Rules, seed: int, threads: int | None) -> Scores:
    names = pair.real.perturbations
    sides = []
    for rows in halves(cells, seed):
        controls = reference_of(cells.read, rows.pop(cells.control), rules)
        sides.append(measure(cells.read, rows, controls, rules, threads=threads, label="replicate"))
        del controls
    kept = np.isin(names, sides[0].perturbations)
    targets = [own for own, keep in zip(pair.targets, kept, strict=True) if keep]
    found = score(Pair(sides[0], sides[1], targets, pair.gene_order), rules)
    both = np.full((2, *pair.real.fold.shape), np.nan)
    for half, side in zip(both, sides, strict=True):
        half[kept] = side.fold
    scores = {name: _spread(values, kept) for name, values in found.items()}
    scores[FOLD_ERROR] = np.where(kept, replicate_fold_error(pair, rules, (both[0], both[1])), np.nan)
    return scores


def _spread(values: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return values of the ``kept`` perturbations among all; NaN for the others."""
    full = np.full(len(kept), np.nan)
    full[kept] = values
    return full
