"""The first pass over the inputs: checks every value, filters cells and sums what gene selection needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from perturbdiff.config import DataConfig
from perturbdiff.data import kernels
from perturbdiff.data.counts import CountsFile, Inputs
from perturbdiff.data.genes import GeneSums
from perturbdiff.data.labels import Labels
from perturbdiff.data.matrices import Block
from perturbdiff.errors import UserError
from perturbdiff.progress import track

DROPPED = -1
_LARGEST_LOG1P = 20.0
_CELLS_PER_MEDIAN = 8_000_000


@dataclass
class Scan:
    """What one pass over the cells found; 12 bytes per cell.

    Attributes
    ----------
    codes
        Condition of each cell, int32, `DROPPED` for cells that a filter removed.
    depth
        Sum of each cell's counts over all genes, float32 (of expm1 for log1p input).
    detected
        Number of genes each cell expresses, int32.
    sums
        Sums by batch and gene of the cells that gene selection may look at.
    largest
        Largest stored value.
    low_counts, low_genes
        Cells each filter dropped, by condition; one that both would drop counts for the first.
    """

    codes: np.ndarray
    depth: np.ndarray
    detected: np.ndarray
    sums: GeneSums
    largest: float
    low_counts: np.ndarray
    low_genes: np.ndarray


def scan_cells(inputs: Inputs, labels: Labels, look: np.ndarray) -> Scan:
    """Read all cells once.

    Parameters
    ----------
    inputs
        The opened files.
    labels
        Their conditions; the codes become those of the result, so that they are held once.
    look
        Whether gene selection may look at each condition, bool.

    Raises
    ------
    UserError
        If a value is negative, not finite or not what ``input_scale`` declares.
    """
    config, conditions = inputs.config, labels.conditions
    by_batch = conditions["batch"] if config.hvg_by_batch else pd.Series("all", index=conditions.index)
    batch_of = np.where(look, pd.Categorical(by_batch).codes, DROPPED).astype(np.int32)
    n, num = inputs.n_cells, len(conditions)
    scan = Scan(
        codes=labels.codes,
        depth=np.zeros(n, np.float32),
        detected=np.zeros(n, np.int32),
        sums=GeneSums(int(by_batch.nunique()), len(inputs.genes)),
        largest=0.0,
        low_counts=np.zeros(num, np.int64),
        low_genes=np.zeros(num, np.int64),
    )
    whole = True
    with track("reading cells", n) as progress:
        for file, offset in zip(inputs.files, inputs.offsets, strict=False):
            columns = inputs.columns_of(file, inputs.genes)
            for block in file.blocks():
                whole &= _check(file, block, config, scan)
                _add(scan, block, int(offset), columns, batch_of, config)
                progress.advance(block.stop - block.start)
    if config.input_scale == "log1p" and whole and scan.largest > _LARGEST_LOG1P:
        raise UserError(
            f"{inputs.files[0].path}: declared log1p, but every value is a whole number and the largest is "
            f"{scan.largest:g}: these are counts; set data.input_scale=counts"
        )
    if not (scan.codes >= 0).any():
        raise UserError(
            f"no cell passes data.min_counts={config.min_counts} and data.min_genes={config.min_genes}; lower them"
        )
    return scan


def _add(
    scan: Scan, block: Block, offset: int, columns: np.ndarray, batch_of: np.ndarray, config: DataConfig
) -> None:
    """Note depth and detected genes of a block's cells, filter them and add the rest to the gene sums."""
    log = config.input_scale == "log1p"
    if log:  # the depths and sums are those of the values before the logarithm
        block = replace(block, data=np.expm1(block.data, dtype=np.float64))
    rows = slice(offset + block.start, offset + block.stop)
    codes, detected = scan.codes[rows], scan.detected[rows]
    depth = np.zeros(len(codes))
    kernels.row_totals(block.indptr, block.indices, block.data, columns, depth, detected)
    scan.depth[rows] = depth
    _filter(codes, depth, detected, config, scan)
    group = np.where(codes >= 0, batch_of[np.maximum(codes, 0)], DROPPED).astype(np.int32)
    scan.sums.add(block, columns, group, np.ones_like(depth) if log else depth)


def _check(file: CountsFile, block: Block, config: DataConfig, scan: Scan) -> bool:
    """Check a block's values, note the largest; return whether all are whole numbers."""
    whole, largest = kernels.are_counts(block.data)
    scan.largest = max(scan.largest, float(largest))
    if whole and np.isfinite(largest) and largest <= np.iinfo(np.uint32).max:
        return True
    negative, broken, fraction = kernels.find_faults(block.data)
    at = f"{file.path}: {config.layer}"
    if broken >= 0:
        raise UserError(
            f"{at} has a missing or infinite value ({_where(file, block, broken)}); mend or drop it"
        )
    if negative >= 0:
        raise UserError(
            f"{at} has negative values ({block.data[negative]:g}, {_where(file, block, negative)}); it is scaled "
            "or centred data: give raw counts (data.layer) or log1p values (data.input_scale=log1p)"
        )
    if fraction >= 0 and config.input_scale == "counts":
        value, place = block.data[fraction], _where(file, block, fraction)
        if largest <= _LARGEST_LOG1P:
            raise UserError(
                f"{at} is declared as counts but looks log-transformed ({value:g}, {place}, largest "
                f"{largest:g}); set data.input_scale=log1p, or data.layer to where the counts are (raw, layers/NAME)"
            )
        raise UserError(
            f"{at} is declared as counts but is not whole numbers ({value:g}, {place}); "
            "set data.layer to where the raw counts are (X, raw or layers/NAME)"
        )
    if config.input_scale == "counts" and largest > np.iinfo(np.uint32).max:
        raise UserError(f"{at} has a count of {largest:g}, more than 2^32; these are no counts")
    return fraction < 0


def _where(file: CountsFile, block: Block, k: int) -> str:
    row = block.start + int(np.searchsorted(block.indptr, k, "right")) - 1
    return f"gene '{file.genes[block.indices[k]]}', cell '{file.cell_names(row, row + 1)[0]}'"


def _filter(
    codes: np.ndarray, depth: np.ndarray, detected: np.ndarray, config: DataConfig, scan: Scan
) -> None:
    """Mark the dropped cells of a block in ``codes`` and count them by condition."""
    shallow = depth < config.min_counts
    few = ~shallow & (detected < config.min_genes)
    scan.low_counts += np.bincount(codes[shallow], minlength=len(scan.low_counts))
    scan.low_genes += np.bincount(codes[few], minlength=len(scan.low_genes))
    codes[shallow | few] = DROPPED


def median_depth(scan: Scan, look: np.ndarray) -> float:
    """Return the median depth of the kept cells of the conditions in ``look`` that have any counts.

    The default target of scanpy's normalize_total.
    """
    chosen = (scan.codes >= 0) & (scan.depth > 0)
    if not look.all():
        chosen &= look[np.maximum(scan.codes, 0)]
    if not chosen.any():
        raise UserError("no cell that gene selection may look at has any counts")
    return float(np.median(scan.depth[chosen]))


def quality_table(scan: Scan, conditions: pd.DataFrame) -> pd.DataFrame:
    """Return the cells read, dropped and kept of each batch and cell type, with their medians.

    Returns
    -------
    pd.DataFrame
        Columns ``cell_type, batch, cells_read, dropped_min_counts, dropped_min_genes, cells_kept,
        median_counts`` (over all genes) and ``median_genes`` (detected), the medians of kept cells.
    """
    table = conditions[["cell_type", "batch"]].assign(
        cells_read=conditions["n_cells"], dropped_min_counts=scan.low_counts, dropped_min_genes=scan.low_genes
    )
    group = table.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    result = table.groupby(["cell_type", "batch"], sort=False).sum().reset_index()
    result["cells_kept"] = result["cells_read"] - result["dropped_min_counts"] - result["dropped_min_genes"]
    medians = _medians(scan, group, result["cells_read"].to_numpy())
    return result.assign(median_counts=medians[:, 0], median_genes=medians[:, 1])


def _medians(scan: Scan, group: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return median depth and detected genes by group, sorting a few million cells at a time."""
    medians = np.full((len(sizes), 2), np.nan)
    batch = np.cumsum(sizes) // _CELLS_PER_MEDIAN
    for number in np.unique(batch):
        members = np.flatnonzero(batch == number)
        wanted = np.isin(group, members)
        cells = np.flatnonzero((scan.codes >= 0) & wanted[np.maximum(scan.codes, 0)])
        own = group[scan.codes[cells]]
        frame = pd.DataFrame({"depth": scan.depth[cells], "genes": scan.detected[cells]})
        found = frame.groupby(own).median()
        medians[found.index.to_numpy()] = found[["depth", "genes"]].to_numpy()
    return medians
