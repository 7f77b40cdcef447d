"""Choosing genes: highly variable genes from one pass over the cells, equal to scanpy's, or a given list.

Scanpy's recipe is normalize_total, log1p, highly_variable_genes(flavor="seurat"), which undoes the logarithm
again: only the mean and variance of depth-normalised counts x T / L matter. Both scale with the target T, so the
sums of x / L and (x / L)^2 are enough, and T, the median depth, may be known later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.data import kernels
from perturbdiff.data.matrices import Block
from perturbdiff.errors import UserError, listing

logger = logging.getLogger(__name__)

NUM_BINS = 20
"""Bins of mean expression within which dispersions are compared (scanpy's default)."""


class GeneSums:
    """Sums of depth-normalised values by batch and gene: float64, 24 bytes per batch and gene."""

    def __init__(self, num_batches: int, num_genes: int) -> None:
        self.total = np.zeros((num_batches, num_genes))
        self.squares = np.zeros((num_batches, num_genes))
        self.positive = np.zeros((num_batches, num_genes), np.int64)
        self.cells = np.zeros(num_batches, np.int64)

    def add(
        self,
        block: Block,
        columns: np.ndarray,
        group: np.ndarray,
        divisor: np.ndarray,
    ) -> None:
        """Add a block's rows to the sums of their ``group`` (-1: left out), divided by ``divisor``."""
        self.cells += np.bincount(group[group >= 0], minlength=len(self.cells))
        kernels.add_gene_sums(
            block.indptr, block.indices, block.data, columns, group, divisor,
            self.total, self.squares, self.positive,
        )  # fmt: skip

    def moments(self, batch: int, target_sum: float) -> tuple[np.ndarray, np.ndarray]:
        """Return each gene's mean and unbiased variance over a batch's cells, scaled to ``target_sum``."""
        n = int(self.cells[batch])
        mean = target_sum * self.total[batch] / n
        square = target_sum**2 * self.squares[batch] / n
        with np.errstate(divide="ignore", invalid="ignore"):
            return mean, (square - mean**2) * np.float64(n) / np.float64(n - 1)

    def pooled(self) -> GeneSums:
        """Return the sums over all batches as one."""
        one = GeneSums(1, self.total.shape[1])
        one.total[0], one.squares[0] = self.total.sum(axis=0), self.squares.sum(axis=0)
        one.positive[0], one.cells[0] = self.positive.sum(axis=0), self.cells.sum()
        return one


def seurat_dispersions(mean: np.ndarray, variance: np.ndarray, num_top: int) -> pd.DataFrame:
    """Return one batch's gene statistics as scanpy's flavor "seurat" defines them.

    Parameters
    ----------
    mean, variance
        Of depth-normalised (not log) values, float64 [G].
    num_top
        Genes to mark; genes tied at the cut are all marked, as in scanpy.

    Returns
    -------
    pd.DataFrame
        Columns ``means`` (log1p), ``dispersions`` (log), ``dispersions_norm`` (z-score within a bin of the
        mean; nan where undefined) and ``highly_variable``.
    """
    mean = np.where(mean == 0, 1e-12, mean)
    dispersion = variance / mean
    dispersion[dispersion == 0] = np.nan
    frame = pd.DataFrame({"means": np.log1p(mean), "dispersions": np.log(dispersion)})
    bins = pd.cut(frame["means"], bins=NUM_BINS)
    statistics = frame.groupby(bins, observed=True)["dispersions"].agg(centre="mean", width="std")
    alone = pd.isna(statistics["width"])  # a single gene in its bin gets a normalised dispersion of 1
    statistics.loc[alone, "width"] = statistics.loc[alone, "centre"]
    statistics.loc[alone, "centre"] = 0.0
    own = statistics.loc[bins].set_index(frame.index)
    frame["dispersions_norm"] = (frame["dispersions"] - own["centre"]) / own["width"]
    scores = frame["dispersions_norm"].to_numpy()
    defined = np.sort(scores[~np.isnan(scores)])[::-1]
    cut = defined[min(num_top, len(defined)) - 1] if len(defined) else np.inf
    frame["highly_variable"] = np.nan_to_num(scores, nan=-np.inf) >= cut
    return frame


def rank_genes(sums: GeneSums, genes: Sequence[str], target_sum: float, num_top: int) -> pd.DataFrame:
    """Return the statistics of all genes over all cells, the chosen ones marked ``highly_variable``."""
    pooled = sums.pooled() if len(sums.cells) > 1 else sums
    frame = seurat_dispersions(*pooled.moments(0, target_sum), num_top)
    frame.index = pd.Index(genes)
    return frame


def rank_genes_by_batch(
    sums: GeneSums, genes: Sequence[str], target_sum: float, num_top: int
) -> pd.DataFrame:
    """Return `rank_genes` with the choice made in each batch and combined, as scanpy's ``batch_key`` does.

    Genes are ordered by the number of batches that choose them, then by their mean normalised dispersion;
    a gene a batch does not detect counts there as zero.
    """
    names, frames = np.asarray(genes, object), []
    used = np.flatnonzero(sums.cells)
    for batch in used:
        seen = sums.positive[batch] > 0
        mean, variance = sums.moments(int(batch), target_sum)
        found = seurat_dispersions(mean[seen], variance[seen], num_top)
        found.index = pd.Index(names[seen])
        absent = pd.DataFrame(0.0, index=pd.Index(names[~seen]), columns=found.columns)
        frames.append(pd.concat([found.astype({"highly_variable": float}), absent]))
    means = dict.fromkeys(("means", "dispersions", "dispersions_norm"), "mean")
    every = pd.concat(frames)
    table = pd.DataFrame(every.groupby(every.index, observed=True).agg({**means, "highly_variable": "sum"}))
    table["highly_variable_nbatches"] = table["highly_variable"].astype(int)
    order = table.sort_values(
        ["highly_variable_nbatches", "dispersions_norm"], ascending=False, na_position="last"
    )
    return order.assign(highly_variable=np.arange(len(order)) < num_top).loc[list(genes)]


def choose_genes(
    sums: GeneSums, genes: Sequence[str], target_sum: float, num_hvgs: int | None, *, by_batch: bool
) -> pd.DataFrame:
    """Return every gene's statistics with the kept ones marked ``highly_variable``.

    With no ``num_hvgs``, or as many as there are genes, all genes are kept.

    Raises
    ------
    UserError
        If there is nothing to choose by.
    """
    if not sums.positive.any():
        raise UserError(
            "no gene is detected in any cell that gene selection may look at (data.hvg_cells); check the input "
            "(data.layer) and the split's training cells"
        )
    wanted = len(genes) if num_hvgs is None else num_hvgs
    rank = rank_genes_by_batch if by_batch else rank_genes
    table = rank(sums, genes, target_sum, wanted)
    if wanted >= len(genes):
        if wanted > len(genes):
            logger.warning("data.num_hvgs is %d but there are %d genes: all are kept", wanted, len(genes))
        table["highly_variable"] = True
    elif (kept := int(table["highly_variable"].sum())) != wanted:
        logger.warning(
            "%d genes are kept where %d were asked for: %s", kept, wanted,
            "some are tied at the cut" if kept > wanted else "the others are detected in no cell",
        )  # fmt: skip
    return table


def read_gene_list(path: Path, genes: Sequence[str]) -> list[str]:
    """Return the genes a text file names, one per line, that are among ``genes``, in the file's order.

    Raises
    ------
    UserError
        If the file is missing, names a gene twice or has none of ``genes``.
    """
    if not path.is_file():
        raise UserError(f"gene list not found: {path}")
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not a text file; give one gene name per line") from None
    wanted = pd.Index([line for line in lines if line and not line.startswith("#")])
    if not wanted.is_unique:
        raise UserError(f"{path}: names a gene twice ({listing(wanted[wanted.duplicated()].unique(), 4)})")
    known = wanted.isin(pd.Index(genes))
    if not known.any():
        raise UserError(
            f"{path}: none of its {len(wanted)} genes is in the data (list: {listing(wanted, 3)}; "
            f"data: {listing(genes[:3])}); use the same kind of gene names"
        )
    if not known.all():
        logger.warning("%s: %d genes are not in the data and left out (%s)", path, (~known).sum(),
                       listing(wanted[~known], 4))  # fmt: skip
    return list(wanted[known])
