"""How alike two sets of cells are as distributions: energy distance, and what averages do not show.

All functions take sparse log1p values, cells × genes, of the predicted and the real cells of one condition.
"""

from __future__ import annotations

import numpy as np

from perturbdiff.evaluation.differential import Sparse

_BLOCK = 512  # cells whose distances are held at a time
_EXPRESSED = 0.05  # share of real cells that makes a gene count as expressed
_TOP_GENES = 60


def energy_distance(predicted: Sparse, real: Sparse, *, max_cells: int = 2000, seed: int = 0) -> float:
    """Return 2E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖ without self-pairs (the U-statistic), in log1p units.

    Parameters
    ----------
    predicted, real
        Cells of one condition.
    max_cells
        Beyond it, that many cells are drawn without replacement on each side.
    seed
        Of the draw.

    Returns
    -------
    float
        NaN with fewer than two cells on a side. Expected 0 for equal distributions, hence at times negative.
    """
    if min(predicted.shape[0], real.shape[0]) < 2:
        return float("nan")
    rng = np.random.default_rng(seed)
    x, y = _draw(predicted, max_cells, rng), _draw(real, max_cells, rng)
    centre = (x.mean(axis=0) + y.mean(axis=0)) / 2  # nearer to the origin, less is lost in the squared norms
    x, y = x - centre, y - centre
    n, m = len(x), len(y)
    within = _sum_of_distances(x, x, same=True) / (n * (n - 1)) + _sum_of_distances(y, y, same=True) / (
        m * (m - 1)
    )
    return 2.0 * _sum_of_distances(x, y, same=False) / (n * m) - within


def _draw(cells: Sparse, most: int, rng: np.random.Generator) -> np.ndarray:
    if cells.shape[0] > most:
        cells = cells[np.sort(rng.choice(cells.shape[0], most, replace=False))]
    return cells.toarray().astype(np.float32, copy=False)


def _sum_of_distances(x: np.ndarray, y: np.ndarray, *, same: bool) -> float:
    """Sum Euclidean distances over all pairs; of a set with itself every pair counts twice, no cell with itself."""
    x_squared = np.einsum("ig,ig->i", x, x, dtype=np.float64)
    y_squared = np.einsum("ig,ig->i", y, y, dtype=np.float64)
    total = 0.0
    for i in range(0, len(x), _BLOCK):
        rows = slice(i, i + _BLOCK)
        first = i if same else 0  # the distances are symmetric: what lies left of the diagonal block is known
        squared = x_squared[rows, None] + y_squared[None, first:] - 2.0 * (x[rows] @ y[first:].T)
        distance = np.sqrt(np.maximum(squared, 0.0))
        if same:
            block = distance[:, : distance.shape[0]]
            np.fill_diagonal(block, 0.0)
            total += block.sum() + 2.0 * distance[:, distance.shape[0] :].sum()
        else:
            total += distance.sum()
    return float(total)


def realism(predicted: Sparse, real: Sparse) -> dict[str, float]:
    """Return how the predicted cells' zeros, spread and correlations compare with the real ones'.

    Returns
    -------
    dict
        ``nonzero_ratio``, ``gene_sd_ratio``, ``cell_sd_ratio``, ``correlation_agreement`` and ``max_value``
        (log1p) as `perturbdiff.evaluation.catalogue` defines them; NaN where undefined.
    """
    enough = min(predicted.shape[0], real.shape[0]) >= 2
    return {
        "nonzero_ratio": _ratio(_nonzero(predicted), _nonzero(real)),
        "gene_sd_ratio": _gene_sd_ratio(predicted, real) if enough else float("nan"),
        "cell_sd_ratio": _ratio(_cell_sd(predicted), _cell_sd(real)) if enough else float("nan"),
        "correlation_agreement": correlation_agreement(predicted, real),
        "max_value": float(predicted.max()) if predicted.shape[0] else float("nan"),
    }


def correlation_agreement(predicted: Sparse, real: Sparse) -> float:
    """Return how predicted and real gene–gene correlations correlate over pairs of the top genes.

    The 60 genes with the highest real mean; a gene that is constant on one side correlates 0 with all others.
    NaN with fewer than three cells on a side or if the correlations are constant.
    """
    if min(predicted.shape[0], real.shape[0]) < 3:
        return float("nan")
    mean = np.asarray(real.mean(axis=0)).ravel()
    top = np.argsort(-mean, kind="stable")[:_TOP_GENES]
    x, y = (_pair_correlations(cells[:, top].toarray().astype(np.float64)) for cells in (predicted, real))
    if len(x) < 2 or x.std() < 1e-12 or y.std() < 1e-12:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _pair_correlations(cells: np.ndarray) -> np.ndarray:
    centred = cells - cells.mean(axis=0)
    length = np.linalg.norm(centred, axis=0)
    # A column of equal values keeps rounding noise after centring; what it correlates with means nothing.
    constant = length <= 1e-6 * np.sqrt(len(cells)) * (1.0 + np.abs(cells).max(axis=0))
    scaled = np.where(constant, 0.0, centred / np.where(constant, 1.0, length))
    return (scaled.T @ scaled)[np.triu_indices(scaled.shape[1], k=1)]


def _nonzero(cells: Sparse) -> float:
    return cells.count_nonzero() / max(cells.shape[0] * cells.shape[1], 1)


def _gene_sd(cells: Sparse) -> np.ndarray:
    mean = np.asarray(cells.mean(axis=0, dtype=np.float64)).ravel()
    squares = np.asarray(cells.astype(np.float64).power(2).mean(axis=0)).ravel()
    return np.sqrt(np.maximum(squares - mean**2, 0.0))


def _gene_sd_ratio(predicted: Sparse, real: Sparse) -> float:
    share = np.asarray((real != 0).mean(axis=0)).ravel()
    spread = _gene_sd(real)
    genes = (share > _EXPRESSED) & (spread > 1e-6)
    return float(np.median(_gene_sd(predicted)[genes] / spread[genes])) if genes.any() else float("nan")


def _cell_sd(cells: Sparse) -> float:
    return float(np.asarray(cells.mean(axis=1, dtype=np.float64)).std())


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else float("nan")
