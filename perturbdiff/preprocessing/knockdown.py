"""The on-target knock-down filter for CRISPRi screens: is the perturbed gene expressed less, as it should be?

The rule of cell-load, which prepares STATE's data (`filter_on_target_knockdown`):

1. a perturbation stays if the mean expression of its target gene is below ``knockdown_residual`` (0.30) of the
   mean in control cells;
2. of these, the cells stay whose own expression of it is below ``knockdown_cell_residual`` (0.50) of that mean;
3. of these, the perturbations stay that have ``knockdown_min_cells`` (30) cells left.

Control cells always stay. A perturbation cannot be judged, and is dropped as in cell-load, if its target is not among
the measured genes or if control cells do not express it (mean within 1e-8 of 0). This includes a combination ``A+B``,
unless `knockdown_gene_key` names one target for it. The means are over all cells of all batches, as in cell-load;
``knockdown_by: cell_type`` judges each cell type by its own controls, as filtering a file per cell type does.

cell-load compares what X holds, and its command line filters before it normalises. Here the values are counts per
10,000 over all genes, without logarithm (of log1p input, expm1), so that a deep cell is not taken for an unperturbed
one. ``knockdown_values: stored`` compares the stored values, as cell-load does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_sums import (
    GeneSums,
    add_target_sums,
    gene_groups,
    group_of_cells,
    values_of_own_gene,
)
from perturbdiff.genes.selection import sums_stored_values
from perturbdiff.io.cell_labels import Labels
from perturbdiff.io.columns import Texts, row_ranges
from perturbdiff.io.counts import Inputs
from perturbdiff.preprocessing.gene_passes import SumsRequest, gene_sums
from perturbdiff.preprocessing.passes import DROPPED, Passes, PieceReader
from perturbdiff.preprocessing.scan import Scan, StreamingMedian
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_JUDGED, _FILTERED = "knockdown", "knocked-down"  # names of the two passes
_NONE = -1
_PER = 1e4
_NOT_EXPRESSED = 1e-8


@dataclass(frozen=True)
class KnockdownRequest:
    """What the pass needs to know; per condition unless said otherwise.

    Attributes
    ----------
    row
        Row of the table of perturbations, int32, -1 for controls.
    gene
        Target among the joined genes, int32, -1 for none.
    control_group
        For controls their group, int32, -1 for all others.
    place
        For each joined gene its place among the targets, int32, -1 for no target.
    num_rows, num_groups, num_targets
        Sizes.
    stored, log
        Take values as they are stored; the stored values are log1p.
    """

    row: np.ndarray
    gene: np.ndarray
    control_group: np.ndarray
    place: np.ndarray
    num_rows: int
    num_groups: int
    num_targets: int
    stored: bool
    log: bool


@dataclass(frozen=True)
class KnockdownPlan:
    """The perturbations to judge.

    Attributes
    ----------
    table
        One row per perturbation (and cell type, if judged by it): ``perturbation, cell_type, target_gene`` (""
        for none) and ``group``.
    request
        For `knockdown_values`.
    """

    table: pd.DataFrame
    request: KnockdownRequest


def read_targets(inputs: Inputs, conditions: pd.DataFrame, codes: np.ndarray) -> dict[str, str]:
    """Return the target gene of each perturbation that obs column ``knockdown_gene_key`` gives one.

    Parameters
    ----------
    inputs
        The opened files.
    conditions, codes
        Of all cells.

    Raises
    ------
    UserError
        If the column is missing or gives a perturbation several targets.
    """
    key, control = str(inputs.config.knockdown_gene_key), inputs.config.control
    labels, genes = pd.Categorical(conditions["perturbation"]), Texts()
    targets: dict[str, str] = {}
    for file, offset in zip(inputs.files, inputs.offsets.tolist(), strict=False):
        column = file.open_column(key, "data.knockdown_gene_key")
        for start, stop in row_ranges(file.n_cells):
            gene = column.codes(start, stop, genes)
            part = codes[offset + start : offset + stop]
            known = (part >= 0) & (gene >= 0)
            pairs = np.stack([labels.codes[part[known]], gene[known]])
            for label, number in np.unique(pairs, axis=1).T.tolist():
                name, target = str(labels.categories[label]), genes.names[number]
                if name != control and targets.setdefault(name, target) != target:
                    raise UserError(
                        f"{file.path}: obs column '{key}' (data.knockdown_gene_key) gives perturbation '{name}' two "
                        f"targets, '{targets[name]}' and '{target}'; each perturbation needs one"
                    )
    return targets


def plan_knockdown(
    conditions: pd.DataFrame,
    genes: Sequence[str],
    config: DataConfig,
    targets: Mapping[str, str] | None = None,
) -> KnockdownPlan:
    """Find the target gene of every perturbation, before any value is read.

    Parameters
    ----------
    conditions
        Columns ``cell_type, perturbation``.
    genes
        Names of the joined genes.
    config
        Thresholds and the control label.
    targets
        Target gene by perturbation; without them the label is the gene.

    Raises
    ------
    UserError
        If none of the targets is a measured gene.
    """
    label = conditions["perturbation"].astype(str)
    group_name = conditions["cell_type"].astype(str) if config.knockdown_by == "cell_type" else "all"
    frame = pd.DataFrame({"perturbation": label, "cell_type": group_name})
    groups = pd.Categorical(frame["cell_type"])
    control = (label == config.control).to_numpy()
    table = frame.loc[~control].drop_duplicates().sort_values(["perturbation", "cell_type"])
    table = table.reset_index(drop=True)
    row = pd.MultiIndex.from_frame(table).get_indexer(pd.MultiIndex.from_frame(frame))
    named = table["perturbation"] if targets is None else table["perturbation"].map(targets).fillna("")
    table["target_gene"] = named.astype(str)
    place_of_gene = pd.Index(genes).get_indexer(pd.Index(table["target_gene"])).astype(np.int32)
    table["group"] = pd.Categorical(table["cell_type"], groups.categories).codes.astype(np.int32)
    _check_targets(table, place_of_gene, genes, config)
    used = np.unique(place_of_gene[place_of_gene >= 0])
    place = np.full(len(genes), _NONE, np.int32)
    place[used] = np.arange(len(used))
    request = KnockdownRequest(
        row=row.astype(np.int32),
        gene=np.where(row >= 0, np.append(place_of_gene, _NONE)[row], _NONE).astype(np.int32),
        control_group=np.where(control, groups.codes, _NONE).astype(np.int32),
        place=place,
        num_rows=len(table),
        num_groups=len(groups.categories),
        num_targets=len(used),
        stored=config.knockdown_values == "stored",
        log=config.unit == "log1p",
    )
    return KnockdownPlan(table, request)


def _check_targets(table: pd.DataFrame, gene: np.ndarray, genes: Sequence[str], config: DataConfig) -> None:
    """Refuse target names if none of them is a gene; warn of those that are not."""
    wanted = table["target_gene"]
    if not (gene >= 0).any():
        named = sorted(set(wanted[wanted != ""])) or sorted(set(table["perturbation"]))
        raise UserError(
            f"data.knockdown: none of the {len(named)} target genes ({listing(named, 3)}) is among the {len(genes)} "
            f"genes ({listing(list(genes[:3]))}); use the same names: data.gene_key (symbols or ids), "
            f"data.knockdown_gene_key (now {config.knockdown_gene_key or 'none: the label is the gene'})"
        )
    unknown = sorted(set(table.loc[gene < 0, "perturbation"]))
    if unknown:
        logger.warning(
            "data.knockdown drops %d perturbations whose target gene is not measured (%s)",
            len(unknown), listing(unknown, 4),
        )  # fmt: skip


def knockdown_values(reader: PieceReader, request: KnockdownRequest) -> dict[str, np.ndarray]:
    """Return what the filter needs of a piece: a pass over the cells that earlier filters left.

    Returns
    -------
    dict
        Of each cell: ``row`` (of the table, int32, -1 for controls and dropped cells) and ``value``, its
        expression of its target gene, float32. By row ``totals`` and ``cells``; ``control_totals`` [groups,
        targets] and ``control_cells`` [groups].
    """
    row = group_of_cells(reader.codes, request.row)
    gene = group_of_cells(reader.codes, request.gene)
    group = group_of_cells(reader.codes, request.control_group)
    factor, value = _factors(reader, request), np.zeros(reader.num_cells, np.float32)
    control_totals = np.zeros((request.num_groups, request.num_targets))
    for block in reader.blocks():
        rows = slice(block.start - reader.piece.start, block.stop - reader.piece.start)
        if request.log and not request.stored:
            block = replace(block, data=np.expm1(block.data, dtype=np.float64))
        cells = (block.indptr, block.indices, block.data, reader.columns, factor[rows])
        add_target_sums(*cells, group[rows], request.place, control_totals)
        values_of_own_gene(*cells, gene[rows], value[rows])
    perturbed = row >= 0
    return {
        "row": row,
        "value": value,
        "totals": np.bincount(row[perturbed], value[perturbed].astype(np.float64), request.num_rows),
        "cells": np.bincount(row[perturbed], minlength=request.num_rows),
        "control_totals": control_totals,
        "control_cells": np.bincount(group[group >= 0], minlength=request.num_groups),
    }


def _factors(reader: PieceReader, request: KnockdownRequest) -> np.ndarray:
    """Return what each cell's stored values are multiplied by."""
    if request.stored or request.log:
        return np.ones(reader.num_cells)
    depth = np.asarray(reader.saved("scan")["depth"], np.float64)
    return _PER / np.where(depth > 0, depth, 1.0)


def decide(
    plan: KnockdownPlan,
    results: Callable[[], Iterable[Mapping[str, np.ndarray]]],
    config: DataConfig,
) -> tuple[pd.DataFrame, np.ndarray]:
    """Judge every perturbation.

    Parameters
    ----------
    plan
        As `plan_knockdown` made it.
    results
        Gives what `knockdown_values` saved, piece by piece and in order; called twice.
    config
        Thresholds.

    Returns
    -------
    tuple
        The table with one row per perturbation (and cell type, if judged by it): ``perturbation, cell_type`` ("all"
        if judged over all), ``target_gene, n_cells, control_mean, perturbed_mean`` (counts per 10,000 unless
        ``knockdown_values`` is ``stored``), ``residual`` (their ratio), ``n_passing`` (cells below the threshold of
        cells), ``kept`` (bool) and ``reason`` (why not). And for `stays` the mean of the controls that each row's
        cells are compared with, float64; nan for rows that are dropped.

    Raises
    ------
    UserError
        If no perturbation passes.
    """
    request = plan.request
    totals, cells = np.zeros(request.num_rows), np.zeros(request.num_rows, np.int64)
    control_totals = np.zeros((request.num_groups, request.num_targets))
    control_cells = np.zeros(request.num_groups, np.int64)
    for piece in results():
        totals += piece["totals"]
        cells += piece["cells"]
        control_totals += piece["control_totals"]
        control_cells += piece["control_cells"]
    table = plan.table.assign(n_cells=cells)
    gene = np.full(request.num_rows, _NONE)
    gene[request.row[request.row >= 0]] = request.gene[request.row >= 0]
    target = np.where(gene >= 0, request.place[gene], _NONE)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = control_totals / control_cells[:, None]
        control = np.where(target >= 0, means[table["group"], np.maximum(target, 0)], np.nan)
        perturbed = np.where(target >= 0, totals / cells, np.nan)
        residual = np.where(control > _NOT_EXPRESSED, perturbed / control, np.nan)
    limit = np.where(residual < config.knockdown_residual, control, np.nan)
    passing = np.zeros(request.num_rows, np.int64)
    for piece in results():
        row = piece["row"]
        below = _passes(piece, control, config.knockdown_cell_residual)
        passing += np.bincount(row[below & (row >= 0)], minlength=request.num_rows)
    kept = ~np.isnan(limit) & (passing >= config.knockdown_min_cells)
    table = table.assign(
        control_mean=control, perturbed_mean=perturbed, residual=residual, n_passing=passing, kept=kept
    )
    records = table.assign(measured=target >= 0).to_dict("records")
    table["reason"] = [_reason(record, control_cells, config) for record in records]
    _report(table, config)
    return table.drop(columns="group"), np.where(kept, limit, np.nan)


def stays(piece: Mapping[str, np.ndarray], limit: np.ndarray, cell_residual: float) -> np.ndarray:
    """Return which cells of a piece stay, bool.

    Parameters
    ----------
    piece
        What `knockdown_values` saved of it.
    limit
        As `decide` returns it.
    cell_residual
        Share of ``limit`` below which a cell's expression must be.
    """
    return (piece["row"] == _NONE) | _passes(piece, limit, cell_residual)


def _passes(piece: Mapping[str, np.ndarray], control: np.ndarray, residual: float) -> np.ndarray:
    """Return whether each cell's value is below the share of its controls' mean; never for a mean of nan or 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return piece["value"] / control[np.maximum(piece["row"], 0)] < residual


def _reason(row: Mapping[Any, Any], control_cells: np.ndarray, config: DataConfig) -> str:
    """Return why a perturbation is dropped, "" for one that is kept."""
    if row["kept"]:
        return ""
    if not row["target_gene"]:
        return "no target gene is given"
    if row["n_cells"] == 0:
        return "no cell passes the other filters"
    if not row["measured"]:
        return "target gene is not measured"
    if control_cells[row["group"]] == 0:
        return "no control cells to compare with"
    if np.isnan(row["residual"]):
        return "control cells do not express the target gene"
    if row["residual"] >= config.knockdown_residual:
        return f"residual expression is not below {config.knockdown_residual:g}"
    return f"fewer than {config.knockdown_min_cells} cells are below {config.knockdown_cell_residual:g}"


def _report(table: pd.DataFrame, config: DataConfig) -> None:
    """Log what is kept; refuse an outcome without perturbations."""
    if not table["kept"].to_numpy().any():
        reasons = table["reason"].value_counts()
        smallest = float(table["residual"].fillna(np.inf).to_numpy().min())
        least = f"; smallest residual {smallest:.3g}" if np.isfinite(smallest) else ""
        raise UserError(
            f"data.knockdown: none of the {len(table)} perturbations passes (most often: {reasons.index[0]}, "
            f"{int(reasons.iloc[0])} times{least}); is this a knock-down "
            "screen? Set data.knockdown=false, or other thresholds (data.knockdown_residual, "
            "data.knockdown_min_cells)"
        )
    kept = table[table["kept"]]
    logger.info(
        "knock-down: %d of %d perturbations and %d of %d perturbed cells are kept (by %s)",
        len(kept), len(table), kept["n_passing"].sum(), table["n_cells"].sum(), config.knockdown_by,
    )  # fmt: skip


@dataclass(frozen=True)
class _Filter:
    """What `decide` found, and the sums to make of the cells that stay; it is sent to workers."""

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
    """Drop what is not knocked down, in two further passes; later passes leave these cells out.

    Parameters
    ----------
    passes
        Over the inputs, after the scan.
    conditions
        ``cell_type, batch, perturbation``.
    look
        Whether gene selection may look at each condition, bool.
    scan
        The result of the first pass.
    targets
        As `target_genes` returns them.

    Returns
    -------
    tuple[Scan, pd.DataFrame]
        The scan of the cells that are left, its quality table with a column ``dropped_knockdown``, and the table
        of perturbations, see `decide`.

    Raises
    ------
    UserError
        If no target is a measured gene, or no perturbation passes.
    """
    config = passes.inputs.config
    plan = plan_knockdown(conditions, passes.inputs.genes, config, targets)
    passes.run(_JUDGED, knockdown_values, plan.request, label="reading target genes")
    table, limit = decide(plan, lambda: passes.results(_JUDGED), config)
    group, num_groups = gene_groups(conditions, look, by_batch=config.hvg_by_batch)
    sums = SumsRequest(group, num_groups, sums_stored_values(config), config.unit == "log1p")
    request = _Filter(limit, config.knockdown_cell_residual, sums)
    passes.run(_FILTERED, left_cells, request, label="summing cells left")
    passes.filtered = _FILTERED
    return _rescan(passes, conditions, look, scan), table


def left_cells(reader: PieceReader, request: _Filter) -> dict[str, np.ndarray]:
    """Return a piece's ``codes`` after the filter and the gene sums of the cells that are left."""
    stay = stays(reader.saved(_JUDGED), request.limit, request.cell_residual)
    reader.codes = np.where(stay, reader.codes, DROPPED).astype(np.int32)
    return {"codes": reader.codes, **gene_sums(reader, request.sums)}


def _rescan(passes: Passes, conditions: pd.DataFrame, look: np.ndarray, scan: Scan) -> Scan:
    """Return the scan with the sums, numbers and medians of the cells that are left."""
    group = conditions.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    depths, genes, visible = StreamingMedian(), StreamingMedian(), StreamingMedian()
    sums, left = GeneSums(*scan.sums.values.shape[:2]), np.zeros(len(conditions), np.int64)
    for scanned, filtered in zip(passes.results("scan"), passes.results(_FILTERED), strict=True):
        sums.add_arrays(filtered)
        kept = filtered["codes"] >= 0
        codes, depth = filtered["codes"][kept], scanned["depth"][kept].astype(np.float32)
        left += np.bincount(codes, minlength=len(left))
        depths.add(group[codes], depth)
        genes.add(group[codes], scanned["detected"][kept].astype(np.float32))
        selecting = look[codes] & (depth > 0)
        visible.add(np.zeros(int(selecting.sum()), np.int64), depth[selecting])
    cells = np.bincount(group, left, len(scan.quality)).astype(np.int64)
    quality = scan.quality.assign(
        cells_kept=cells, dropped_knockdown=scan.quality["cells_kept"] - cells,
        median_counts=depths.medians(len(cells)), median_genes=genes.medians(len(cells)),
    )  # fmt: skip
    return replace(scan, sums=sums, left=left, quality=quality, median_depth=float(visible.medians(1)[0]))
