"""What the metrics need of one side: profiles, sampling noise and tests of every perturbation.

Perturbations come one after the other as sparse blocks of counts. Memory holds the sorted controls, the cells of a few
perturbations, and a few rows of numbers per perturbation: one per gene for profiles, one per tested gene for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

from perturbdiff.evaluation.cell_eval2.jackknife import NoiseSums, sampling_noise
from perturbdiff.evaluation.cell_eval2.metrics import Rules
from perturbdiff.evaluation.metrics.differential import benjamini_hochberg, rank_test
from perturbdiff.evaluation.metrics.sorted_columns import Columns, count_values
from perturbdiff.evaluation.scoring.worker_threads import Workers, usable
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.compiled import kernel
from perturbdiff.runtime.progress import track

_CELLS_AT_ONCE = 1024  # of the controls

Read = Callable[[np.ndarray], Sparse]
"""From row numbers to counts, canonical CSR float64 [n, G]."""


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
    control
        Profile of the controls that they were compared with.
    bulk
        Profiles, float64 [M, G].
    noise
        Sampling noise, float64 [M].
    num_cells
        Number of cells, int64 [M].
    genes
        Positions of the genes that tests are kept of, int64 [T], ascending: those tested here or on the other side.
    fold
        log2 fold changes, float64 [M, T]; NaN for genes that are not tested here.
    p
        Two-sided p, float64 [M, T]; NaN for genes that are not tested here.
    significant
        Whether p, adjusted within the perturbation, is below alpha, bool [M, T].
    """

    perturbations: tuple[str, ...]
    control: Profile
    bulk: np.ndarray
    noise: np.ndarray
    num_cells: np.ndarray
    genes: np.ndarray
    fold: np.ndarray
    p: np.ndarray
    significant: np.ndarray

    @property
    def change(self) -> np.ndarray:
        """Return the change of the profiles from that of the controls, [M, G]."""
        return self.bulk - self.control.bulk

    def q(self, place: int) -> np.ndarray:
        """Return one perturbation's p, adjusted by Benjamini and Hochberg; float64 [T], NaN where there is no p.

        It is worked out when it is asked for: it takes as much memory as p, and orders genes in the same way.
        """
        found, tested = np.full(len(self.genes), np.nan), np.isfinite(self.p[place])
        found[tested] = benjamini_hochberg(self.p[place, tested])
        return found


@kernel
def _depths_of(data: np.ndarray, indptr: np.ndarray, depths: np.ndarray) -> None:
    """Write the sum of each cell."""
    for cell in range(depths.size):
        total = 0.0
        for i in range(indptr[cell], indptr[cell + 1]):
            total += data[i]
        depths[cell] = total


@kernel
def _scale(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    factor: np.ndarray,
    scaled: np.ndarray,
    sums: np.ndarray,
    scaled_sums: np.ndarray,
) -> None:
    """Divide each cell by its factor, and add the values of each gene before and after."""
    for cell in range(factor.size):
        for i in range(indptr[cell], indptr[cell + 1]):
            value = data[i] / factor[cell]
            scaled[i] = value
            sums[indices[i]] += data[i]
            scaled_sums[indices[i]] += value


class Scaled:
    """Cells whose counts were scaled to one depth, in the order of operations of scanpy's normalize_total.

    Equal values must stay equal to the last bit, because ties decide p. A cell without counts stays zero.

    Attributes
    ----------
    depths
        Sum of each cell, float64 [n].
    sums, scaled_sums
        Sums of each gene before and after, float64 [G].
    """

    def __init__(self, counts: Sparse, depth: float) -> None:
        num, width = counts.shape
        self.depths, self.sums, self.scaled_sums = (np.zeros(size) for size in (num, width, width))
        _depths_of(counts.data, counts.indptr, self.depths)
        factor = self.depths / depth
        factor[factor == 0] = 1.0
        values = np.empty_like(counts.data)
        arrays = (counts.data, counts.indices, counts.indptr)
        _scale(*arrays, factor, values, self.sums, self.scaled_sums)
        self._values, self._counts = values, counts

    def log1p(self) -> Sparse:
        """Return the logarithms, CSR float64 [n, G]. The scaled values are overwritten, so it is called once."""
        np.log1p(self._values, out=self._values)
        return sp.csr_matrix(
            (self._values, self._counts.indices, self._counts.indptr), shape=self._counts.shape
        )


def bulk_profile(sums: np.ndarray, depth: float) -> np.ndarray:
    """Return log1p of summed counts scaled to ``depth``; zero where there is no count."""
    total = sums.sum()
    return np.log1p(sums * (depth / total if total > 0 else 0.0))


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
    sums, cpm, lengths = _sums_of(read, blocks, rules)
    cpm /= len(rows)
    noise = NoiseSums(sums, len(rows), rules.bulk_depth)

    def second_time() -> Iterator[Sparse]:
        for block in blocks:
            counts = read(block)
            cells = Scaled(counts, rules.cell_depth)
            noise.add(counts, cells.depths)
            yield cells.log1p()

    columns = Columns.streamed(second_time(), lengths, np.float64)
    profile = Profile(sums, bulk_profile(sums, rules.bulk_depth), noise.noise, cpm, len(rows))
    return Reference(profile, columns, cpm * (1e6 / rules.cell_depth) > rules.min_cpm)


def _sums_of(
    read: Read, blocks: Sequence[np.ndarray], rules: Rules
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each gene's sum of counts, of scaled counts, and number of counts that are not zero."""
    sums, scaled_sums, lengths = np.zeros(1), np.zeros(1), np.zeros(1, np.int64)
    for block in blocks:
        counts = read(block)
        cells = Scaled(counts, rules.cell_depth)
        found = np.zeros(counts.shape[1], np.int64)
        count_values(counts, found)
        sums, scaled_sums, lengths = sums + cells.sums, scaled_sums + cells.scaled_sums, lengths + found
    return sums, scaled_sums, lengths


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
    genes: np.ndarray | None = None,
    threads: int | None = None,
    label: str = "evaluate",
    seen: Callable[[int, Profile], None] | None = None,
) -> Side:
    """Measure perturbations against a reference.

    Parameters
    ----------
    read
        Reads counts.
    rows
        Rows of each perturbation; at least one.
    genes
        Positions of the genes that tests are kept of, ascending: those that are tested, which is the default, and more.
    threads
        Number of threads that compare, by default the processors that this process may use. The result does not depend
        on it.
    label
        What the progress is called.
    seen
        Is given the place and the profile of each perturbation, by several threads in any order.
    """
    names = tuple(sorted(rows))
    genes = np.flatnonzero(reference.tested) if genes is None else genes
    side = _empty_side(names, reference, genes)
    lock, tested = threading.Lock(), reference.tested[genes]

    def work(place: int, counts: Sparse) -> None:
        cells = Scaled(counts, rules.cell_depth)
        num = counts.shape[0]
        bulk = bulk_profile(cells.sums, rules.bulk_depth)
        noise = sampling_noise(counts, cells.sums, cells.depths, rules.bulk_depth)
        profile = Profile(cells.sums, bulk, noise, cells.scaled_sums / num, num)
        side.bulk[place], side.noise[place], side.num_cells[place] = bulk, noise, num
        side.fold[place] = fold_change(profile.cpm, reference, rules)[genes]
        p = rank_test(Columns.of([cells.log1p()]), reference.columns, exact_below=0)[reference.tested]
        side.p[place, tested] = p
        side.significant[place, tested] = benjamini_hochberg(p) < rules.alpha
        if seen is not None:
            seen(place, profile)
        with lock:
            progress.advance()

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
    return side


def _empty_side(names: tuple[str, ...], reference: Reference, genes: np.ndarray) -> Side:
    num, shape = len(names), (len(names), len(genes))
    bulk = np.empty((num, len(reference.tested)))
    fold, p = (np.full(shape, np.nan) for _ in range(2))
    noise, num_cells = np.zeros(num), np.zeros(num, np.int64)
    significant = np.zeros(shape, bool)
    return Side(names, reference.profile, bulk, noise, num_cells, genes, fold, p, significant)


@dataclass(frozen=True)
class Pair:
    """Both sides of one context, and what is left out.

    Attributes
    ----------
    real, predicted
        The same perturbations on both sides, with tests of the same genes.
    targets
        Positions of each perturbation's own target genes; empty where it has none.
    gene_order
        Rank of each gene by name, int64 [G].
    """

    real: Side
    predicted: Side
    targets: Sequence[np.ndarray]
    gene_order: np.ndarray

    @cached_property
    def tested_targets(self) -> list[np.ndarray]:
        """Return the targets' places among the genes that tests are kept of."""
        return [np.flatnonzero(np.isin(self.real.genes, own)) for own in self.targets]

    def significant(self, side: Side, *, targets: bool) -> np.ndarray:
        """Return which genes are DE, bool [M, T], with or without each perturbation's own targets."""
        found = side.significant.copy()
        if not targets:
            for row, own in zip(found, self.tested_targets, strict=True):
                row[own] = False
        return found
