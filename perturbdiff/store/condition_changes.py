"""Changes of conditions: their mean expression less that of their matched controls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perturbdiff.conditions.control_matching import ControlPools
from perturbdiff.store.pseudobulk import condition_means, group_means
from perturbdiff.store.store import Store


def condition_changes(
    store: Store, conditions: np.ndarray, pools: ControlPools, exclude: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each of ``conditions`` (ids in ascending order) with its change, float64 [G], log1p.

    Memory is one profile for each control condition.

    Parameters
    ----------
    store
        `Store` or `MemoryStore`.
    conditions
        Ids. Those without usable cells are left out.
    pools
        Their matched controls. Each control cell counts once.
    exclude
        bool [n_cells]: store rows never to be used, or None.
    """
    is_control = store.conditions["is_control"].to_numpy(bool)
    groups = np.where(is_control, np.cumsum(is_control) - 1, -1)
    means, cells = group_means(store, groups, int(is_control.sum()), label="control means", exclude=exclude)
    known: dict[tuple[int, ...], np.ndarray] = {}
    for condition, mean in condition_means(store, conditions, label="training changes", exclude=exclude):
        pool = pools.pool(condition)
        key = tuple(map(int, pool))
        if key not in known:
            weight = cells[groups[pool]]
            known[key] = weight @ means[groups[pool]] / weight.sum()
        yield condition, mean - known[key]
