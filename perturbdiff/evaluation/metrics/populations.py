"""The metrics of a condition's cells as a distribution: distances between populations and realism of cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbdiff.evaluation.metrics.population_distances import pairwise, wasserstein
from perturbdiff.evaluation.metrics.realism import EXPRESSED, realism
from perturbdiff.evaluation.metrics.sorted_columns import Columns, Sparse

_PAIRWISE = ("energy_distance", "mmd")
_REALISM = (
    "nonzero_ratio",
    "library_ratio",
    "library_sd_ratio",
    "gene_sd_ratio",
    "cell_sd_ratio",
    "mean_variance_gap",
    "correlation_agreement",
    "max_value",
)
DISTRIBUTION = (*_PAIRWISE, "wasserstein", *_REALISM)
"""Names of the metrics of a condition, in the order of the catalogue."""
CHANCE = ("chance_energy_distance", "chance_mmd", "chance_wasserstein")
"""Names of the same distances to the real cells of another perturbation."""


def condition_metrics(
    predicted: Sparse,
    real: Sparse,
    names: Sequence[str],
    *,
    max_cells: int,
    seed: int,
    other: Sparse | None = None,
    columns: tuple[Columns, Columns] | None = None,
) -> dict[str, float]:
    """Compare the predicted with the real cells of one condition.

    Neither the order of cells and genes matters, beyond rounding, nor which other metrics are asked for. Of more
    than ``max_cells`` cells a side those in the distances between cells are drawn, by ``seed`` and position.

    Parameters
    ----------
    predicted, real
        Sparse log1p values [cells, G].
    names
        Some of `DISTRIBUTION`.
    max_cells
        Cells a side in the energy distance and the MMD; all others are of all cells.
    seed
        Of the draw.
    other
        Real cells of another perturbation of the same context: adds, for the distances among ``names``, what
        the same prediction scores against these (`CHANCE`).
    columns
        Sorted values of the predicted and the real cells if at hand, for the Wasserstein distance.

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
    found: dict[str, float] = {}
    if set(names) & set(_PAIRWISE):
        found |= pairwise(predicted, real, max_cells=max_cells, seed=seed, other=other)
    if "wasserstein" in names:
        found |= _wasserstein(predicted, real, other, columns)
    if set(names) & set(_REALISM):
        found |= realism(predicted, real)
    wanted = (*names, *(f"chance_{n}" for n in names))
    return {n: found[n] for n in (*DISTRIBUTION, *CHANCE) if n in wanted and n in found}


def _wasserstein(
    predicted: Sparse, real: Sparse, other: Sparse | None, columns: tuple[Columns, Columns] | None
) -> dict[str, float]:
    sides = {"wasserstein": real} | ({} if other is None else {"chance_wasserstein": other})
    if not predicted.shape[0] or any(not side.shape[0] for side in sides.values()):
        return dict.fromkeys(sides, float("nan"))
    guess = Columns.of([predicted]) if columns is None else columns[0]
    found = {}
    for name, side in sides.items():
        truth = columns[1] if columns is not None and side is real else Columns.of([side])
        found[name] = _median_over_genes(guess, truth)
    return found


def _median_over_genes(predicted: Columns, real: Columns) -> float:
    """Return the median Wasserstein-1 distance of the genes in more than 5 % of the real cells."""
    genes = np.diff(real.starts) > EXPRESSED * real.num_cells
    return float(np.median(wasserstein(predicted, real)[genes])) if genes.any() else float("nan")
