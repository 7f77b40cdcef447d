"""A two-dimensional view of some conditions: real, predicted and control cells in the PCA of the real ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.decomposition import PCA

from perturbdiff.evaluation.inputs import Condition
from perturbdiff.evaluation.pairing import Pairing


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
            blocks.append(side.cells(drawn).toarray().astype(np.float32))
            labels += [("|".join(condition), source)] * len(drawn)
    if not labels:
        return pd.DataFrame(columns=pd.Index(columns))
    table = pd.DataFrame(labels, columns=pd.Index(columns[:2]))
    everything = np.concatenate(blocks)
    real = everything[(table["source"] != "predicted").to_numpy()]
    if min(real.shape) < 2:
        return pd.DataFrame(columns=pd.Index(columns))
    pca = PCA(n_components=2, svd_solver="randomized", random_state=seed).fit(real)
    points = pca.transform(everything)
    axes = np.asarray(pca.components_)
    signs = np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])
    table["x"], table["y"] = (points * np.where(signs == 0, 1.0, signs)).astype(np.float32).T
    shares = np.nan_to_num(pca.explained_variance_ratio_)
    return table.assign(explained_x=np.float32(shares[0]), explained_y=np.float32(shares[1]))
