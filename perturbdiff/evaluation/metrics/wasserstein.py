"""The Wasserstein-1 distance of each gene between two sets of cells, from their sorted values."""

from __future__ import annotations

import numpy as np

from perturbdiff.evaluation.metrics.realism import EXPRESSED
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.runtime.compiled import kernel


def wasserstein(predicted: Columns, real: Columns) -> np.ndarray:
    """Return the Wasserstein-1 distance ∫|F(t) − F̂(t)| dt between predicted and real values of each gene.

    Exact: both distribution functions are steps, one at zero and one at every non-zero value.

    Returns
    -------
    ndarray
        float64 [G], log1p units.
    """
    out = np.zeros(len(real.mean))
    _step_areas(
        *(predicted.values, predicted.starts, predicted.num_cells),
        *(real.values.astype(predicted.values.dtype, copy=False), real.starts, real.num_cells),
        out,
    )
    return out


def median_over_genes(predicted: Columns, real: Columns) -> float:
    """Return the median Wasserstein-1 distance of the genes in more than 5 % of the real cells."""
    genes = np.diff(real.starts) > EXPRESSED * real.num_cells
    return float(np.median(wasserstein(predicted, real)[genes])) if genes.any() else float("nan")


@kernel
def _step_areas(
    x: np.ndarray,
    x_starts: np.ndarray,
    n: int,
    y: np.ndarray,
    y_starts: np.ndarray,
    m: int,
    out: np.ndarray,
) -> None:
    """Fill ∫|F − G| of each gene from the sorted non-zero values of two sets of ``n`` and ``m`` cells."""
    for gene in range(out.size):
        i, x_stop = x_starts[gene], x_starts[gene + 1]
        j, y_stop = y_starts[gene], y_starts[gene + 1]
        before, total = 0.0, 0.0
        while i < x_stop or j < y_stop:
            from_x = j >= y_stop or (i < x_stop and x[i] <= y[j])
            value = np.float64(x[i] if from_x else y[j])
            # Shares of cells above: what has not yet been passed.
            total += abs((x_stop - i) / n - (y_stop - j) / m) * (value - before)
            before = value
            if from_x:
                i += 1
            else:
                j += 1
        out[gene] = total
