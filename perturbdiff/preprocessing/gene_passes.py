"""Passes over the cells that sum what genes are chosen from (`perturbdiff.genes.selection`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_sums import GeneSums, add_clipped_sums, add_log_sums, group_of_cells
from perturbdiff.genes.selection import fits
from perturbdiff.io.matrices import Block
from perturbdiff.preprocessing.passes import PieceReader
from perturbdiff.runtime import files

_LEFT_OUT = -1


@dataclass(frozen=True)
class SumsRequest:
    """What the passes of this module need to know.

    Attributes
    ----------
    group
        Group of each condition, int32, -1 for those left out.
    num_groups
        Number of groups.
    stored, log
        For `gene_sums`: sum values as stored; the stored values are log1p.
    target_sum
        For `log_sums`: depth that cells are scaled to.
    limits
        For `clipped_sums`: file with the largest count each gene may have, float64 [groups, G].
    """

    group: np.ndarray
    num_groups: int
    stored: bool = False
    log: bool = False
    target_sum: float = 1.0
    limits: str = ""


def _rows(reader: PieceReader, group: np.ndarray) -> Iterable[tuple[Block, slice]]:
    """Yield the piece's blocks that hold a cell of any group, with the places of their rows in the piece."""
    for block in reader.blocks():
        rows = slice(block.start - reader.piece.start, block.stop - reader.piece.start)
        if (group[rows] >= 0).any():
            yield block, rows


def gene_sums(reader: PieceReader, request: SumsRequest) -> dict[str, np.ndarray]:
    """Return a piece's `GeneSums` as arrays, as the first pass makes them, of the cells that are left.

    A pass of its own, needed where a later filter (the knock-down) has dropped cells after the first pass.
    """
    sums = GeneSums(request.num_groups, reader.num_genes)
    group = group_of_cells(reader.codes, request.group)
    divisor = None if request.stored or request.log else np.asarray(reader.saved("scan")["depth"], np.float64)
    for block, rows in _rows(reader, group):
        if request.log and not request.stored:
            block = replace(block, data=np.expm1(block.data, dtype=np.float64))
        sums.add(block, reader.columns, group[rows], None if divisor is None else divisor[rows])
    return sums.arrays()


def log_sums(reader: PieceReader, request: SumsRequest) -> dict[str, np.ndarray]:
    """Return a piece's sums of log1p(count * target_sum / depth) as arrays of `GeneSums`."""
    sums = GeneSums(request.num_groups, reader.num_genes)
    group = group_of_cells(reader.codes, request.group)
    depth = np.asarray(reader.saved("scan")["depth"], np.float64)
    factor = request.target_sum / np.where(depth > 0, depth, 1.0)
    for block, rows in _rows(reader, group):
        sums.count(group[rows])
        add_log_sums(
            block.indptr, block.indices, block.data, reader.columns, group[rows], factor[rows], sums.values
        )
    return sums.arrays()


def clipped_sums(reader: PieceReader, request: SumsRequest) -> dict[str, np.ndarray]:
    """Return a piece's sums of counts up to their gene's limit, and the number of those above.

    As arrays of `GeneSums`, the number in the place of the positive values; all sums are exact.
    """
    sums = GeneSums(request.num_groups, reader.num_genes)
    group = group_of_cells(reader.codes, request.group)
    present = np.unique(group[group >= 0])
    limits = np.asarray(np.load(request.limits, mmap_mode="r")[present])
    local = np.full(request.num_groups, _LEFT_OUT, np.int32)
    local[present] = np.arange(len(present))
    values = np.zeros((len(present), reader.num_genes, 3))
    for block, rows in _rows(reader, group):
        sums.count(group[rows])
        add_clipped_sums(
            block.indptr, block.indices, block.data, reader.columns,
            group_of_cells(group[rows], local), limits, values,
        )  # fmt: skip
    sums.values[present] = values
    return sums.arrays()


class SecondPass(NamedTuple):
    """A further pass over the cells: run ``body`` with ``request`` on every piece."""

    name: str
    body: Callable[[Any, Any], dict[str, np.ndarray]]
    request: SumsRequest


def second_pass(
    config: DataConfig, sums: GeneSums, group: np.ndarray, target_sum: float, scratch: Path
) -> SecondPass | None:
    """Return the pass that the flavor needs after the first, or None.

    Parameters
    ----------
    config
        Flavor, scale and number of genes; no choice among the genes needs no pass.
    sums
        Of the first pass.
    group
        As `gene_groups` returns it, int32 [conditions].
    target_sum
        Depth that cells are scaled to.
    scratch
        Folder that every task can read; seurat_v3 leaves a file of limits there.

    Raises
    ------
    UserError
        If seurat_v3's fit fails.
    """
    num_groups, num_genes = sums.values.shape[:2]
    if config.num_hvgs is None or config.num_hvgs >= num_genes or not sums.values.any():
        return None
    if config.hvg_flavor == "cell_ranger" and config.input_scale == "counts":
        return SecondPass("log-sums", log_sums, SumsRequest(group, num_groups, target_sum=target_sum))
    if config.hvg_flavor != "seurat_v3":
        return None
    limits = np.zeros((num_groups, num_genes))
    for batch, moments, deviation in fits(sums):
        limits[batch] = deviation * np.sqrt(moments.cells) + moments.mean
    path = scratch / "clip-limits.npy"
    scratch.mkdir(parents=True, exist_ok=True)
    with files.writing(path) as temporary, temporary.open("wb") as handle:
        np.save(handle, limits)
    return SecondPass("clipped-sums", clipped_sums, SumsRequest(group, num_groups, limits=str(path)))
