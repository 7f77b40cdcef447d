"""What a store holds, in tables: cells, genes, depth, sparsity and, with a split, the cells of each part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff import provenance
from perturbdiff.data.store import Store
from perturbdiff.progress import track

NUM_BINS = 50
"""Bins of the histograms."""

_QUANTILES = {"minimum": 0.0, "quartile_1": 0.25, "median": 0.5, "quartile_3": 0.75, "maximum": 1.0}


def write_statistics(store: Path, out: Path, *, split: Path | None = None, force: bool = False) -> Path:
    """Write a folder of tables that describe a store.

    ``summary.json`` and the tables ``conditions.csv``, ``perturbations.csv``, ``cell_types.csv``,
    ``batches.csv``, ``composition.csv`` (cell type by batch), ``genes.csv`` (log1p statistics),
    ``genes_per_cell.csv`` and ``depth.csv`` (histograms), and with a split ``split.csv``. The store is read
    once, block by block.

    Parameters
    ----------
    store
        Folder of the store.
    out
        Folder to write.
    split
        Split file of this store.
    force
        Run even if equal tables are there.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If ``store`` is not a finished store, or the split lacks one of its conditions.
    """
    inputs = {"store": Path(store)} | ({} if split is None else {"split": Path(split)})
    with provenance.stage("stats", out, config={}, inputs=inputs, folder=True, force=force) as run:
        if run.skip:
            return out
        opened = Store(store)
        conditions = opened.conditions.drop(columns=["start", "stop"])
        tables = _label_tables(opened, conditions)
        genes, per_cell = _expression_tables(opened)
        tables |= {
            "genes": genes,
            "genes_per_cell": _histogram(per_cell),
            "depth": _histogram(opened.n_counts),
        }
        summary = _summary(opened, per_cell)
        if split is not None:
            from perturbdiff.data import splits

            conditions["split"] = splits.parts(opened.conditions, splits.read_split(split))
            tables["split"] = _count(conditions, ["split"])
            summary["split"] = tables["split"].set_index("split").to_dict("index")
        tables["conditions"] = conditions
        for name, table in tables.items():
            table.to_csv(run.path / f"{name}.csv", index=False)
        (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        run.results["summary"] = summary
    return out


def _count(conditions: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return conditions, perturbations and cells (all, and controls) by ``keys``, and the share of cells."""
    grouped = conditions.assign(
        n_control_cells=conditions["n_cells"].where(conditions["is_control"], 0),
        treatment=conditions["perturbation"].where(~conditions["is_control"]),
    ).groupby(keys, sort=True)
    table = grouped.agg(
        n_conditions=("n_cells", "size"),
        n_perturbations=("treatment", "nunique"),
        n_cells=("n_cells", "sum"),
        n_control_cells=("n_control_cells", "sum"),
    ).reset_index()
    return table.assign(share=table["n_cells"] / max(1, table["n_cells"].sum()))


def _label_tables(store: Store, conditions: pd.DataFrame) -> dict[str, pd.DataFrame]:
    by_perturbation = (
        conditions.groupby("perturbation", sort=True)
        .agg(
            n_cells=("n_cells", "sum"),
            n_conditions=("n_cells", "size"),
            n_cell_types=("cell_type", "nunique"),
            n_batches=("batch", "nunique"),
            smallest_condition=("n_cells", "min"),
            is_control=("is_control", "first"),
        )
        .reset_index()
    )
    return {
        "perturbations": store.perturbations.merge(by_perturbation, on="perturbation"),
        "cell_types": _count(conditions, ["cell_type"]),
        "batches": _count(conditions, ["batch"]),
        "composition": _count(conditions, ["cell_type", "batch"]),
    }


def _expression_tables(store: Store) -> tuple[pd.DataFrame, np.ndarray]:
    """Return log1p statistics by gene and the number of expressed genes of each cell (int32 [N])."""
    total, squares = np.zeros(store.n_genes), np.zeros(store.n_genes)
    expressed = np.zeros(store.n_genes, np.int64)
    per_cell = np.zeros(store.n_cells, np.int32)
    with track("reading cells", store.n_cells) as progress:
        for start, block in store.blocks():
            rows = len(block.indptr) - 1
            values = block.data.astype(np.float64)
            total += np.bincount(block.indices, values, store.n_genes)
            squares += np.bincount(block.indices, values**2, store.n_genes)
            expressed += np.bincount(block.indices, minlength=store.n_genes)
            per_cell[start : start + rows] = np.diff(block.indptr)
            progress.advance(rows)
    mean = total / store.n_cells
    table = pd.DataFrame(
        {
            "gene": store.genes,
            "mean": mean,
            "variance": np.maximum(squares / store.n_cells - mean**2, 0),
            "maximum": store.max_value(),
            "share_of_cells": expressed / store.n_cells,
        }
    )
    return table, per_cell


def _histogram(values: np.ndarray) -> pd.DataFrame:
    """Return ``lower, upper, n_cells`` of equally wide bins over the range of ``values``."""
    counts, edges = np.histogram(values, NUM_BINS)
    return pd.DataFrame({"lower": edges[:-1], "upper": edges[1:], "n_cells": counts})


def _describe(values: np.ndarray) -> dict[str, float]:
    found = {name: float(np.quantile(values, q)) for name, q in _QUANTILES.items()}
    return {**found, "mean": float(values.mean(dtype=np.float64))}


def _summary(store: Store, per_cell: np.ndarray) -> dict[str, Any]:
    conditions = store.conditions
    treated = conditions[~conditions["is_control"]]
    return {
        "n_cells": store.n_cells,
        "n_control_cells": int(conditions.loc[conditions["is_control"], "n_cells"].sum()),
        "n_genes": store.n_genes,
        "n_conditions": len(conditions),
        "n_perturbations": len(set(treated["perturbation"])),
        "n_cell_types": len(set(conditions["cell_type"])),
        "n_batches": len(set(conditions["batch"])),
        "n_conditions_without_control": int((conditions["control"] < 0).sum()),
        "control": store.control,
        "input_scale": store.input_scale,
        "target_sum": None if np.isnan(store.target_sum) else store.target_sum,
        "sparsity": 1 - store.n_values / max(1, store.n_cells * store.n_genes),
        "depth": _describe(store.n_counts),
        "genes_per_cell": _describe(per_cell),
        "cells_per_condition": _describe(conditions["n_cells"].to_numpy(np.float64)),
    }
