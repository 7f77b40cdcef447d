"""A two-dimensional view of some conditions: real, predicted and control cells in the PCA of the real ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

from perturbdiff.evaluation.readers.cells_by_condition import Condition, Sparse
from perturbdiff.evaluation.readers.pairing import Pairing

_EXTRA, _TURNS = 10, 8  # further directions that are followed along, and how often they are turned


def choose(conditions: pd.DataFrame, most: int) -> list[Condition]:
    """Return at most ``most`` conditions by falling real effect, each perturbation once while there are others.

    Conditions smaller than the median are passed over: the mean of few cells is far from anything.
    """
    large = pd.DataFrame(conditions[conditions["n_cells"] >= conditions["n_cells"].median()])
    ranked = large.sort_values(["effect", "perturbation"], ascending=[False, True], kind="stable")
    again = ranked["perturbation"].duplicated().astype(int)
    ranked = ranked.assign(again=again).sort_values("again", kind="stable").head(most)
    return [tuple(row) for row in ranked[["cell_type", "batch", "perturbation"]].to_numpy()]


def embed(pairing: Pairing, conditions: list[Condition], *, cells: int, seed: int) -> pd.DataFrame:
    """Project cells onto two principal components fitted on the real perturbed and control cells.

    Parameters
    ----------
    conditions
        Which conditions to show, see `choose`.
    cells
        At most so many of each kind in a condition.

    Returns
    -------
    DataFrame
        condition ("cell type|batch|perturbation"), source (real, predicted, control), x, y (log1p units),
        explained_x, explained_y (shares of variance).
    """
    columns = ["condition", "source", "x", "y", "explained_x", "explained_y"]
    rng = np.random.default_rng(seed)
    labels, blocks = [], []
    for condition in conditions:
        sources = (
            ("real", pairing.real, pairing.real.rows[condition]),
            ("predicted", pairing.predicted, pairing.predicted.rows[condition]),
            ("control", pairing.real, pairing.controls.get(condition[:2], np.array([], np.int64))),
        )
        for source, side, rows in sources:
            drawn = rows if len(rows) <= cells else np.sort(rng.choice(rows, cells, replace=False))
            blocks.append(side.cells(drawn))
            labels += [("|".join(condition), source)] * len(drawn)
    if not labels:
        return pd.DataFrame(columns=pd.Index(columns))
    table = pd.DataFrame(labels, columns=pd.Index(columns[:2]))
    everything: Sparse = sp.vstack(blocks, format="csr")
    real = everything[(table["source"] != "predicted").to_numpy()]
    if min(real.shape) < 2:
        return pd.DataFrame(columns=pd.Index(columns))
    with threadpool_limits(1, "blas"):  # sums keep their order
        axes, centre, shares = _principal(real, seed)
        points = everything @ axes.T - centre @ axes.T
    signs = np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])
    table["x"], table["y"] = (points * np.where(signs == 0, 1.0, signs)).astype(np.float32).T
    return table.assign(explained_x=np.float32(shares[0]), explained_y=np.float32(shares[1]))


def _principal(cells: Sparse, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first two principal axes, float64 [2, G], the mean [G] and the axes' shares of the variance.

    Subspace iteration (Halko et al. 2011, SIAM Rev. 53:217, algorithm 4.4); the cells stay sparse.
    """
    cells = cells.astype(np.float64)
    centre = np.asarray(cells.mean(axis=0)).ravel()
    total = float((cells.data**2).sum() - len(cells.indptr[1:]) * (centre**2).sum())
    basis = np.random.default_rng(seed).standard_normal((cells.shape[1], min(2 + _EXTRA, *cells.shape)))
    for _ in range(_TURNS):
        scores = cells @ basis - centre @ basis
        basis = np.linalg.qr(cells.T @ scores - np.outer(centre, scores.sum(axis=0)))[0]
    _, lengths, turned = np.linalg.svd(cells @ basis - centre @ basis, full_matrices=False)
    return (turned @ basis.T)[:2], centre, lengths[:2] ** 2 / total if total > 0 else np.zeros(2)
