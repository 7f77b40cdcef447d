"""From counts to a store: three streaming passes in memory that does not grow with the number of cells.

1. read every cell once: check values, filter cells, sum what gene selection needs (`scan`);
2. send the kept cells' values of the chosen genes to spill files (`spill.scatter`);
3. put each spill file in order and append it to its part of the store (`spill.gather`, `store_writer`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff import files, provenance
from perturbdiff.config import DataConfig
from perturbdiff.data import kernels, spill
from perturbdiff.data.counts import Inputs
from perturbdiff.data.genes import choose_genes, read_gene_list
from perturbdiff.data.labels import Labels, extra_column, extra_names, read_labels
from perturbdiff.data.scan import Scan, median_depth, quality_table, scan_cells
from perturbdiff.data.schema import FORMAT, LABELS, complete
from perturbdiff.data.store import value_factors
from perturbdiff.data.store_writer import PartWriter, rows_per_shard
from perturbdiff.errors import UserError
from perturbdiff.progress import track

logger = logging.getLogger(__name__)

BUCKET_VALUES = 24_000_000
"""Stored values of a bucket: about 100 MB, three times that while it is put in order."""

PART_CELLS = 2_000_000

_SCRATCH = ".scratch"


@dataclass(frozen=True)
class _Layout:
    """Everything that is decided before the second pass."""

    conditions: pd.DataFrame
    plan: spill.Plan
    genes: list[str]
    var: pd.DataFrame
    target_sum: float
    dtype: np.dtype


def preprocess(
    inputs: Sequence[Path],
    out: Path,
    config: DataConfig,
    *,
    split: Path | None = None,
    genes: Path | None = None,
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Turn counts into a store.

    Parameters
    ----------
    inputs
        One or more h5ad files or AnnData Zarr folders; genes are aligned by name.
    out
        Folder of the store.
    config
        Meaning of the columns, filters, target depth and gene selection.
    split
        Split file, needed when ``config.hvg_cells`` is ``train``: the target depth and the genes are then
        chosen from training cells alone.
    genes
        Text file of genes to keep, one per line, in this order, instead of selecting any.
    seed
        Of the order of cells within each condition.
    force
        Run even if an equal store is there.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If an input cannot be read, is not what ``config`` says, or the store cannot be written.
    """
    if config.hvg_cells == "train" and split is None and genes is None:
        raise UserError("data.hvg_cells=train needs a split: give --split, or set data.hvg_cells=all")
    if config.input_scale == "log1p" and config.min_counts:
        raise UserError("data.min_counts needs counts, but data.input_scale is log1p; set data.min_counts=0")
    roles = {f"input {k}": Path(path) for k, path in enumerate(inputs)}
    roles |= {name: path for name, path in (("split", split), ("genes", genes)) if path is not None}
    settings = {"data": config.model_dump(mode="json"), "format": FORMAT}
    with provenance.stage(
        "preprocess", out, config=settings, inputs=roles, seed=seed, folder=True, force=force
    ) as run:
        if not run.skip:
            run.results["store"] = _make(inputs, run.path, config, split, genes, seed)
    return out


def _make(
    inputs: Sequence[Path],
    folder: Path,
    config: DataConfig,
    split: Path | None,
    genes: Path | None,
    seed: int,
) -> dict[str, Any]:
    """Run the three passes; return the facts of the store for its manifest."""
    scratch = folder / _SCRATCH
    with Inputs(inputs, config, scratch) as opened:
        labels = read_labels(opened)
        for file in opened.files:
            file.prepare()
        look = _visible(labels.conditions, config, split)
        scan = scan_cells(opened, labels, look)
        quality_table(scan, labels.conditions).to_csv(folder / "qc.csv", index=False)
        layout = _lay_out(opened, labels, scan, look, genes)
        stored = spill.scatter(opened, scan, layout.plan, layout.genes, layout.dtype, seed, scratch)
        facts = _facts(layout, config, int(stored.sum()), seed)
        make_obs = _ObsMaker(opened, scan, layout.conditions, labels.perturbations)
        largest, parts = _write_parts(layout, facts, make_obs, stored, folder, scratch)
    files.remove(scratch)
    maximum = largest if config.input_scale == "log1p" else np.log1p(largest)
    layout.var.assign(max_log1p=maximum).to_parquet(folder / "genes.parquet")
    layout.conditions.to_parquet(folder / "conditions.parquet")
    left = labels.perturbations["perturbation"].isin(layout.conditions["perturbation"])
    labels.perturbations.loc[left].reset_index(drop=True).to_parquet(folder / "perturbations.parquet")
    return {**facts, "parts": parts}


def _visible(conditions: pd.DataFrame, config: DataConfig, split: Path | None) -> np.ndarray:
    """Return whether the choice of genes and of the target depth may look at each condition."""
    if config.hvg_cells == "all" or split is None:
        return np.ones(len(conditions), bool)
    from perturbdiff.data import splits

    return np.asarray(splits.parts(conditions, splits.read_split(split)) == "train")


def _lay_out(inputs: Inputs, labels: Labels, scan: Scan, look: np.ndarray, genes: Path | None) -> _Layout:
    """Choose the target depth and the genes, renumber the conditions that have cells left, plan the buckets."""
    config = inputs.config
    log = config.input_scale == "log1p"
    if config.target_sum != "median":
        target_sum = float(config.target_sum)
    else:
        target_sum = float("nan") if log else median_depth(scan, look)
    num = config.num_hvgs if genes is None else None
    scale = 1.0 if log else target_sum
    table = choose_genes(scan.sums, inputs.genes, scale, num, by_batch=config.hvg_by_batch)
    if genes is not None:
        chosen = read_gene_list(genes, inputs.genes)
    else:
        chosen = [g for g, kept in zip(inputs.genes, table["highly_variable"], strict=True) if kept]
    var = pd.DataFrame(table.loc[chosen]).drop(columns="highly_variable")
    left = np.bincount(scan.codes[scan.codes >= 0], minlength=len(labels.conditions))
    conditions = labels.conditions.assign(n_cells=left).loc[left > 0].reset_index(drop=True)
    number = np.where(left > 0, np.cumsum(left > 0) - 1, -1).astype(np.int32)
    kept = scan.codes >= 0
    scan.codes[kept] = number[scan.codes[kept]]
    positive = scan.sums.positive.sum(axis=0)
    density = positive[pd.Index(inputs.genes).get_indexer(pd.Index(chosen))].sum() / max(
        1, scan.sums.cells.sum()
    )
    plan = spill.plan_buckets(conditions, int(BUCKET_VALUES / max(1.0, density)), PART_CELLS)
    conditions = complete(conditions, config.control).assign(part=plan.part)
    small = scan.largest <= np.iinfo(np.uint16).max
    dtype = np.dtype(np.float32 if log else np.uint16 if small else np.uint32)
    return _Layout(conditions, plan, chosen, var, target_sum, dtype)


def _facts(layout: _Layout, config: DataConfig, num_values: int, seed: int) -> dict[str, Any]:
    """Return what the manifest says of the store."""
    recipe = {
        "flavor": config.hvg_flavor,
        "by_batch": config.hvg_by_batch,
        "cells": config.hvg_cells,
        "num": config.num_hvgs,
    }
    return {
        "format": FORMAT,
        "n_cells": int(layout.conditions["n_cells"].sum()),
        "n_genes": len(layout.genes),
        "n_values": num_values,
        "dtype": layout.dtype.name,
        "input_scale": config.input_scale,
        "target_sum": None if np.isnan(layout.target_sum) else layout.target_sum,
        "scale": config.scale,
        "control": config.control,
        "seed": seed,
        "hvg": recipe,
    }


def _write_parts(
    layout: _Layout,
    facts: dict[str, Any],
    make_obs: _ObsMaker,
    stored: np.ndarray,
    folder: Path,
    scratch: Path,
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Run the third pass; return each gene's largest normalised value and the names and sizes of the parts."""
    conditions, plan, num_cells = layout.conditions, layout.plan, facts["n_cells"]
    largest = np.zeros(len(layout.genes), np.float32)
    parts = []
    with track("writing cells", num_cells) as progress:
        for part in range(int(plan.part.max()) + 1):
            own = conditions[conditions["part"] == part]
            buckets = np.flatnonzero(plan.bucket_part == part)
            writer = PartWriter(
                folder / f"part-{part:04d}.zarr",
                num_cells=int(own["n_cells"].sum()),
                num_values=int(stored[buckets].sum()),
                num_genes=len(layout.genes),
                mean_values=facts["n_values"] / num_cells,
                rows_per_shard=rows_per_shard(num_cells),
                dtype=layout.dtype,
                index_dtype=spill.index_dtype(len(layout.genes)),
            )
            for path in (spill.spill_file(scratch, int(number)) for number in buckets):
                if path.exists():  # a share of a large condition may happen to be empty
                    bucket = spill.gather(path)
                    path.unlink()
                    obs = make_obs(bucket)
                    factors = value_factors(
                        obs["n_counts"].to_numpy(), layout.target_sum, facts["input_scale"]
                    )
                    kernels.column_maximum(bucket.indptr, bucket.indices, bucket.data, factors, largest)
                    writer.append(obs, bucket.indptr, bucket.indices, bucket.data)
                    progress.advance(len(obs))
            local = own.assign(start=own["start"] - own["start"].min(), stop=own["stop"] - own["start"].min())
            writer.close(layout.var, {"perturbdiff": {**_unstructured(facts), "conditions": local}})
            parts.append({"name": writer.path.name, "n_cells": writer.num_cells})
    return largest, parts


def _unstructured(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts a part carries in its uns, where nothing can be None."""
    names = ("format", "target_sum", "scale", "input_scale", "control", "seed")
    recipe = json.dumps(facts["hvg"], sort_keys=True)
    return {**{n: facts[n] for n in names if facts[n] is not None}, "hvg": recipe}


class _ObsMaker:
    """Makes the obs of a bucket, with the same categories in every part."""

    def __init__(
        self, inputs: Inputs, scan: Scan, conditions: pd.DataFrame, perturbations: pd.DataFrame
    ) -> None:
        self._inputs, self._scan = inputs, scan
        self._labels = {n: pd.Categorical(conditions[n]) for n in LABELS}
        self._dose: np.ndarray | None = None
        if not np.isnan(perturbations["dose"].to_numpy(np.float64)).all():
            dose = perturbations.set_index("perturbation")["dose"]
            self._dose = dose.loc[conditions["perturbation"]].to_numpy()
        self._extra = {name: extra_column(inputs, name) for name in extra_names(inputs.config)}

    def __call__(self, bucket: spill.Bucket) -> pd.DataFrame:
        """Return obs of the bucket's cells."""
        columns: dict[str, Any] = {n: labels[bucket.condition] for n, labels in self._labels.items()}
        if self._dose is not None:
            columns["dose"] = self._dose[bucket.condition]
        columns["n_counts"] = self._scan.depth[bucket.row]
        columns["n_genes"] = self._scan.detected[bucket.row]
        offsets = self._inputs.offsets
        source = np.searchsorted(offsets, bucket.row, "right") - 1
        names = [f.path.name for f in self._inputs.files]
        columns["source_row"] = bucket.row - offsets[source]
        columns["source_file"] = pd.Categorical(np.asarray(names, object)[source], sorted(set(names)))
        for name, values in self._extra.items():
            columns[name] = values.iloc[bucket.row].array
        return pd.DataFrame(columns, index=pd.Index(bucket.cell.astype(str), dtype=object))
