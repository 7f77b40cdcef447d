"""Mean expression of groups of conditions, streamed from a store."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import sparse

from perturbdiff.data.store import Store
from perturbdiff.progress import track

ROWS_PER_READ = 4096


def group_means(
    store: Store, groups: np.ndarray, n_groups: int, *, label: str = "pseudobulk"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean log1p profile of each group of conditions, and its number of cells.

    Memory is n_groups × G × 8 bytes; rows of conditions outside all groups are not read.

    Parameters
    ----------
    store
        `Store` or `MemoryStore`.
    groups
        int [n_conditions]: group of each condition, -1 for none.
    n_groups
        Number of groups.
    label
        What the progress line calls this.

    Returns
    -------
    means
        float64 [n_groups, G], log1p; zeros for a group without cells.
    cells
        int64 [n_groups].
    """
    sums = np.zeros((n_groups, store.n_genes), dtype=np.float64)
    cells = np.zeros(n_groups, dtype=np.int64)
    conditions = store.conditions
    of_row_start = conditions["start"].to_numpy(np.int64)
    total = int(conditions["n_cells"].to_numpy(np.int64)[groups >= 0].sum())
    with track(label, total) as progress:
        for start, stop in row_ranges(conditions["stop"].to_numpy(np.int64), of_row_start, groups >= 0):
            block = store.expression(slice(start, stop))
            condition = np.searchsorted(of_row_start, np.arange(start, stop), side="right") - 1
            present, local = np.unique(groups[condition], return_inverse=True)
            cell = np.arange(stop - start)
            member = sparse.csr_array((np.ones(len(cell)), (local, cell)), shape=(len(present), len(cell)))
            sums[present] += sparse.csr_array(member @ block.astype(np.float64)).toarray()
            cells += np.bincount(groups[condition], minlength=n_groups)
            progress.advance(stop - start)
    return sums / np.maximum(cells, 1)[:, None], cells


def row_ranges(
    stop: np.ndarray, start: np.ndarray, use: np.ndarray, rows: int = ROWS_PER_READ
) -> Iterator[tuple[int, int]]:
    """Yield row ranges of at most ``rows`` that cover the used conditions and no others, in order."""
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
