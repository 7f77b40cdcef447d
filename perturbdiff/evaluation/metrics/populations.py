"""The metrics of a condition's cells as a distribution: distances between populations, realism, size of changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.metrics.pairwise_distances import PAIRWISE, pairwise
from perturbdiff.evaluation.metrics.realism import EXPRESSED, dependence_gap, realism
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.io.matrices import Sparse
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


TOP = 50  # genes that change most
AGREE = 0.5  # least cosine of the halves' changes: below it, chance decides
Halves = tuple[np.ndarray, np.ndarray]
"""Mean log1p values of two halves of the real cells of a condition, float64 [G] each."""


def mean_of(cells: Sparse) -> np.ndarray:
    """Return the mean of each gene, float64 [G]; NaN without cells."""
    total = np.asarray(sp.csr_matrix(cells).sum(axis=0, dtype=np.float64)).ravel()
    return total / cells.shape[0] if cells.shape[0] else np.full(cells.shape[1], np.nan)


def halves_of(cells: Sparse, *, seed: int) -> Halves:
    """Return the means of two random halves of cells [n, G]."""
    order, cells = np.random.default_rng(seed).permutation(cells.shape[0]), sp.csr_matrix(cells)
    return mean_of(cells[order[::2]]), mean_of(cells[order[1::2]])


def sums_of(predicted: np.ndarray, halves: Halves, control: np.ndarray) -> tuple[float, float, float]:
    """Return Σ δ₁ p and Σ δ₁ δ₂ over the genes that change most, and the cosine of δ₁ and δ₂ there.

    δ₁ and δ₂ are the changes of the halves and p is the predicted change, all from ``control`` [G]. Each half in turn
    is the first, which chooses the genes. Its noise is not in p and not in the other half, so that neither the
    choice nor the noise changes the ratio of the sums: a prediction of s times the true change has the ratio s.
    """
    p, changes = predicted - control, [half - control for half in halves]
    above, below, lengths = 0.0, 0.0, 0.0
    for first, second in (changes, changes[::-1]):
        top = np.argsort(-np.abs(first), kind="stable")[:TOP]
        above += float(first[top] @ p[top])
        below += float(first[top] @ second[top])
        lengths += float(np.linalg.norm(first[top]) * np.linalg.norm(second[top]))
    return above, below, below / lengths if lengths > 0 else 0.0


def effect_slope(predicted: np.ndarray, real: Sparse, control: np.ndarray, *, seed: int = 0) -> float:
    """Return the slope of predicted on true change over the genes that change most.

    Parameters
    ----------
    predicted, control
        Mean log1p values of the predicted and of the control cells, float64 [G].
    real
        Cells of one condition, sparse log1p [n, G].
    seed
        Of the halves.

    Returns
    -------
    float
        1: changes of the right size. NaN with fewer than four real cells, without predicted cells, or if the changes
        of the halves hardly agree.
    """
    if real.shape[0] < 4:
        return float("nan")
    above, below, cosine = sums_of(predicted, halves_of(real, seed=seed), control)
    return above / below if cosine > AGREE else float("nan")


_REALISM = (
    "nonzero_ratio",
    "library_ratio",
    "library_sd_ratio",
    "total_sd_ratio",
    "above_depth",
    "detected_sd_ratio",
    "gene_sd_ratio",
    "cell_sd_ratio",
    "mean_variance_gap",
    "correlation_agreement",
    "max_value",
)
_AGAINST_CELLS = (*PAIRWISE, "wasserstein", "dependence_gap")
CHANCE = tuple(f"chance_{name}" for name in _AGAINST_CELLS)
"""Names of the same distances to the real cells of another perturbation."""
DISTRIBUTION = (*_AGAINST_CELLS, *_REALISM, "effect_slope")
"""Names of the metrics of a condition, in the order of the catalogue."""


def condition_metrics(
    predicted: Sparse,
    real: Sparse,
    names: Sequence[str],
    *,
    max_cells: int,
    seed: int,
    other: Sparse | None = None,
    columns: tuple[Columns, Columns] | None = None,
    control: np.ndarray | None = None,
    depth: float | None = None,
) -> dict[str, float]:
    """Compare the predicted with the real cells of one condition.

    The order of cells and genes does not matter beyond rounding, nor which other metrics are computed. With more
    than ``max_cells`` cells on a side, those whose distances are computed are drawn by ``seed`` and position, and so
    are the halves of the real cells for ``effect_slope``.

    Parameters
    ----------
    predicted, real
        Sparse log1p values [cells, G].
    names
        Some of `DISTRIBUTION`.
    max_cells
        Most cells of a side in the energy distance and the MMD; the other metrics use all cells.
    seed
        Of the draw.
    other
        Real cells of another perturbation of the same context: adds, for the distances among ``names``, what
        the same prediction scores against these (`CHANCE`).
    columns
        Sorted values of the predicted and the real cells, for the Wasserstein distance; sorted here if not given.
    control
        Mean of the controls, float64 [G], for the components of ``mmd_pc`` and for ``effect_slope``, which has no
        value without it.
    depth
        Sum to which the counts of a cell were scaled, if it is known, for ``above_depth``.

    Returns
    -------
    dict
        Values by name, in the order of `DISTRIBUTION` and `CHANCE`; NaN where undefined.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if unknown := [n for n in names if n not in DISTRIBUTION]:
        raise ValueError(f"no metric of the distribution: {', '.join(unknown)}")
    values: dict[str, float] = {}
    if pairs := [n for n in names if n in PAIRWISE]:
        values |= pairwise(
            predicted, real, max_cells=max_cells, seed=seed, other=other, names=pairs, control=control
        )
    if "wasserstein" in names:
        values |= _wasserstein(predicted, real, other, columns)
    if "dependence_gap" in names:
        sides = {"": real} | ({} if other is None else {"chance_": other})
        values |= {f"{at}dependence_gap": dependence_gap(predicted, side) for at, side in sides.items()}
    if set(names) & set(_REALISM):
        values |= realism(predicted, real, depth=depth)
    if "effect_slope" in names:
        values["effect_slope"] = (
            float("nan") if control is None else effect_slope(mean_of(predicted), real, control, seed=seed)
        )
    wanted = (*names, *(f"chance_{n}" for n in names))
    return {n: values[n] for n in (*DISTRIBUTION, *CHANCE) if n in wanted and n in values}


def _wasserstein(
    predicted: Sparse, real: Sparse, other: Sparse | None, columns: tuple[Columns, Columns] | None
) -> dict[str, float]:
    sides = {"wasserstein": real} | ({} if other is None else {"chance_wasserstein": other})
    if not predicted.shape[0] or any(not side.shape[0] for side in sides.values()):
        return dict.fromkeys(sides, float("nan"))
    guess = Columns.of([predicted]) if columns is None else columns[0]
    medians = {}
    for name, side in sides.items():
        truth = columns[1] if columns is not None and side is real else Columns.of([side])
        medians[name] = median_over_genes(guess, truth)
    return medians
