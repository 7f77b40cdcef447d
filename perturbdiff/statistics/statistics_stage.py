"""What a store holds, in tables: cells, genes, depth, sparsity, distances and, with a split, the cells of each part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.genes.selection import read_gene_list
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.statistics import group_distances, paper_counts
from perturbdiff.statistics.expression_pass import (
    QUANTILES,
    ExpressionSums,
    describe_depth,
    describe_histogram,
    sum_expression,
)
from perturbdiff.statistics.pair_plan import MIN_CELLS
from perturbdiff.store.store import Store

NUM_BINS = 50
"""Most bins of a histogram."""

SMALL_STORE = 100_000
"""Stores of fewer cells are described in this process, whatever the number of jobs."""

PAIRS = 300
CELLS_PER_GROUP = 256


def write_statistics(
    store: Path,
    out: Path,
    *,
    split: Path | None = None,
    genes: Path | None = None,
    published: str | None = None,
    pairs: int = PAIRS,
    cells_per_group: int = CELLS_PER_GROUP,
    seed: int = 0,
    jobs: int | None = 1,
    scheduler: str | None = None,
    draw: Callable[[Path], object] | None = None,
    force: bool = False,
) -> Path:
    """Write a folder of tables that describe a store, as the paper's App. "Data Statistics Analysis" does.

    See docs/statistics.md for the tables. The store is read once, in coarse tasks, and a sample of its cells once
    more. Memory does not grow with the number of cells.

    Parameters
    ----------
    store
        Folder of the store.
    out
        Folder to write.
    split
        Split file of this store.
    genes
        Text file of gene names, or a vocabulary: the number of non-zero genes is given for these too.
    published
        Name of a registered data set of the paper, whose numbers are set beside those of the store (and, with
        ``genes``, the number of genes of that list).
    pairs
        Most pairs of groups whose distance is measured, of each kind and level; 0: none.
    cells_per_group
        Most cells of a group in a distance.
    seed
        Of the choice of pairs and cells and of the bootstrap.
    jobs, scheduler
        Where the tasks run, see `perturbdiff.runtime.task_runner.TaskRunner`; no number depends on it.
    draw
        Called with the folder of finished tables, to add figures to it.
    force
        Run even if equal tables are there.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If ``store`` is not a finished store, the split lacks one of its conditions, the gene list has none of its
        genes, the paper counts nothing in the data set, or a setting is out of range.
    """
    if pairs < 0 or cells_per_group < MIN_CELLS:
        raise UserError(
            f"pairs must be 0 or more and cells per group {MIN_CELLS} or more, "
            f"not {pairs} and {cells_per_group}"
        )
    roles = {"store": store, "split": split, "genes": genes}
    inputs = {role: Path(path) for role, path in roles.items() if path is not None}
    config: dict[str, Any] = {"pairs": pairs, "cells_per_group": cells_per_group}
    paper = None if published is None else paper_counts.counted(published)
    config |= {} if published is None else {"published": published}
    with provenance.stage(
        "stats", out, config=config, inputs=inputs, seed=seed, folder=True, force=force
    ) as run:
        if run.skip:
            return out
        opened = Store(store)
        parts = None if split is None else _parts(opened, split)
        listed = None if genes is None else np.isin(opened.genes, read_gene_list(Path(genes), opened.genes))
        tables = _label_tables(opened, parts)
        if paper is not None:
            numbers = paper_counts.count(opened.conditions, parts)
            numbers |= {} if listed is None else {"shared_genes": int(listed.sum())}
            tables["paper_counts"] = paper_counts.beside(numbers, paper)
        # Starting workers takes longer than describing a small store.
        with TaskRunner(1 if opened.n_cells < SMALL_STORE else jobs, scheduler) as runner:
            measured, summary = _expression_tables(opened, runner, listed)
            compared, summary["distances"] = _distance_tables(
                opened, runner, tables["cell_types"], pairs, cells_per_group, seed
            )
        if "split" in tables:
            summary["split"] = tables["split"].set_index("split").to_dict("index")
        _write(run.path, tables | measured | compared, summary)
        if draw is not None:
            draw(run.path)
        run.results["summary"] = summary
    return out


def _parts(store: Store, split: Path) -> np.ndarray:
    from perturbdiff.splits import splits

    return splits.parts(store.conditions, splits.read_split(split), store.path)


def _write(folder: Path, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> None:
    for name, table in tables.items():
        # Eight digits do not show what a sum in another order would change.
        precision = "%.8g" if name.startswith("distance") else None
        tabular.write_csv(table, folder / f"{name}.csv", float_format=precision)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


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


def _label_tables(store: Store, parts: np.ndarray | None) -> dict[str, pd.DataFrame]:
    """Return the tables that need the conditions alone; ``parts`` says in which part of a split each one is."""
    conditions = store.conditions.drop(columns=["start", "stop"])
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
    treated = conditions[~conditions["is_control"]]
    per_perturbation = np.asarray(treated.groupby("perturbation")["n_cells"].sum(), np.int64)
    per_condition = np.asarray(treated["n_cells"], np.int64)
    tables = {
        "cells_per_perturbation": _sizes(per_perturbation).rename(columns={"n": "n_perturbations"}),
        "cells_per_condition": _sizes(per_condition).rename(columns={"n": "n_conditions"}),
        "perturbations": store.perturbations.merge(by_perturbation, on="perturbation"),
        "cell_types": _count(conditions, ["cell_type"]),
        "batches": _count(conditions, ["batch"]),
        "composition": _count(conditions, ["cell_type", "batch"]),
    }
    if parts is not None:
        conditions["split"] = parts
        tables["split"] = _count(conditions, ["split"])
    return tables | {"conditions": conditions}


def _distance_tables(
    store: Store, runner: TaskRunner, cell_types: pd.DataFrame, pairs: int, cells: int, seed: int
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Return the tables of distances between groups of cells, and what the summary says of them."""
    distances, groups = group_distances.distances(store, runner, pairs=pairs, cells=cells, seed=seed)
    summary = group_distances.summarise(distances, seed=seed)
    facts = group_distances.facts(summary, groups, cell_types, seed=seed, pairs=pairs, cells=cells)
    return {"distances": distances, "distance_summary": summary}, facts


def _sizes(sizes: np.ndarray) -> pd.DataFrame:
    """Return ``lower, upper, n``: how many groups have lower <= cells < upper, in bins of equal logarithmic width."""
    if not len(sizes):
        return pd.DataFrame({"lower": [], "upper": [], "n": []}, dtype=np.int64)
    bins = int(np.clip(2 * np.sqrt(len(sizes)), 5, 30))
    edges = np.unique(np.rint(np.geomspace(max(1, sizes.min()), sizes.max() + 1, bins + 1)).astype(np.int64))
    edges = np.unique(np.append(edges, sizes.max() + 1))
    counts = np.histogram(sizes, edges)[0]
    return pd.DataFrame({"lower": edges[:-1], "upper": edges[1:], "n": counts})


def _expression_tables(
    store: Store, runner: TaskRunner, listed: np.ndarray | None
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Return the tables that need the cells' values, and the summary of the store."""
    cell_types = sorted(set(store.conditions["cell_type"]))
    sums = sum_expression(store, runner, cell_types, listed)
    depth, bins, edges = describe_depth(store, runner, sums, NUM_BINS)
    per_cell = _total(sums.genes, store.n_genes)
    tables = {
        "genes": _gene_table(store, sums),
        "genes_per_cell": _integer_histogram(per_cell),
        "depth": pd.DataFrame({"lower": edges[:-1], "upper": edges[1:], "n_cells": bins}),
        "nonzero_by_cell_type": _nonzero("store", sums.genes, cell_types, store.n_genes),
    }
    summary = _summary(store, depth, describe_histogram(per_cell))
    if listed is not None:
        of_list = _total(sums.listed, store.n_genes)
        size = int(listed.sum())
        tables["genes_per_cell_list"] = _integer_histogram(of_list)
        rows_of_list = _nonzero("list", sums.listed, cell_types, size)
        tables["nonzero_by_cell_type"] = pd.concat(
            [tables["nonzero_by_cell_type"], rows_of_list], ignore_index=True
        )
        summary |= {"n_genes_of_list": size, "genes_of_list_per_cell": describe_histogram(of_list)}
    return tables, summary


def _total(by_type: Mapping[int, np.ndarray], num_genes: int) -> np.ndarray:
    return np.sum([np.zeros(num_genes + 1, np.int64), *by_type.values()], axis=0)


def _gene_table(store: Store, sums: ExpressionSums) -> pd.DataFrame:
    mean = sums.total / store.n_cells
    return pd.DataFrame(
        {
            "gene": store.genes,
            "mean": mean,
            "variance": np.maximum(sums.squares / store.n_cells - mean**2, 0),
            "maximum": store.max_value(),
            "share_of_cells": sums.expressed / store.n_cells,
        }
    )


def _nonzero(
    gene_set: str, by_type: Mapping[int, np.ndarray], cell_types: list[str], num_genes: int
) -> pd.DataFrame:
    """Return, by cell type and over all cells, how many of ``num_genes`` genes a cell expresses."""
    rows = []
    for name, counts in [
        ("all", sum(by_type.values())),
        *((cell_types[c], by_type[c]) for c in sorted(by_type)),
    ]:
        described = describe_histogram(np.asarray(counts))
        share = described["mean"] / max(1, num_genes)
        scope = "all cells" if not rows else "cell type"
        rows.append((gene_set, scope, name, num_genes, int(np.sum(counts)), *described.values(), share))
    names = ["gene_set", "scope", "cell_type", "n_genes", "n_cells", *QUANTILES, "mean", "share_nonzero"]
    return pd.DataFrame(rows, columns=pd.Index(names))


def _integer_histogram(counts: np.ndarray) -> pd.DataFrame:
    """Return ``lower, upper, n_cells``: how many cells have lower <= genes < upper, in bins of equal width."""
    present = np.flatnonzero(counts)
    low, high = int(present[0]), int(present[-1])
    width = -(-(high + 1 - low) // NUM_BINS)
    edges = np.arange(low, high + width + 1, width)
    padded = np.zeros(edges[-1] - low, np.int64)
    padded[: high + 1 - low] = counts[low : high + 1]
    return pd.DataFrame(
        {"lower": edges[:-1], "upper": edges[1:], "n_cells": padded.reshape(-1, width).sum(axis=1)}
    )


def _summary(store: Store, depth: dict[str, float], genes_per_cell: dict[str, float]) -> dict[str, Any]:
    conditions = store.conditions
    treated = conditions[~conditions["is_control"]]
    summary = {
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
        "depth": depth,
        "genes_per_cell": genes_per_cell,
        "cells_per_condition": _describe(conditions["n_cells"]),
    }
    if len(treated):
        summary["cells_per_perturbation"] = _describe(treated.groupby("perturbation")["n_cells"].sum())
        summary["cells_per_perturbed_condition"] = _describe(treated["n_cells"])
    return summary


def _describe(sizes: Any) -> dict[str, float]:
    values = np.asarray(sizes, np.float64)
    quantiles = {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}
    return {**quantiles, "mean": float(values.mean())}
