"""From two matrices in memory to metrics: the evaluation without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import scipy.sparse as sp

from perturbdiff.conditions.targets import Targets
from perturbdiff.evaluation.metrics.catalogue import METRICS, chosen, score
from perturbdiff.evaluation.metrics.differential import (
    DEFAULT,
    DEFINITIONS,
    Controls,
    Definition,
    Differential,
)
from perturbdiff.evaluation.metrics.profile_metrics import MIN_DE, Comparison
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.evaluation.metrics.spread import Spread, variances
from perturbdiff.io.matrices import Sparse

Matrix = np.ndarray | Sparse
Labels = Sequence[str] | np.ndarray | pd.Series


def compare(
    real: Matrix,
    predicted: Matrix,
    real_labels: Labels,
    predicted_labels: Labels,
    *,
    control: str,
    genes: Sequence[str] | None = None,
    definition: str | Definition = DEFAULT,
    alpha: float = 0.05,
    min_de: int = MIN_DE,
    own_controls: bool = False,
    targets: Mapping[str, Sequence[str]] | None = None,
    threads: int = 1,
) -> Comparison:
    """Test real and predicted cells of every perturbation against the controls.

    Parameters
    ----------
    real, predicted
        log1p values, cells × genes, dense or sparse, over the same genes.
    real_labels, predicted_labels
        The perturbation of each cell.
    control
        The label of control cells.
    genes
        Names of the genes; those that perturbations act on are left out of discrimination scores. By default they
        are numbered.
    definition
        One of `DEFINITIONS`, or its name.
    alpha
        False discovery rate of a DE gene.
    min_de
        Real DE genes from which on a perturbation counts in ``DEOver_10`` and ``DEPrec_10``.
    own_controls
        Compare predicted cells with the controls among them. By default both sides share the real controls, so
        that no method can gain by shifting its own.
    targets
        Target genes of perturbations; those that are not there are read from their names.
    threads
        Perturbations tested at a time; the result does not depend on it.

    Returns
    -------
    Comparison
        Of the perturbations by name, for `score` and `tabulate`.

    Raises
    ------
    ValueError
        If shapes do not match, values are negative or NaN, there are no controls, or one side lacks a
        perturbation of the other.
    """
    real, predicted = _by_rows(real), _by_rows(predicted)
    sides = [_groups(real, real_labels, "real"), _groups(predicted, predicted_labels, "predicted")]
    genes = [str(i) for i in range(real.shape[1])] if genes is None else list(genes)
    if not real.shape[1] == predicted.shape[1] == len(genes):
        raise ValueError(f"{real.shape[1]} real and {predicted.shape[1]} predicted genes, {len(genes)} names")
    for side, words in zip(sides, ("real", "predicted"), strict=True):
        if control not in side and (own_controls or words == "real"):
            raise ValueError(f"no {words} cell is labelled {control!r}, the control")
    names = sorted(set(sides[0]) - {control})
    if odd := sorted((set(sides[0]) ^ set(sides[1])) - {control}):
        raise ValueError(f"perturbation {odd[0]!r} is on one side only ({len(odd)} such perturbations)")
    rules = DEFINITIONS[definition] if isinstance(definition, str) else definition
    shared = Controls(_rows(real, sides[0][control]))
    controls = [shared, Controls(_rows(predicted, sides[1][control])) if own_controls else shared]

    def test(task: tuple[int, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        side, name = task
        cells = Columns.of([_rows((real, predicted)[side], sides[side][name])])
        return *controls[side].test_columns(cells, rules), variances(cells)

    tasks = [(side, name) for side in (0, 1) for name in names]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        results = list(pool.map(test, tasks)) if threads > 1 else [test(task) for task in tasks]
    tables, variance = [], []
    for side in (0, 1):
        rows = results[side * len(names) : (side + 1) * len(names)]
        p, mean, varied = (np.array(part).reshape(len(names), len(genes)) for part in zip(*rows, strict=True))
        tables.append(Differential.of(p, mean, controls[side].mean, definition=rules, alpha=alpha))
        variance.append(varied)
    acts_on = Targets.of(names, genes, targets)
    spread = Spread(
        variance[0],
        np.nan_to_num(variance[1].sum(axis=1)),
        variances(shared.columns),
        *(np.array([len(side[name]) for name in names]) for side in sides),
    )
    return Comparison(tuple(names), tuple(genes), tables[0], tables[1], rules, min_de, spread, acts_on)


def tabulate(comparison: Comparison, names: Sequence[str] = ()) -> pd.DataFrame:
    """Return a row per perturbation and a column per metric; one number for all (ES) is in every row.

    Parameters
    ----------
    comparison
        As `compare` returns it.
    names
        Metrics or families of them, as `chosen` takes them; by default all that need no cells.
    """
    wanted = [name for name in chosen(names) if METRICS[name].compute is not None]
    num = len(comparison.perturbations)
    values = {name: np.broadcast_to(scores, num) for name, scores in score(comparison, wanted).items()}
    return pd.DataFrame(values, index=pd.Index(comparison.perturbations, name="perturbation"))


def _groups(cells: Matrix, labels: Labels, words: str) -> dict[str, np.ndarray]:
    """Return the rows of each label."""
    names = np.asarray(labels).astype(str)
    if names.shape != (cells.shape[0],):
        raise ValueError(f"{names.size} labels for {cells.shape[0]} {words} cells")
    order = np.argsort(names, kind="stable")
    distinct, first = np.unique(names[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order, first[1:]), strict=True))


def _by_rows(cells: Matrix) -> Matrix:
    if not sp.issparse(cells):
        return cells
    rows: Sparse = cells.tocsr()  # type: ignore[union-attr]
    if rows.indptr.dtype != rows.indices.dtype and rows.nnz < 2**31:
        # of unequal integers, as in large files, scipy would convert all column numbers each time rows are taken
        arrays = (rows.data, *(a.astype(np.int32, copy=False) for a in (rows.indices, rows.indptr)))
        rows = sp.csr_matrix(arrays, shape=rows.shape)
    return rows


def _rows(cells: Matrix, rows: np.ndarray) -> Sparse:
    """Return rows as CSR, which copies no more than these."""
    return sp.csr_matrix(cells[rows])
