"""Sampling noise of a group's log profile, from the profiles that lack one cell each."""

from __future__ import annotations

import numpy as np

from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.compiled import kernel

_SMALL = 0.1  # share of a cell in the others' counts up to which the series below is summed
_TERMS = 20  # of the series: 0.1^20 / 20 is far below the last bit


@kernel
def _cells_with_values(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    share: np.ndarray,
    weight: np.ndarray,
    sums: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
) -> None:
    """Replace what a cell without the gene would add to the sums by what its count adds."""
    for cell in range(indptr.size - 1):
        d = share[cell]
        for i in range(indptr[cell], indptr[cell + 1]):
            gene = indices[i]
            if data[i] == 0:  # stored, but nothing
                continue
            w = weight[gene]
            without = np.log1p(w * d)
            change = np.log1p(w * (d - data[i] / sums[gene] * (1.0 + d)))
            first[gene] += change - without
            second[gene] += change * change - without * without


@kernel
def _cells_without(share: np.ndarray, weight: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    """Add log1p(weight · share) and its square for each cell and gene."""
    for cell in range(share.size):
        for gene in range(weight.size):
            change = np.log1p(weight[gene] * share[cell])
            first[gene] += change
            second[gene] += change * change


def _series(share: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums over cells of log1p(weight · share) and of its square, float64 [G], by power series.

    log1p(x) = Σ (−1)^(k+1) x^k / k and log1p(x)² = Σ (−1)^k 2 H(k−1) x^k / k, so that only the sums of the powers of
    ``share`` are needed, once for all genes.
    """
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for k in range(_TERMS, 0, -1):  # Horner's rule
        power = float((share**k).sum()) * (-1.0) ** (k + 1) / k
        harmonic = sum(1.0 / j for j in range(1, k))
        first = (first + power) * weight
        second = (second - power * 2.0 * harmonic) * weight
    return first, second


class NoiseSums:
    """The jackknife estimate of the summed variance over genes of log1p(target · sums / Σ sums), cells added in blocks.

    (n − 1)/n Σ over cells and genes of the squared deviation of the profile without the cell from the mean of these
    profiles (Efron & Stein 1981, Ann. Statist. 9:586). 0 for a single cell.

    Leaving out a cell multiplies a gene's share by (1 − y/P)(1 + d), where y is its count in the cell, P the gene's sum
    and d = depth / (total − depth), so that the log profile changes by log1p(w((1 − y/P)(1 + d) − 1)) with
    w = a/(1 + a), a = target · P / total. Cells without the gene are summed by a series, so that no dense matrix
    is needed.

    Parameters
    ----------
    sums
        Sums over all cells [G].
    num_cells
        Their number.
    target
        Depth of the profile.
    """

    def __init__(self, sums: np.ndarray, num_cells: int, target: float) -> None:
        self._sums, self._num, self._total = sums, num_cells, float(sums.sum())
        scaled = target * sums / self._total if self._total > 0 else np.zeros_like(sums)
        self._weight = scaled / (1.0 + scaled)
        self._first, self._second = np.zeros_like(sums), np.zeros_like(sums)

    def add(self, counts: Sparse, depths: np.ndarray) -> None:
        """Add cells: counts, CSR float64 [n, G], and their sums over genes [n]."""
        if self._num < 2 or self._total <= 0:
            return
        rest = self._total - depths
        if (
            rest <= 0
        ).any():  # all counts are in one cell: without it the profile is zero, without others the same
            alone = np.log1p(self._weight / (1.0 - self._weight))
            self._first -= alone
            self._second += alone**2
            return
        share = depths / rest
        first, second = _series(share[share <= _SMALL], self._weight)
        self._first += first
        self._second += second
        _cells_without(share[share > _SMALL], self._weight, self._first, self._second)
        arrays = (counts.data, counts.indices, counts.indptr)
        _cells_with_values(*arrays, share, self._weight, self._sums, self._first, self._second)

    @property
    def noise(self) -> float:
        """Return the estimate, once all cells were added."""
        variance = self._second - self._first**2 / self._num
        return max((self._num - 1) / self._num * float(variance.sum()), 0.0)


def sampling_noise(counts: Sparse, sums: np.ndarray, depths: np.ndarray, target: float) -> float:
    """Return the estimate of `NoiseSums` for cells that are all here."""
    found = NoiseSums(sums, counts.shape[0], target)
    found.add(counts, depths)
    return found.noise
