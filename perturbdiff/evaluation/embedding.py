"""Cells of some conditions in two dimensions, for a figure: real, predicted and control cells, and sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from perturbdiff.conditions.condition import Condition, conditions_of
from perturbdiff.evaluation.metrics.set_metrics import set_places
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.evaluation.scoring.condition_cells import read_sets
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.compiled import kernel

_EXTRA, _TURNS = 10, 8  # further directions of the subspace iteration, and its number of steps


def choose(conditions: pd.DataFrame, most: int) -> list[Condition]:
    """Return at most ``most`` conditions by falling real effect, each perturbation once while there are others.

    Conditions smaller than the median are left out, because the mean of few cells is mostly noise.
    """
    large = pd.DataFrame(conditions[conditions["n_cells"] >= conditions["n_cells"].median()])
    ranked = large.sort_values(["effect", "perturbation"], ascending=[False, True], kind="stable")
    again = ranked["perturbation"].duplicated().astype(int)
    ranked = ranked.assign(again=again).sort_values("again", kind="stable").head(most)
    return conditions_of(ranked)


def embed(pairing: Pairing, conditions: list[Condition], *, cells: int, seed: int) -> pd.DataFrame:
    """Project cells onto two principal components fitted on the real perturbed and control cells.

    Parameters
    ----------
    conditions
        Which conditions to show, see `choose`.
    cells
        Most cells of each kind in a condition.

    Returns
    -------
    DataFrame
        condition ("cell type|batch|perturbation"), source (real, predicted, control), x, y (log1p units),
        explained_x, explained_y (shares of variance).
    """
    columns = ["condition", "source", "x", "y", "explained_x", "explained_y"]
    rng = np.random.default_rng(seed)
    labels, chosen = [], []
    for condition in conditions:
        sources = (
            ("real", pairing.real, pairing.real.rows[condition]),
            ("predicted", pairing.predicted, pairing.predicted.rows[condition]),
            ("control", pairing.real, pairing.controls.get(condition.group, np.array([], np.int64))),
        )
        for source, side, rows in sources:
            drawn = rows if len(rows) <= cells else np.sort(rng.choice(rows, cells, replace=False))
            chosen.append((source == "predicted", side, drawn))
            labels += [(str(condition), source)] * len(drawn)
    fitted = [side.cells(rows) for predicted, side, rows in chosen if not predicted]
    if not fitted or min(sum(block.shape[0] for block in fitted), fitted[0].shape[1]) < 2:
        return pd.DataFrame(columns=pd.Index(columns))
    with threadpool_limits(1, "blas"):  # sums keep their order
        axes, centre, shares = _principal(fitted, seed)
        blocks = iter(fitted)  # predicted cells are read here, so that memory does not hold them all
        parts = [
            (side.cells(rows) if predicted else next(blocks)) @ axes.T for predicted, side, rows in chosen
        ]
        points = np.concatenate(parts) - centre @ axes.T
    signs = np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])
    table = pd.DataFrame(labels, columns=pd.Index(columns[:2]))
    table["x"], table["y"] = (points * np.where(signs == 0, 1.0, signs)).astype(np.float32).T
    return table.assign(explained_x=np.float32(shares[0]), explained_y=np.float32(shares[1]))


@kernel
def _turn(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    basis: np.ndarray,
    offset: np.ndarray,
    sums: np.ndarray,
    out: np.ndarray,
) -> None:
    """Add Xᵀ(X·basis − offset) to ``out`` and the sums of the scores in brackets to ``sums``, in one pass over X."""
    scores = np.empty(offset.size)
    for cell in range(indptr.size - 1):
        scores[:] = -offset
        for i in range(indptr[cell], indptr[cell + 1]):
            value, gene = np.float64(data[i]), indices[i]
            for k in range(scores.size):
                scores[k] += value * basis[gene, k]
        sums += scores
        for i in range(indptr[cell], indptr[cell + 1]):
            value, gene = np.float64(data[i]), indices[i]
            for k in range(scores.size):
                out[gene, k] += value * scores[k]


def _principal(blocks: Sequence[Sparse], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first two principal axes, float64 [2, G], the mean [G] and the axes' shares of the variance.

    Subspace iteration (Halko et al. 2011, SIAM Rev. 53:217, algorithm 4.4) over the CSR ``blocks`` of cells.
    """
    genes, num = blocks[0].shape[1], sum(block.shape[0] for block in blocks)
    centre, total = np.zeros(genes), 0.0
    for block in blocks:
        values = block.data.astype(np.float64)
        centre += np.bincount(block.indices, weights=values, minlength=genes) / num
        total += float(values @ values)
    total -= num * float(centre @ centre)
    basis = np.random.default_rng(seed).standard_normal((genes, min(2 + _EXTRA, num, genes)))
    for _ in range(_TURNS):
        sums, out = np.zeros(basis.shape[1]), np.zeros(basis.shape)
        for block in blocks:
            _turn(block.data, block.indices, block.indptr, basis, centre @ basis, sums, out)
        basis = np.ascontiguousarray(np.linalg.qr(out - np.outer(centre, sums))[0])
    scores = np.concatenate([block @ basis for block in blocks]) - centre @ basis
    _, lengths, turned = np.linalg.svd(scores, full_matrices=False)
    return (turned @ basis.T)[:2], centre, lengths[:2] ** 2 / total if total > 0 else np.zeros(2)


def place_sets(pairing: Pairing, conditions: Sequence[Condition], *, seed: int) -> pd.DataFrame:
    """Return a row for each set of the conditions.

    Returns
    -------
    DataFrame
        condition ("cell type|batch|perturbation"), source (real, predicted), x, y (roots of energy distances along the
        two directions in which the true sets differ most), explained_x, explained_y (shares of the scatter of the true
        sets). Empty if it is not known which cells were a set.
    """
    tables = [pd.DataFrame()]
    for condition in conditions if pairing.sets is not None else ():
        predicted, real, _ = read_sets(pairing, condition, None, seed=seed).dense()
        with threadpool_limits(1, "blas"):  # sums keep their order
            found = set_places(predicted, real)
        if found is None:
            continue
        *places, shares = found
        for source, xy in zip(("predicted", "real"), places, strict=True):
            table = pd.DataFrame(xy.astype(np.float32), columns=pd.Index(["x", "y"]))
            table = table.assign(explained_x=np.float32(shares[0]), explained_y=np.float32(shares[1]))
            tables.append(table.assign(condition=str(condition), source=source))
    return pd.concat(tables, ignore_index=True)
