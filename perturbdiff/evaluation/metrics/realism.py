"""Whether predicted cells look like cells: zeros, library sizes, spread, its trend with the mean, correlations.

What averages do not show. Values are log1p, cells × genes, of one condition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from perturbdiff.evaluation.metrics.profile_metrics import average_ranks
from perturbdiff.io.matrices import Sparse
from perturbdiff.runtime.compiled import kernel

EXPRESSED = 0.05  # share of real cells that makes a gene count as expressed
_TOP_GENES = 60
_BIN = 10  # genes at least behind a point of a mean–variance trend
_BINS = 25  # points of a trend at most
_STILL = 1e-6  # a standard deviation below this is rounding noise
_MORE = 1.001  # times the depth: float32 values of a real cell add up to it but for rounding


@dataclass(frozen=True)
class Moments:
    """What one pass over a set of cells says about its genes and cells.

    Attributes
    ----------
    shape
        Cells and genes.
    nonzero
        Non-zero values of each gene, int64 [G].
    mean, sd
        Of each gene over cells, float64 [G]; the SD is that of these cells, divided by their number.
    cell_mean
        Mean over genes of each cell, float64 [cells].
    library
        Σ expm1 over genes of each cell, float64 [cells]: its normalised counts.
    detected
        Non-zero values of each cell, int64 [cells].
    largest
        Largest value; NaN without cells.
    """

    shape: tuple[int, int]
    nonzero: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    cell_mean: np.ndarray
    library: np.ndarray
    detected: np.ndarray
    largest: float

    @classmethod
    def of(cls, cells: Sparse) -> Moments:
        """Read sparse log1p values [cells, G] once."""
        cells = sp.csr_matrix(cells)
        num, genes = cells.shape
        nonzero, sums, squares = np.zeros(genes, np.int64), np.zeros(genes), np.zeros(genes)
        per_cell, library, detected = np.zeros(num), np.zeros(num), np.zeros(num, np.int64)
        expm1 = np.expm1(cells.data, dtype=np.float64)
        largest = _moments(
            *(cells.data, cells.indices, cells.indptr, expm1),
            *(nonzero, sums, squares, per_cell, library, detected),
        )
        mean = sums / max(num, 1)
        sd = np.sqrt(np.maximum(squares / max(num, 1) - mean**2, 0.0))
        return cls(
            (num, genes),
            nonzero,
            mean,
            np.where(sd > _STILL, sd, 0.0),
            per_cell / max(genes, 1),
            library,
            detected,
            largest if num else float("nan"),
        )

    @property
    def density(self) -> float:
        """Share of non-zero values."""
        return float(self.nonzero.sum() / max(self.shape[0] * self.shape[1], 1))

    @property
    def expressed(self) -> np.ndarray:
        """Genes that vary and are seen in more than 5 % of the cells, bool [G]."""
        return (self.nonzero > EXPRESSED * self.shape[0]) & (self.sd > 0)


@kernel
def _moments(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    expm1: np.ndarray,
    nonzero: np.ndarray,
    sums: np.ndarray,
    squares: np.ndarray,
    per_cell: np.ndarray,
    library: np.ndarray,
    detected: np.ndarray,
) -> float:
    """Fill the sums of genes and cells; return the largest value, at least 0."""
    largest = 0.0
    for cell in range(indptr.size - 1):
        for at in range(indptr[cell], indptr[cell + 1]):
            gene, value = indices[at], np.float64(data[at])
            nonzero[gene] += value != 0
            detected[cell] += value != 0
            sums[gene] += value
            squares[gene] += value * value
            per_cell[cell] += value
            library[cell] += expm1[at]
            largest = max(largest, value)
    return largest


def realism(predicted: Sparse, real: Sparse, *, depth: float | None = None) -> dict[str, float]:
    """Return how the predicted cells' zeros, sizes, spread and correlations compare with the real ones'.

    Parameters
    ----------
    predicted, real
        Cells of one condition, sparse log1p [cells, G].
    depth
        Sum to which the counts of a cell were scaled, if it is known.

    Returns
    -------
    dict
        nonzero_ratio, library_ratio, library_sd_ratio, total_sd_ratio, above_depth, detected_sd_ratio,
        gene_sd_ratio, cell_sd_ratio, mean_variance_gap, correlation_agreement and max_value as
        `perturbdiff.evaluation.metrics.catalogue` defines them; NaN where undefined.
    """
    x, y = Moments.of(predicted), Moments.of(real)
    found = {
        "nonzero_ratio": _ratio(x.density, y.density) if x.shape[0] else float("nan"),
        "library_ratio": library_ratio(x, y),
        "library_sd_ratio": _spread_ratio(np.log1p(x.library), np.log1p(y.library)),
        "total_sd_ratio": total_sd_ratio(x, y),
        "above_depth": above_depth(x, depth),
        "detected_sd_ratio": _spread_ratio(x.detected, y.detected),
        "gene_sd_ratio": gene_sd_ratio(x, y),
        "cell_sd_ratio": _spread_ratio(x.cell_mean, y.cell_mean),
        "mean_variance_gap": mean_variance_gap(x, y),
        "correlation_agreement": correlation_agreement(predicted, real),
        "max_value": x.largest,
    }
    return found


def distinct_cells(cells: Sparse) -> int:
    """Return how many cells differ from all others, copies counting once.

    A cell is known by the sum of its values times fixed random weights of the genes.
    """
    weights = np.random.default_rng(0).random(cells.shape[1])
    return len(np.unique(sp.csr_matrix(cells) @ weights))


def library_ratio(predicted: Moments, real: Moments) -> float:
    """Return the median library size of the predicted cells over that of the real ones; NaN if that is 0."""
    if not (len(predicted.library) and len(real.library)):
        return float("nan")
    return _ratio(float(np.median(predicted.library)), float(np.median(real.library)))


def total_sd_ratio(predicted: Moments, real: Moments) -> float:
    """Return the SD over cells of Σ expm1, predicted over real; NaN if the real totals are all the same.

    They are if the cells hold every gene that their counts were scaled with.
    """
    unit = max(float(real.library.mean()), 1.0) if len(real.library) else 1.0  # rounding grows with the total
    return _spread_ratio(predicted.library / unit, real.library / unit)


def above_depth(predicted: Moments, depth: float | None) -> float:
    """Return the share of cells whose Σ expm1 is more than a cell scaled to ``depth`` can have, by over .1 %."""
    if depth is None or not np.isfinite(depth) or not len(predicted.library):
        return float("nan")
    return float((predicted.library > _MORE * depth).mean())


def gene_sd_ratio(predicted: Moments, real: Moments) -> float:
    """Return the median over real expressed genes of the ratio of predicted to real SD over cells."""
    genes = real.expressed
    if min(predicted.shape[0], real.shape[0]) < 2 or not genes.any():
        return float("nan")
    return float(np.median(predicted.sd[genes] / real.sd[genes]))


def mean_variance_gap(predicted: Moments, real: Moments) -> float:
    """Return how far the trends of SD over mean are apart: 0 equal, 1 no variance on one side.

    A trend is the median SD, over the genes expressed in the real cells, of groups of genes of similar mean (up
    to 25 groups, each of at least 10 genes), with straight lines between the groups' median means. The two
    trends T are compared at the real means that lie in the range of both: the median of |T̂ − T| / max(T̂, T).
    Each side's genes are grouped by that side's own means, so that a gene predicted too high counts as right if
    it varies as real genes of that height do.

    Returns
    -------
    float
        NaN with fewer than two cells on a side, fewer than 20 expressed genes, or without a common range.
    """
    genes = real.expressed
    if min(predicted.shape[0], real.shape[0]) < 2 or genes.sum() < 2 * _BIN:
        return float("nan")
    points = [_trend(side.mean[genes], side.sd[genes]) for side in (predicted, real)]
    low, high = (edge(means[at] for means, _ in points) for edge, at in ((max, 0), (min, -1)))
    at = real.mean[genes]
    at = at[(at >= low) & (at <= high)]
    if not at.size:
        return float("nan")
    x, y = (np.interp(at, *trend) for trend in points)
    larger = np.maximum(x, y)
    return float(np.median(np.abs(x - y) / np.where(larger > 0, larger, 1.0)))


def _trend(mean: np.ndarray, sd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((sd, mean))
    count = min(_BINS, len(order) // _BIN)
    sizes = np.full(count, len(order) // count)
    sizes[: len(order) % count] += 1  # groups as equal as they can be, the larger ones first
    within = np.lexsort((sd[order], np.repeat(np.arange(count), sizes)))
    starts = np.cumsum(sizes) - sizes
    return _middles(mean[order], starts, sizes), _middles(sd[order][within], starts, sizes)


def _middles(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the medians of successive groups whose values are sorted."""
    return 0.5 * (values[starts + (sizes - 1) // 2] + values[starts + sizes // 2])


def correlation_agreement(predicted: Sparse, real: Sparse) -> float:
    """Return how predicted and real gene–gene correlations correlate over pairs of the top genes.

    The 60 genes with the highest real mean; a gene that is constant on one side correlates 0 with all others.
    NaN with fewer than three cells on a side or if the correlations are constant.
    """
    if min(predicted.shape[0], real.shape[0]) < 3:
        return float("nan")
    top = _top_genes(real)
    x, y = (_pair_correlations(_chosen(cells, top)) for cells in (predicted, real))
    if len(x) < 2 or x.std() < 1e-12 or y.std() < 1e-12:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _top_genes(real: Sparse) -> np.ndarray:
    """Return the 60 genes with the highest mean."""
    return np.argsort(-np.asarray(real.mean(axis=0)).ravel(), kind="stable")[:_TOP_GENES]


def dependence_gap(predicted: Sparse, real: Sparse) -> float:
    """Return how far predicted and real gene–gene dependence are apart, whatever the genes' own distributions.

    Mean over pairs of the 60 genes with the highest real mean of the squared difference of their rank correlations
    (Spearman, equal values sharing their rank), less the estimated sampling variance of both. Expected near 0 for
    equal dependence and any number of cells, hence at times negative. A gene that is constant on one side correlates
    0 with all others there.

    Returns
    -------
    float
        NaN with fewer than three cells on a side or if fewer than two of the genes vary in the real cells.
    """
    if min(predicted.shape[0], real.shape[0]) < 3:
        return float("nan")
    top = _top_genes(real)
    x, y = (_rank_scores(_chosen(cells, top)) for cells in (predicted, real))
    if (y != 0).any(axis=0).sum() < 2:
        return float("nan")
    pairs = np.triu_indices(len(top), k=1)
    (guess, guess_noise), (truth, truth_noise) = (_correlations(side) for side in (x, y))
    return float(((guess - truth) ** 2 - guess_noise - truth_noise)[pairs].mean())


def _rank_scores(cells: np.ndarray) -> np.ndarray:
    """Return each gene's ranks over cells, of mean 0 and SD 1; 0 where the gene is constant."""
    ranks = np.column_stack([average_ranks(values) for values in cells.T])
    ranks -= ranks.mean(axis=0)
    spread = ranks.std(axis=0)
    return np.divide(ranks, spread, out=np.zeros_like(ranks), where=spread > 0)


def _correlations(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the correlations of standardised columns and their sampling variances, [genes, genes] each.

    The variance is the mean square of a cell's influence on the correlation r: z₁z₂ − r (z₁² + z₂²) / 2.
    """
    num = len(z)
    r, square = z.T @ z / num, z * z
    both, cubed = square.T @ square / num, (square * z).T @ z / num
    fourth = (square * square).mean(axis=0)
    ends = fourth[:, None] + fourth[None, :] + 2.0 * both
    variance = both - r * (cubed + cubed.T) + 0.25 * r * r * ends
    return r, np.maximum(variance, 0.0) / (num - 1)


def _chosen(cells: Sparse, genes: np.ndarray) -> np.ndarray:
    """Return the values of some genes, float64 [cells, genes]."""
    cells = sp.csr_matrix(cells)
    place = np.full(cells.shape[1], -1)
    place[genes] = np.arange(len(genes))
    out = np.zeros((cells.shape[0], len(genes)))
    _gather(cells.data, cells.indices, cells.indptr, place, out)
    return out


@kernel
def _gather(
    data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, place: np.ndarray, out: np.ndarray
) -> None:
    """Add the values of the genes that have a ``place`` to ``out``."""
    for cell in range(out.shape[0]):
        for at in range(indptr[cell], indptr[cell + 1]):
            if place[indices[at]] >= 0:
                out[cell, place[indices[at]]] += data[at]


def _pair_correlations(cells: np.ndarray) -> np.ndarray:
    centred = cells - cells.mean(axis=0)
    length = np.linalg.norm(centred, axis=0)
    # A column of equal values keeps rounding noise after centring; what it correlates with means nothing.
    constant = length <= 1e-6 * np.sqrt(len(cells)) * (1.0 + np.abs(cells).max(axis=0))
    scaled = np.where(constant, 0.0, centred / np.where(constant, 1.0, length))
    return (scaled.T @ scaled)[np.triu_indices(scaled.shape[1], k=1)]


def _spread_ratio(predicted: np.ndarray, real: np.ndarray) -> float:
    """Return the ratio of the SDs over cells; NaN with fewer than two cells on a side or equal real ones."""
    if min(len(predicted), len(real)) < 2:
        return float("nan")
    spreads = [float(side.std()) for side in (predicted, real)]
    return _ratio(*(s if s > _STILL else 0.0 for s in spreads))


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else float("nan")
