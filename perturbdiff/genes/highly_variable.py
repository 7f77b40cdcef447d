"""Scanpy's three flavors of highly variable genes, from each batch's means and variances.

The moments come from streaming sums (`perturbdiff.genes.gene_sums`), so that no cell is needed here. Ties, undefined
values and the combination of batches are treated as in scanpy 1.11, so that the same genes are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from skmisc.loess import loess

from perturbdiff.runtime.errors import UserError

NUM_BINS = 20
"""Bins of mean expression within which dispersions are compared (scanpy's default)."""

SPAN = 0.3
"""Share of the genes each local fit of seurat_v3 uses (scanpy's default)."""

_MAD = 0.6744897501960817
"""The median absolute deviation of the standard normal distribution."""

_NOISE = 1e-12
"""A variance below this share of the squared mean is what rounding leaves of a constant."""

_COLUMNS = ["means", "dispersions", "dispersions_norm", "highly_variable"]


class Moments(NamedTuple):
    """A batch: the number of its cells, and each gene's mean, unbiased variance and detection."""

    cells: int
    mean: np.ndarray
    variance: np.ndarray
    detected: np.ndarray


def moments(cells: int, total: np.ndarray, squares: np.ndarray, detected: np.ndarray) -> Moments:
    """Return mean and variance from sums over ``cells`` cells, with scanpy's order of operations.

    The variance of a single cell is 0.
    """
    mean = total / cells
    variance = squares / cells - mean**2
    variance[variance <= _NOISE * mean**2] = 0.0
    if cells > 1:
        variance *= cells / (cells - 1)
    return Moments(cells, mean, variance, detected)


def dispersions(flavor: str, mean: np.ndarray, variance: np.ndarray, num_top: int) -> pd.DataFrame:
    """Return one batch's gene statistics as scanpy's dispersion flavors define them.

    Parameters
    ----------
    flavor
        ``seurat``: of depth-normalised (not log) values. ``cell_ranger``: of their log1p.
    mean, variance
        Of these values, float64 [G].
    num_top
        Genes to mark; genes tied at the cut are all marked, as in scanpy.

    Returns
    -------
    pd.DataFrame
        Columns ``means``, ``dispersions`` (both logarithms for ``seurat``), ``dispersions_norm`` (relative to
        genes of a similar mean; nan where undefined) and ``highly_variable``.
    """
    mean = np.where(mean == 0, 1e-12, mean)
    dispersion = variance / mean
    if flavor == "seurat":
        dispersion[dispersion == 0] = np.nan
        mean, dispersion = np.log1p(mean), np.log(dispersion)
    frame = pd.DataFrame({"means": mean, "dispersions": dispersion})
    statistics, bins = (_seurat_bins if flavor == "seurat" else _cell_ranger_bins)(frame)
    of_bin = statistics.loc[bins].set_index(frame.index)
    with np.errstate(divide="ignore", invalid="ignore"):
        frame["dispersions_norm"] = (frame["dispersions"] - of_bin["centre"]) / of_bin["width"]
    scores = frame["dispersions_norm"].to_numpy()
    defined = np.sort(scores[~np.isnan(scores)])[::-1]
    cut = defined[min(num_top, len(defined)) - 1] if len(defined) else np.inf
    frame["highly_variable"] = np.nan_to_num(scores, nan=-np.inf) >= cut
    return frame


def _seurat_bins(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """Return the mean and SD of the dispersions in bins of equal width, and the bin of each gene."""
    bins = pd.Series(pd.cut(frame["means"], bins=NUM_BINS))
    statistics = frame.groupby(bins, observed=True)["dispersions"].agg(centre="mean", width="std")
    alone = pd.isna(statistics["width"])  # a single gene in its bin gets a normalised dispersion of 1
    statistics.loc[alone, "width"] = statistics.loc[alone, "centre"]
    statistics.loc[alone, "centre"] = 0.0
    return pd.DataFrame(statistics), bins


def _cell_ranger_bins(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """Return median and MAD of the dispersions in bins of equal size, and the bin of each gene.

    Where many genes share a mean (undetected ones), several borders coincide, which scanpy does not accept;
    the bins between them are empty and left out.
    """
    borders = np.percentile(frame["means"], np.arange(10, 105, 5))
    bins = pd.Series(pd.cut(frame["means"], bins=np.unique(np.r_[-np.inf, borders, np.inf]).tolist()))
    grouped = frame.groupby(bins, observed=True)["dispersions"]
    return pd.DataFrame(grouped.agg(centre="median", width=_absolute_deviation)), bins


def _absolute_deviation(values: pd.Series) -> float:
    return float(np.median(np.abs(values - np.median(values)) / _MAD))


def rank_by_dispersion(
    flavor: str, batches: Sequence[Moments], genes: Sequence[str], num_top: int, *, by_batch: bool
) -> pd.DataFrame:
    """Return all genes' statistics with the chosen ones marked, over one batch or combined as ``batch_key`` does.

    With ``by_batch``, genes are ordered by the number of batches that choose them, then by their mean
    normalised dispersion. A gene that a batch does not detect has 0 there. A batch of one cell chooses no gene
    (scanpy would rank rounding errors).
    """
    if not by_batch:
        (batch,) = batches
        return dispersions(flavor, batch.mean, batch.variance, num_top).set_index(pd.Index(genes))
    names, frames = np.asarray(genes, object), []
    for batch in batches:
        detected = batch.detected
        if detected.any():
            frame = dispersions(flavor, batch.mean[detected], batch.variance[detected], num_top)
            frame["highly_variable"] &= batch.cells > 1
            frame.index = pd.Index(names[detected])
            frames.append(frame.astype({"highly_variable": float}))
        frames.append(pd.DataFrame(0.0, index=pd.Index(names[~detected]), columns=pd.Index(_COLUMNS)))
    every = pd.concat(frames)
    how = {**dict.fromkeys(_COLUMNS[:-1], "mean"), "highly_variable": "sum"}
    table = pd.DataFrame(every.groupby(every.index, observed=True).agg(how))
    table["highly_variable_nbatches"] = table["highly_variable"].astype(int)
    order = table.sort_values(
        ["highly_variable_nbatches", "dispersions_norm"], ascending=False, na_position="last"
    )
    return order.assign(highly_variable=np.arange(len(order)) < num_top).loc[list(genes)]


def regularised_deviation(batch: Moments, name: str) -> np.ndarray | None:
    """Return the standard deviation that seurat_v3 expects of genes of that mean, float64 [G].

    A local quadratic regression of log variance on log mean of the raw counts; 1 for constant genes. None for
    a batch without variance (a single cell), which ranks nothing.

    Raises
    ------
    UserError
        If the batch has too few varying genes for the fit.
    """
    varying = batch.variance > 0
    if batch.cells < 2 or not varying.any():
        return None
    expected = np.zeros(len(batch.mean))
    try:
        model = _fit(np.log10(batch.mean[varying]), np.log10(batch.variance[varying]))
    except ValueError as error:
        raise UserError(
            f"data.hvg_flavor=seurat_v3: the fit of variance on mean fails in {name} ({int(varying.sum())} varying "
            f"genes, {batch.cells} cells); use data.hvg_flavor=seurat or data.hvg_by_batch=false"
        ) from error
    expected[varying] = model.outputs.fitted_values
    return np.sqrt(10**expected)


def _fit(x: np.ndarray, y: np.ndarray) -> loess:
    if int(len(x) * SPAN) < 1:  # without a neighbour to fit to, the library would end the process
        raise ValueError("too few points")
    model = loess(x, y, span=SPAN, degree=2)
    model.fit()
    return model


def clipped_variance(
    batch: Moments, deviation: np.ndarray, limit: np.ndarray, sums: np.ndarray
) -> np.ndarray:
    """Return the variance of the standardised counts, counts above ``limit`` replaced by it, float64 [G].

    Parameters
    ----------
    sums
        Of each gene's counts up to the limit, of their squares, and the number of counts above, [G, 3].
    """
    above = sums[:, 2]
    total, squares = sums[:, 0] + above * limit, sums[:, 1] + above * limit**2
    n = batch.cells
    return (1 / ((n - 1) * np.square(deviation))) * (
        n * np.square(batch.mean) + squares - 2 * total * batch.mean
    )


def rank_by_variance(
    overall: Moments, variances: np.ndarray, genes: Sequence[str], num_top: int, *, by_batch: bool
) -> pd.DataFrame:
    """Return all genes' statistics with scanpy's seurat_v3 choice marked.

    Genes are ordered by the median of their ranks in the batches that choose them, then by the number of
    these batches.

    Parameters
    ----------
    overall
        Moments of the raw counts over all cells.
    variances
        Standardised variances by batch, float64 [batches, G].
    """
    rank = np.argsort(np.argsort(-variances, axis=1), axis=1).astype(np.float32)
    chosen = rank < num_top
    rank[~chosen] = np.nan
    median = np.ma.median(np.ma.masked_invalid(rank), axis=0).filled(np.nan)
    table = pd.DataFrame(
        {
            "means": overall.mean,
            "variances": overall.variance,
            "variances_norm": variances.mean(axis=0),
            "highly_variable_rank": median,
            "highly_variable_nbatches": chosen.sum(axis=0),
        }
    )
    keys = ["highly_variable_rank", "highly_variable_nbatches"]
    order = (
        pd.DataFrame(table[keys])
        .sort_values(keys, ascending=[True, False], na_position="last")
        .index[:num_top]
    )
    table["highly_variable"] = False
    table.loc[order, "highly_variable"] = True
    table.index = pd.Index(genes)
    return table if by_batch else table.drop(columns="highly_variable_nbatches")
