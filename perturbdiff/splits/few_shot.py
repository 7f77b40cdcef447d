"""Training on few cells: the same share of each perturbed condition (paper, Sec. Adaptation under limited data)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from perturbdiff.conditions.control_matching import generator

_FEW = 11  # first word of the seed, see `perturbdiff.loading.cell_sets`
_ROUNDING = 1e-9  # 0.07 · 100 is a little more than 7


def leave_out(
    conditions: pd.DataFrame, use: np.ndarray, fraction: float, seed: int, exclude: np.ndarray | None = None
) -> np.ndarray | None:
    """Return which rows of a store not to use, so that a share of each perturbed condition is left.

    Of n usable cells the first ⌈fraction · n⌉ in an order drawn from (seed, condition) stay: at least one, so
    every perturbation remains, and the cells of a smaller share are among those of a larger one. Controls and
    conditions that are not in ``use`` keep all their cells.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    use
        bool [n_conditions]: those that training uses.
    fraction
        Share of the cells to keep, above 0; at 1 nothing changes.
    seed
        Seed of the choice.
    exclude
        bool [n_cells]: rows that are left out already, or None.
    """
    if fraction >= 1:
        return exclude
    start, stop = (conditions[column].to_numpy(np.int64) for column in ("start", "stop"))
    out = np.zeros(int(stop.max(initial=0)), dtype=bool) if exclude is None else exclude.copy()
    for condition in np.flatnonzero(np.asarray(use, bool) & ~conditions["is_control"].to_numpy(bool)):
        usable = np.flatnonzero(~out[start[condition] : stop[condition]]) + start[condition]
        keep = int(np.ceil(fraction * len(usable) - _ROUNDING))
        out[generator(_FEW, seed, int(condition)).permutation(usable)[keep:]] = True
    return out
