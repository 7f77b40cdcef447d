"""Mean expression of groups of conditions, streamed from a store, their changes, and the similarity of two means."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import sparse

from perturbdiff.conditions.control_matching import ControlPools
from perturbdiff.runtime.progress import track
from perturbdiff.store.store import Store

ROWS_PER_READ = 4096


def group_means(
    store: Store,
    groups: np.ndarray,
    n_groups: int,
    *,
    label: str = "pseudobulk",
    exclude: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean log1p profile of each group of conditions, and its number of cells.

    Memory is n_groups × G × 8 bytes. Rows of conditions that are in no group are not read.

    Parameters
    ----------
    store
        `Store` or `MemoryStore`.
    groups
        int [n_conditions]: group of each condition, or -1 for none.
    n_groups
        Number of groups.
    label
        Name of this work in the progress line.
    exclude
        bool [n_cells]: store rows to leave out, or None.

    Returns
    -------
    means
        float64 [n_groups, G], log1p. Zeros for a group without cells.
    cells
        int64 [n_groups].
    """
    sums = np.zeros((n_groups, store.n_genes), dtype=np.float64)
    cells = np.zeros(n_groups, dtype=np.int64)
    used = groups >= 0
    with track(label, int(store.conditions["n_cells"].to_numpy(np.int64)[used].sum())) as progress:
        for condition, block in _blocks(store, used, exclude):
            present, local = np.unique(groups[condition], return_inverse=True)
            cell = np.arange(len(condition))
            member = sparse.csr_array((np.ones(len(cell)), (local, cell)), shape=(len(present), len(cell)))
            sums[present] += sparse.csr_array(member @ block.astype(np.float64)).toarray()
            cells += np.bincount(groups[condition], minlength=n_groups)
            progress.advance(len(condition))
    return sums / np.maximum(cells, 1)[:, None], cells


def condition_means(
    store: Store, conditions: np.ndarray, *, label: str = "pseudobulk", exclude: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each of ``conditions`` (ids in ascending order) with its mean log1p profile, float64 [G].

    Memory is one block of cells, however many conditions there are. Store rows where ``exclude`` (bool [n_cells]) is
    true do not count. A condition that has no others is left out.
    """
    used = np.zeros(len(store.conditions), dtype=bool)
    used[conditions] = True
    size = store.conditions["n_cells"].to_numpy(np.int64)
    current, total, cells = -1, np.zeros(store.n_genes), 0
    with track(label, int(size[used].sum())) as progress:
        for condition, block in _blocks(store, used, exclude):
            edges = np.flatnonzero(np.diff(condition, prepend=-1))
            for first, last in zip(edges, [*edges[1:], len(condition)], strict=True):
                if condition[first] != current:
                    if current >= 0:
                        yield current, total / cells
                    current, total, cells = int(condition[first]), np.zeros(store.n_genes), 0
                cells += int(last - first)
                total += np.asarray(block[first:last].astype(np.float64).sum(axis=0)).reshape(-1)
            progress.advance(len(condition))
    if current >= 0:
        yield current, total / cells


def _blocks(
    store: Store, used: np.ndarray, exclude: np.ndarray | None
) -> Iterator[tuple[np.ndarray, sparse.csr_matrix]]:
    """Yield the condition of each row and the rows' values, for the used conditions in store order."""
    start = store.conditions["start"].to_numpy(np.int64)
    stop = store.conditions["stop"].to_numpy(np.int64)
    for first, last in row_ranges(start, stop, used):
        condition = np.searchsorted(start, np.arange(first, last), side="right") - 1
        block = store.expression(slice(first, last))
        if exclude is not None and exclude[first:last].any():
            kept = ~exclude[first:last]
            condition, block = condition[kept], block[kept]
        yield condition, block


def r2(truth: np.ndarray, prediction: np.ndarray) -> float:
    """Return R² of a predicted mean profile [G] over the genes: 1 - residual / total sum of squares of the truth.

    It is 0 if the truth is equal in all genes.
    """
    spread = float(np.square(truth - truth.mean()).sum())
    return 1 - float(np.square(truth - prediction).sum()) / spread if spread else 0.0


def correlation_of_changes(truth: np.ndarray, prediction: np.ndarray, control: np.ndarray) -> float:
    """Return Pearson's correlation over the genes between the changes of two mean profiles [G] from the control's.

    It is 0 if one of the changes is equal in all genes.
    """
    one, other = truth - control, prediction - control
    one, other = one - one.mean(), other - other.mean()
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / norms if norms else 0.0


def row_ranges(
    start: np.ndarray, stop: np.ndarray, use: np.ndarray, rows: int = ROWS_PER_READ
) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most ``rows`` rows that cover the used conditions and no others, in order."""
    begin, end = 0, 0
    for a, b in zip(start[use], stop[use], strict=True):
        if a != end:
            yield from _pieces(begin, end, rows)
            begin = a
        end = b
    yield from _pieces(begin, end, rows)


def _pieces(begin: int, end: int, rows: int) -> Iterator[tuple[int, int]]:
    for a in range(int(begin), int(end), rows):
        yield a, min(a + rows, int(end))


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
