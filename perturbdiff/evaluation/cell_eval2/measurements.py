"""What the metrics need of one side: profiles, sampling noise and tests of every perturbation.

Perturbations come one after the other as sparse blocks of counts. Memory holds the sorted controls, the cells of a few
perturbations, and a few rows of G numbers per perturbation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

from perturbdiff.evaluation.cell_eval2.jackknife import NoiseSums, sampling_noise
from perturbdiff.evaluation.cell_eval2.rules import Rules
from perturbdiff.evaluation.metrics.differential import benjamini_hochberg, rank_test
from perturbdiff.evaluation.metrics.sorted_columns import Columns
from perturbdiff.evaluation.scoring.condition_pass import Workers, usable
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.progress import track

_CELLS_AT_ONCE = 1024  # of the controls

Read = Callable[[np.ndarray], Sparse]
"""From row numbers to counts, CSR float64 [n, G]."""


@dataclass(frozen=True)
class Profile:
    """A group of cells.

    Attributes
    ----------
    sums
        Summed counts, float64 [G].
    bulk
        log1p of the sums scaled to the depth of profiles, float64 [G].
    noise
        Summed sampling variance of ``bulk``, see `sampling_noise`.
    cpm
        Mean over cells of counts scaled to the depth of cells, float64 [G].
    num_cells
        Number of cells.
    """

    sums: np.ndarray
    bulk: np.ndarray
    noise: float
    cpm: np.ndarray
    num_cells: int


@dataclass(frozen=True)
class Reference:
    """The control cells that changes are measured from.

    Attributes
    ----------
    profile
        Their profile.
    columns
        log1p of their scaled counts, sorted per gene.
    tested
        The genes that are tested, bool [G].
    """

    profile: Profile
    columns: Columns
    tested: np.ndarray


@dataclass(frozen=True)
class Side:
    """Predicted or real perturbations of one context.

    Attributes
    ----------
    perturbations
        Their names, sorted; M of them.
    reference
        The controls that they were compared with.
    bulk
        Profiles, float64 [M, G].
    noise
        Sampling noise, float64 [M].
    sums
        Summed counts, float64 [M, G].
    num_cells
        Number of cells, int64 [M].
    fold
        log2 fold changes, float64 [M, G]; NaN for genes that are not tested.
    p, q
        Two-sided p and its Benjamini–Hochberg adjustment, float64 [M, G]; NaN for genes that are not tested.
    """

    perturbations: tuple[str, ...]
    reference: Reference
    bulk: np.ndarray
    noise: np.ndarray
    sums: np.ndarray
    num_cells: np.ndarray
    fold: np.ndarray
    p: np.ndarray
    q: np.ndarray

    @property
    def change(self) -> np.ndarray:
        """Return the change of the profiles from the reference's, [M, G]."""
        return self.bulk - self.reference.profile.bulk


def scaled_cells(counts: Sparse, depths: np.ndarray, depth: float) -> Sparse:
    """Return counts scaled to ``depth`` in each cell, in the order of operations of scanpy's normalize_total.

    Equal values must stay equal to the last bit, because ties decide p. A cell without counts stays zero.
    """
    factor = depths / depth
    factor[factor == 0] = 1.0
    values = counts.data / np.repeat(factor, np.diff(counts.indptr))
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def bulk_profile(sums: np.ndarray, depth: float) -> np.ndarray:
    """Return log1p of summed counts scaled to ``depth``; zero where there is no count."""
    total = sums.sum()
    return np.log1p(sums * (depth / total if total > 0 else 0.0))


def profile_of(counts: Sparse, rules: Rules) -> tuple[Profile, Sparse]:
    """Return a group's profile and its scaled cells."""
    depths = _depths(counts)
    sums = np.asarray(counts.sum(axis=0)).ravel()
    cells = scaled_cells(counts, depths, rules.cell_depth)
    profile = Profile(
        sums,
        bulk_profile(sums, rules.bulk_depth),
        sampling_noise(counts, sums, depths, rules.bulk_depth),
        (cells.T @ np.ones(counts.shape[0])) / counts.shape[0],  # scipy's mean copies the cells twice
        counts.shape[0],
    )
    return profile, cells


def _sorted(cells: Sparse) -> Columns:
    """Return the sorted log1p values; ``cells`` is changed in place."""
    np.log1p(cells.data, out=cells.data)
    return Columns.of([cells])


def reference_of(read: Read, rows: np.ndarray, rules: Rules) -> Reference:
    """Return the reference of control cells, which are read twice, a block at a time.

    Parameters
    ----------
    read
        Reads counts.
    rows
        Rows of the controls; at least one.
    """
    blocks = np.split(rows, range(_CELLS_AT_ONCE, len(rows), _CELLS_AT_ONCE))
    sums, cpm, columns = 0.0, 0.0, []
    for block in blocks:
        counts = read(block)
        sums = sums + np.asarray(counts.sum(axis=0)).ravel()
        cells = scaled_cells(counts, _depths(counts), rules.cell_depth)
        cpm = cpm + np.asarray(cells.sum(axis=0)).ravel()
        columns.append(_sorted(cells))
    while len(columns) > 1:  # what has been joined is let go
        columns.append(Columns.joined([columns.pop(0), columns.pop(0)]))
    sums, cpm = np.asarray(sums), np.asarray(cpm) / len(rows)
    noise = NoiseSums(sums, len(rows), rules.bulk_depth)
    for block in blocks:
        counts = read(block)
        noise.add(counts, _depths(counts))
    profile = Profile(sums, bulk_profile(sums, rules.bulk_depth), noise.noise, cpm, len(rows))
    return Reference(profile, columns[0], cpm * (1e6 / rules.cell_depth) > rules.min_cpm)


def _depths(counts: Sparse) -> np.ndarray:
    return np.asarray(counts.sum(axis=1)).ravel()


def fold_change(cpm: np.ndarray, reference: Reference, rules: Rules) -> np.ndarray:
    """Return log2 fold changes of mean scaled counts [..., G]; NaN for genes that are not tested."""
    fold = np.log2((cpm + rules.epsilon) / (reference.profile.cpm + rules.epsilon))
    return np.where(reference.tested, fold, np.nan)


def measure(
    read: Read,
    rows: Mapping[str, np.ndarray],
    reference: Reference,
    rules: Rules,
    *,
    threads: int | None = None,
    label: str = "evaluate",
) -> Side:
    """Measure perturbations against a reference.

    Parameters
    ----------
    read
        Reads counts.
    rows
        Rows of each perturbation; at least one.
    threads
        Number of threads that compare, by default the processors that this process may use. The result does not depend
        on it.
    label
        What the progress is called.
    """
    names, width = tuple(sorted(rows)), len(reference.tested)
    bulk, sums, fold = (np.empty((len(names), width)) for _ in range(3))
    p, q = (np.full((len(names), width), np.nan) for _ in range(2))
    noise, num_cells = np.zeros(len(names)), np.zeros(len(names), np.int64)

    def work(place: int, counts: Sparse) -> None:
        profile, cells = profile_of(counts, rules)
        bulk[place], sums[place], noise[place] = profile.bulk, profile.sums, profile.noise
        num_cells[place] = profile.num_cells
        fold[place] = fold_change(profile.cpm, reference, rules)
        found = rank_test(_sorted(cells), reference.columns, exact_below=0)[reference.tested]
        p[place, reference.tested] = found
        q[place, reference.tested] = benjamini_hochberg(found)
        with lock:
            progress.advance()

    lock = threading.Lock()
    with (
        threadpool_limits(1, "blas"),
        track(label, len(names), "perturbations") as progress,
        Workers(usable(threads)) as workers,
    ):
        for place, name in enumerate(names):
            counts = read(rows[name])
            workers.submit(partial(work, place, counts), 2 * counts.nnz)
            del counts
        workers.finish()
    return Side(names, reference, bulk, noise, sums, num_cells, fold, p, q)


@dataclass(frozen=True)
class Pair:
    """Both sides of one context, and what is left out.

    Attributes
    ----------
    real, predicted
        The same perturbations on both sides.
    targets
        Positions of each perturbation's own target genes; empty where it has none.
    gene_order
        Rank of each gene by name, int64 [G].
    """

    real: Side
    predicted: Side
    targets: Sequence[np.ndarray]
    gene_order: np.ndarray

    def significant(self, side: Side, alpha: float, *, targets: bool) -> np.ndarray:
        """Return which genes are DE, bool [M, G], with or without each perturbation's own targets."""
        found = side.q < alpha
        if not targets:
            for row, own in zip(found, self.targets, strict=True):
                row[own] = False
        return found
