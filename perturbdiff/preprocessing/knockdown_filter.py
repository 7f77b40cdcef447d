"""The passes of the knock-down filter: values of the target genes, the decision, and the cells that are left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from perturbdiff.genes.gene_sums import GeneSums, SumsRequest, gene_groups, gene_sums
from perturbdiff.genes.selection import sums_stored_values
from perturbdiff.io.cell_labels import Labels
from perturbdiff.io.counts import Inputs
from perturbdiff.preprocessing.knockdown import (
    PASS,
    KnockdownDecision,
    decide,
    knockdown_values,
    plan_knockdown,
    read_targets,
)
from perturbdiff.preprocessing.passes import DROPPED, Passes, PieceReader
from perturbdiff.preprocessing.scan import Scan
from perturbdiff.preprocessing.streaming_median import StreamingMedian

_LEFT = "knocked-down"


@dataclass(frozen=True)
class _Left:
    """The decision and the sums to make of the cells that it leaves; travels to workers."""

    limit: np.ndarray
    cell_residual: float
    sums: SumsRequest


def target_genes(inputs: Inputs, labels: Labels) -> dict[str, str]:
    """Return the target gene of each perturbation: from ``knockdown_gene_key``, or the label without its dose.

    Raises
    ------
    UserError
        If the column is missing or gives a perturbation several targets.
    """
    if inputs.config.knockdown_gene_key is not None:
        return read_targets(inputs, labels.conditions, labels.codes)
    table = labels.perturbations
    return dict(zip(table["perturbation"].astype(str), table["agent"].astype(str), strict=True))


def apply_knockdown(
    passes: Passes, conditions: pd.DataFrame, look: np.ndarray, scan: Scan, targets: Mapping[str, str]
) -> tuple[Scan, pd.DataFrame]:
    """Drop what is not knocked down, in two further passes, and tell later passes so.

    Parameters
    ----------
    passes
        Over the inputs, after the scan.
    conditions
        ``cell_type, batch, perturbation``.
    look
        Whether gene selection may look at each condition, bool.
    scan
        What the first pass found.
    targets
        As `target_genes` returns them.

    Returns
    -------
    tuple[Scan, pd.DataFrame]
        The scan of the cells that are left, its quality table with a column ``dropped_knockdown``, and the table
        of perturbations, see `KnockdownDecision`.

    Raises
    ------
    UserError
        If no target is a measured gene, or no perturbation passes.
    """
    config = passes.inputs.config
    plan = plan_knockdown(conditions, passes.inputs.genes, config, targets)
    passes.run(PASS, knockdown_values, plan.request, label="reading target genes")
    decision = decide(plan, lambda: passes.results(PASS), config)
    group, num_groups = gene_groups(conditions, look, by_batch=config.hvg_by_batch)
    sums = SumsRequest(group, num_groups, sums_stored_values(config), config.input_scale == "log1p")
    passes.run(
        _LEFT, left_cells, _Left(decision.limit, decision.cell_residual, sums), label="summing cells left"
    )
    passes.filtered = _LEFT
    return _rescan(passes, conditions, look, scan), decision.table


def left_cells(reader: PieceReader, request: _Left) -> dict[str, np.ndarray]:
    """Return a piece's ``codes`` after the filter and the gene sums of the cells that are left."""
    decision = KnockdownDecision(pd.DataFrame(), request.limit, request.cell_residual)
    reader.codes = np.where(decision.keeps(reader.saved(PASS)), reader.codes, DROPPED).astype(np.int32)
    return {"codes": reader.codes, **gene_sums(reader, request.sums)}


def _rescan(passes: Passes, conditions: pd.DataFrame, look: np.ndarray, scan: Scan) -> Scan:
    """Return the scan with the sums, numbers and medians of the cells that are left."""
    group = conditions.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    depths, genes, visible = StreamingMedian(), StreamingMedian(), StreamingMedian()
    sums, left = GeneSums(*scan.sums.values.shape[:2]), np.zeros(len(conditions), np.int64)
    for first, found in zip(passes.results("scan"), passes.results(_LEFT), strict=True):
        sums.add_arrays(found)
        kept = found["codes"] >= 0
        codes, depth = found["codes"][kept], first["depth"][kept].astype(np.float32)
        left += np.bincount(codes, minlength=len(left))
        depths.add(group[codes], depth)
        genes.add(group[codes], first["detected"][kept].astype(np.float32))
        seen = look[codes] & (depth > 0)
        visible.add(np.zeros(int(seen.sum()), np.int64), depth[seen])
    cells = np.bincount(group, left, len(scan.quality)).astype(np.int64)
    quality = scan.quality.assign(
        cells_kept=cells, dropped_knockdown=scan.quality["cells_kept"] - cells,
        median_counts=depths.medians(len(cells)), median_genes=genes.medians(len(cells)),
    )  # fmt: skip
    return replace(scan, sums=sums, left=left, quality=quality, median_depth=float(visible.medians(1)[0]))
