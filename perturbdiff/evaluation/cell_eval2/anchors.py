"""The two ends of the scale: the mean response given to every perturbation, and one half of the cells for the other.

They are kept as a table, so that the next method on the same real cells need not make them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp

from perturbdiff.evaluation.cell_eval2.de_metrics import replicate_fold_error
from perturbdiff.evaluation.cell_eval2.measurements import (
    Pair,
    Profile,
    Read,
    Reference,
    Side,
    measure,
    reference_of,
)
from perturbdiff.evaluation.cell_eval2.metrics import FOLD_ERROR, Rules
from perturbdiff.evaluation.cell_eval2.scores import Scores, score
from perturbdiff.evaluation.scoring.scopes import Scope
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError


@dataclass(frozen=True)
class Ends:
    """Both ends of the scale, which no prediction changes: values per perturbation.

    Attributes
    ----------
    baseline
        Those of the mean response.
    replicates
        Those of each halving; empty where there are too few cells to halve.
    """

    baseline: Scores
    replicates: list[Scores]


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


@dataclass(frozen=True)
class RealSide:
    """The real cells as the ends need them.

    Attributes
    ----------
    cells
        Where they are.
    side
        What was measured of them.
    targets, gene_order
        As in `Pair`.
    """

    cells: RealCells
    side: Side
    targets: Sequence[np.ndarray]
    gene_order: np.ndarray

    def against(self, predicted: Side) -> Pair:
        """Return the pair with a prediction."""
        return Pair(self.side, predicted, self.targets, self.gene_order)


class MeanResponse:
    """The mean count per cell over perturbations, each with the same weight.

    A perturbation says nothing of its own targets, whose counts only tell that they were targeted.

    Parameters
    ----------
    targets
        Positions of each perturbation's own target genes.
    """

    def __init__(self, targets: Sequence[np.ndarray]) -> None:
        self._targets = targets
        self._means: list[np.ndarray] = [np.empty(0)] * len(targets)

    def add(self, place: int, profile: Profile) -> None:
        """Take the real cells of the perturbation at ``place``."""
        self._means[place] = profile.sums / profile.num_cells

    def taken(self) -> np.ndarray:
        """Return it, float64 [G], and let go what it is made of. NaN for genes that every perturbation targets."""
        total = np.sum(self._means, axis=0)
        counted = np.full(len(total), float(len(self._means)))
        for row, own in zip(self._means, self._targets, strict=True):
            total[own] -= row[own]
            counted[own] -= 1
        self._means = []
        return np.divide(total, counted, out=np.full(len(total), np.nan), where=counted > 0)


def baseline(
    real: RealSide,
    reference: Reference,
    response: np.ndarray,
    rules: Rules,
    *,
    threads: int | None = None,
) -> Scores:
    """Score the mean response as the prediction of every perturbation.

    Each predicted cell is a control cell drawn with replacement, its counts times the mean response over the mean of
    the controls, gene by gene; there are as many as the perturbation has real cells. So the cells vary as real ones do.
    """
    cells, control = real.cells, reference.profile.sums / len(real.cells.controls)
    response = np.where(np.isnan(response), control, response)
    factor = np.divide(response, control, out=np.zeros_like(control), where=control > 0)
    rng = np.random.default_rng(rules.baseline_seed)
    drawn = {
        name: cells.controls[rng.integers(0, len(cells.controls), size=int(size))]
        for name, size in zip(real.side.perturbations, real.side.num_cells, strict=True)
    }

    def read(rows: np.ndarray) -> Sparse:
        counts = cells.read(rows)
        values = (counts.data * factor[counts.indices]).astype(np.float32).astype(np.float64)
        return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)

    predicted = measure(read, drawn, reference, rules, threads=threads, label="baseline")
    return score(real.against(predicted), rules)


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


def replicates(real: RealSide, rules: Rules, *, threads: int | None = None) -> list[Scores]:
    """Score one half of the real cells as the prediction of the other, once for each seed of the rules.

    Each half has its own half of the controls: with the same controls on both sides their noise would be in both
    changes and look like agreement. The error of fold changes is that between the halves over the DE genes of all real
    cells, as for a prediction. Perturbations of one cell are NaN. Nothing if there are too few cells to halve.
    """
    if len(real.cells.controls) < 2 or max(map(len, real.cells.rows.values())) < 2:
        return []
    return [_replicate(real, rules, seed, threads) for seed in rules.split_seeds()]


def _replicate(real: RealSide, rules: Rules, seed: int, threads: int | None) -> Scores:
    rows, read = halves(real.cells, seed), real.cells.read
    references = [reference_of(read, half.pop(real.cells.control), rules) for half in rows]
    genes = np.flatnonzero(references[0].tested | references[1].tested)
    sides = []
    for half in rows:  # the sorted controls of a half are let go before the next one is measured
        reference = references.pop(0)
        sides.append(measure(read, half, reference, rules, genes=genes, threads=threads, label="replicate"))
        del reference
    kept = np.isin(real.side.perturbations, sides[0].perturbations)
    targets = [own for own, keep in zip(real.targets, kept, strict=True) if keep]
    found = score(Pair(sides[0], sides[1], targets, real.gene_order), rules)
    scores = {name: _spread(values, kept) for name, values in found.items()}
    folds = [_folds(real.side, side, kept) for side in sides]
    error = replicate_fold_error(real.against(real.side), rules, *folds)
    scores[FOLD_ERROR] = np.where(kept, error, np.nan)
    return scores


def _folds(real: Side, half: Side, kept: np.ndarray) -> np.ndarray:
    """Return a half's fold changes of the perturbations and tested genes of all real cells; NaN where it has none."""
    folds = np.full(real.fold.shape, np.nan)
    _, there, here = np.intersect1d(real.genes, half.genes, assume_unique=True, return_indices=True)
    folds[np.ix_(kept, there)] = half.fold[:, here]
    return folds


def _spread(values: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return values of the ``kept`` perturbations among all; NaN for the others."""
    full = np.full(len(kept), np.nan)
    full[kept] = values
    return full


TABLE = "ends.parquet"
_BASELINE = -1


@dataclass(frozen=True)
class ScopeEnds:
    """The ends of one context.

    Attributes
    ----------
    scope
        The context.
    key
        Digest of what the ends depend on.
    perturbations
        Names of the M perturbations, sorted.
    ends
        Values of both ends.
    """

    scope: Scope
    key: str
    perturbations: tuple[str, ...]
    ends: Ends


def write_ends(folder: Path, made: Sequence[ScopeEnds]) -> None:
    """Write the ends of each context and the digest of what they depend on: a row per end, metric and perturbation."""
    frames = []
    for one in made:
        for number, values in enumerate([one.ends.baseline, *one.ends.replicates], _BASELINE):
            table = pd.DataFrame(values, index=pd.Index(one.perturbations, name="perturbation"))
            long = table.reset_index().melt("perturbation", var_name="metric", value_name="value")
            kind, scope = one.scope
            frames.append(long.assign(scope_kind=kind, scope=scope, key=one.key, halving=number))
    pd.concat(frames, ignore_index=True).to_parquet(folder / TABLE, index=False)


class KeptEnds:
    """The ends that an earlier evaluation, or `ceiling`, wrote.

    Parameters
    ----------
    folder
        Its folder.

    Raises
    ------
    UserError
        If it has no such table, or was changed since.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / TABLE).is_file():
            raise UserError(
                f"{folder}: has no {TABLE}; name a folder that evaluate or ceiling --definition cell-eval2 wrote"
            )
        provenance.verify(folder)
        self._table = tabular.read_parquet(folder / TABLE, "evaluate again")
        wanted = {"scope_kind", "scope", "key", "halving", "metric", "perturbation", "value"}
        if not wanted <= set(self._table):
            raise UserError(f"{folder / TABLE}: is no table of ends; evaluate again")

    def of(self, scope: Scope, key: str, perturbations: Sequence[str]) -> Ends:
        """Return the ends of a scope.

        Raises
        ------
        UserError
            If they are of other real cells, rules or target genes, or of another release of this package.
        """
        rows = self._table[(self._table["scope_kind"] == scope[0]) & (self._table["scope"] == scope[1])]
        if set(rows["key"]) != {key}:
            raise UserError(
                f"{self._folder}: its ends are of other real cells, rules or target genes, or of another release; "
                "leave --ends out to make them"
            )
        found = [_scores(pd.DataFrame(part), perturbations) for _, part in rows.groupby("halving")]
        return Ends(found[0], found[1:])


def _scores(rows: pd.DataFrame, perturbations: Sequence[str]) -> Scores:
    wide = rows.pivot(index="perturbation", columns="metric", values="value").reindex(list(perturbations))
    return {str(name): wide[name].to_numpy(np.float64) for name in dict.fromkeys(rows["metric"])}
