"""The metrics of a condition's cells as a distribution: distances between populations and realism of cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbdiff.evaluation.metrics.pairwise_distances import PAIRWISE, pairwise
from perturbdiff.evaluation.metrics.realism import dependence_gap, realism
from perturbdiff.evaluation.metrics.slope import effect_slope, mean_of
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.evaluation.metrics.wasserstein import median_over_genes
from perturbdiff.io.matrices import Sparse

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
