"""Choosing genes: highly variable genes from one or two passes over the cells, equal to scanpy's, or a given list.

What each flavor needs of the cells, by batch and gene:

- ``seurat``: the first pass alone. Scanpy's recipe is normalize_total, log1p, and a selection that undoes the
  logarithm again: only mean and variance of depth-normalised counts x T / L matter. Both scale with the target T,
  so the sums of x / L and (x / L)^2 are enough, and T, the median depth, may be known later.
- ``cell_ranger``: mean and variance of log1p(x T / L), a second pass once T is known. For log1p
  input the first pass sums the values as they are, and that is all.
- ``seurat_v3``: mean and variance of raw counts from the first pass, a fit, and then a second pass for the sums of
  counts clipped at what the fit allows.

The passes are in `perturbdiff.preprocessing.gene_passes`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.conditions.gene_names import unshared
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes import highly_variable
from perturbdiff.genes.gene_lists import read_names
from perturbdiff.genes.gene_sums import GeneSums
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)


def check_flavor(config: DataConfig) -> None:
    """Refuse a flavor that the declared input cannot serve; call it before anything is read.

    Raises
    ------
    UserError
        For seurat_v3 with log1p values.
    """
    if config.hvg_flavor == "seurat_v3" and config.unit == "log1p":
        raise UserError(
            f"data.hvg_flavor=seurat_v3 needs raw counts, but data.input_scale is {config.input_scale}; give counts "
            "(data.layer), or use data.hvg_flavor=seurat or cell_ranger"
        )


def sums_stored_values(config: DataConfig) -> bool:
    """Return whether the first pass sums values as stored, rather than depth-normalised without logarithm."""
    return config.hvg_flavor == "seurat_v3" or (config.hvg_flavor == "cell_ranger" and config.unit == "log1p")


def fits(sums: GeneSums) -> Iterable[tuple[int, highly_variable.Moments, np.ndarray]]:
    """Yield number, moments and expected deviation of each batch in which seurat_v3 can rank genes.

    Raises
    ------
    UserError
        If seurat_v3's fit fails.
    """
    without = 0
    for batch in np.flatnonzero(sums.cells):
        moments = sums.moments(int(batch))
        name = "the data" if len(sums.cells) == 1 else f"batch {batch + 1} of {len(sums.cells)}"
        deviation = highly_variable.regularised_deviation(moments, name)
        if deviation is None:
            without += 1
        else:
            yield int(batch), moments, deviation
    if without:
        logger.warning("%d batches of a single cell or without variance rank no genes", without)


def choose_genes(
    sums: GeneSums,
    genes: Sequence[str],
    target_sum: float,
    num_hvgs: int | None,
    *,
    by_batch: bool,
    flavor: str = "seurat",
    second: Iterable[Mapping[str, np.ndarray]] | None = None,
) -> pd.DataFrame:
    """Return every gene's statistics with the kept ones marked ``highly_variable``.

    With no ``num_hvgs``, or as many as there are genes, all genes are kept.

    Parameters
    ----------
    sums
        Of the first pass.
    genes
        Names of the genes.
    target_sum
        Depth the first pass's values are scaled to (1 if they are sums of stored values).
    num_hvgs
        Genes to keep.
    by_batch
        Choose in each batch of ``sums`` and combine, as scanpy's ``batch_key`` does.
    flavor
        Scanpy's name of the recipe.
    second
        What the second pass returned for each piece, in order; None if the flavor needs none.

    Returns
    -------
    pd.DataFrame
        Indexed by gene, with scanpy's columns of that flavor.

    Raises
    ------
    UserError
        If there is nothing to choose by.
    """
    if not sums.values.any():
        raise UserError(
            "no gene is detected in any cell that gene selection may look at (data.hvg_cells); check the input "
            "(data.layer) and the split's training cells"
        )
    wanted = len(genes) if num_hvgs is None else num_hvgs
    if flavor != "seurat" and second is None and wanted >= len(genes):
        table = pd.DataFrame(index=pd.Index(genes))  # all genes are kept, so no second pass was made
    elif flavor == "seurat_v3":
        table = _rank_by_variance(sums, second, genes, wanted, by_batch=by_batch)
    else:
        ranked, factor = (sums, target_sum) if second is None else (GeneSums.from_arrays(second), 1.0)
        ranked = ranked if by_batch else ranked.pooled()
        batches = [ranked.moments(int(batch), factor) for batch in np.flatnonzero(ranked.cells)]
        table = highly_variable.rank_by_dispersion(flavor, batches, genes, wanted, by_batch=by_batch)
    if wanted >= len(genes):
        if wanted > len(genes):
            logger.warning("data.num_hvgs is %d but there are %d genes: all are kept", wanted, len(genes))
        table["highly_variable"] = True
    elif (kept := int(table["highly_variable"].sum())) == 0:
        raise UserError(
            f"data.hvg_flavor={flavor}: no gene varies enough to be ranked among genes of a similar mean "
            f"({int(sums.cells.sum())} cells, {len(genes)} genes); choose another flavor, or set data.num_hvgs=null to "
            "keep all genes"
        )
    elif kept != wanted:
        logger.warning(
            "%d genes are kept where %d were asked for: %s", kept, wanted,
            "some are tied at the cut" if kept > wanted else "the others are detected in no cell",
        )  # fmt: skip
    return table


def _rank_by_variance(
    sums: GeneSums,
    second: Iterable[Mapping[str, np.ndarray]] | None,
    genes: Sequence[str],
    num_top: int,
    *,
    by_batch: bool,
) -> pd.DataFrame:
    """Return seurat_v3's table from the raw and the clipped sums."""
    if second is None:
        raise ValueError("seurat_v3 needs the pass of clipped sums")
    clipped = GeneSums.from_arrays(second)
    variances = []
    for batch, moments, deviation in fits(sums):
        limit = deviation * np.sqrt(moments.cells) + moments.mean
        variances.append(highly_variable.clipped_variance(moments, deviation, limit, clipped.values[batch]))
    if not variances:
        raise UserError(
            "data.hvg_flavor=seurat_v3: no gene varies within any batch; use data.hvg_by_batch=false"
        )
    return highly_variable.rank_by_variance(
        sums.pooled().moments(0), np.array(variances), genes, num_top, by_batch=by_batch
    )


def read_gene_list(path: Path, genes: Sequence[str]) -> list[str]:
    """Return the genes that a text file or a vocabulary's folder names and that are among ``genes``, in its order.

    Raises
    ------
    UserError
        If the file is missing, names a gene twice or has none of ``genes``.
    """
    wanted = pd.Index(read_names(path))
    known = wanted.isin(pd.Index(genes))
    if not known.any():
        raise UserError(
            f"{path}: none of its {len(wanted)} genes is in the data: "
            f"{unshared(list(wanted), list(genes), 'the list', 'the data')}"
        )
    if not known.all():
        logger.warning("%s: %d genes are not in the data and left out (%s)", path, (~known).sum(),
                       listing(wanted[~known], 4))  # fmt: skip
    return list(wanted[known])
