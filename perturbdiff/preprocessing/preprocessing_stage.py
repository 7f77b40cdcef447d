"""From counts to a store, in streaming passes whose memory does not grow with the number of cells.

1. Read every cell once, check its values, filter cells and compute the sums for gene selection (`scan`). Some flavors
   of gene selection and the knock-down filter need a further pass (`perturbdiff.genes.selection`, `knockdown`).
2. Write the kept cells' values of the chosen genes to spill files (`reordering.scatter`).
3. Sort the cells of each partition and write it (`reordering.gather`, `store_writer`).

Each pass is a set of coarse tasks, whose results stay in a scratch folder until the store is finished.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import SET, complete
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_lists import short_paths
from perturbdiff.genes.gene_sums import gene_groups
from perturbdiff.genes.selection import (
    check_flavor,
    choose_genes,
    read_gene_list,
    sums_stored_values,
)
from perturbdiff.io.cell_labels import extra_column, extra_names, read_labels
from perturbdiff.io.counts import Inputs
from perturbdiff.io.token_parquet import tables_beside
from perturbdiff.preprocessing import passes, reordering
from perturbdiff.preprocessing.gene_passes import second_pass
from perturbdiff.preprocessing.knockdown import apply_knockdown, target_genes
from perturbdiff.preprocessing.passes import Passes, save
from perturbdiff.preprocessing.reordering import ObsColumns, Part, PartTask, gather, label_columns
from perturbdiff.preprocessing.scan import Scan, scan_cells
from perturbdiff.runtime import files, provenance, tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.store import checksums
from perturbdiff.store.store_head import FORMAT

logger = logging.getLogger(__name__)

_SCRATCH, _DONE_WITH = ".scratch", ".scratch.old"
_PARTS = 16
CELLS_PER_PART = (524_288, 2_097_152)
"""Minimum and maximum cells of a full partition. A large store has about 16 or more, which are written in parallel."""

BUCKET_VALUES = 16_000_000
"""Number of stored values in memory while cells are sorted: 64 MB of counts, or twice that during reordering."""

PIECES_PER_WORKER = 4
"""Fewest pieces for which it is worth to start a worker, whose imports take as long as one piece."""

_BYTES_PER_PROCESS = 300 << 20
_BYTES_PER_VALUE = 12
_FEWEST_VALUES = 1_000_000


@dataclass(frozen=True)
class Machine:
    """The processes and memory to use. They do not change the result.

    Attributes
    ----------
    jobs
        Number of worker processes, at most one per piece of the inputs. None: one per CPU, or fewer for small inputs.
    scheduler
        Address of a running dask scheduler to use instead.
    memory_limit
        Limit in bytes for all processes together. None: about 0.5 GiB each.
    unfinished
        Folder for the unfinished store, where a further run finds it. None: next to the output.
    """

    jobs: int | None = None
    scheduler: str | None = None
    memory_limit: int | None = None
    unfinished: Path | None = None

    def crew(self, inputs: Inputs) -> TaskRunner:
        """Return the task runner for these inputs. By default it starts only as many workers as save time."""
        values = sum(file.matrix.num_values for file in inputs.files)
        if self.jobs is None:
            pays = values // (PIECES_PER_WORKER * passes.VALUES_PER_PIECE)
            return TaskRunner(max(1, min(len(os.sched_getaffinity(0)), pays)), self.scheduler)
        return TaskRunner(max(1, min(self.jobs, -(-values // passes.VALUES_PER_PIECE))), self.scheduler)

    def bucket_values(self, jobs: int) -> int:
        """Return the number of stored values that a process may hold while cells are sorted.

        Raises
        ------
        UserError
            If the memory is not enough for this number of processes.
        """
        if self.memory_limit is None:
            return BUCKET_VALUES
        processes = jobs + (jobs > 1)
        values = (self.memory_limit - processes * _BYTES_PER_PROCESS) // jobs // _BYTES_PER_VALUE
        if values < _FEWEST_VALUES:
            least = processes * _BYTES_PER_PROCESS + jobs * _FEWEST_VALUES * _BYTES_PER_VALUE
            raise UserError(
                f"--memory-limit {self.memory_limit / 2**20:.0f} MiB is too little for {jobs} jobs, which need "
                f"{least / 2**20:.0f} MiB; give more memory or fewer --jobs"
            )
        return min(values, BUCKET_VALUES)


@dataclass(frozen=True)
class _Layout:
    """All decisions that are made before cells are sorted."""

    conditions: pd.DataFrame
    genes: list[str]
    var: pd.DataFrame
    target_sum: float
    dtype: np.dtype
    scatter: reordering.ScatterSettings


def preprocess(
    inputs: Sequence[Path],
    out: Path,
    config: DataConfig,
    *,
    split: Path | None = None,
    genes: Path | None = None,
    obs: Sequence[Path] = (),
    seed: int = 0,
    force: bool = False,
    machine: Machine | None = None,
) -> Path:
    """Turn counts into a store.

    An interrupted run continues where it stopped if it is started again with the same arguments. The result has the
    same bytes.

    Parameters
    ----------
    inputs
        One or more h5ad files, Zarr folders, 10x h5 files or Parquet files of cells. Genes are aligned by name.
    out
        Folder of the store.
    config
        Meaning of the columns, filters, target depth and gene selection.
    split
        Split file, needed if ``config.hvg_cells`` is ``train``. The target depth and the genes are then chosen from
        training cells only.
    genes
        Text file of genes to keep, one per line, in this order. No genes are then selected.
    obs
        Tables of cell labels by cell name: one for all inputs, or one for each.
    seed
        Seed of the order of cells within each condition.
    force
        Run even if an equal store exists.
    machine
        Processes and memory to use. The store does not depend on it.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If an input cannot be read or differs from ``config``, or if the store cannot be written.
    """
    check_flavor(config)
    if config.hvg_cells == "train" and split is None and genes is None:
        raise UserError("data.hvg_cells=train needs a split: give --split, or set data.hvg_cells=all")
    if config.unit == "log1p" and config.min_counts:
        raise UserError(
            f"data.min_counts needs counts, but data.input_scale is {config.input_scale}; set data.min_counts=0"
        )
    roles = {f"input {k}": Path(path) for k, path in enumerate(inputs)}
    roles |= {
        f"table {k}": path for k, path in enumerate(dict.fromkeys(chain(*map(tables_beside, roles.values()))))
    }
    roles |= {f"obs {k}": Path(path) for k, path in enumerate(obs)}
    roles |= {name: path for name, path in (("split", split), ("genes", genes)) if path is not None}
    roles |= config.files
    settings = {"data": config.recorded(), "format": FORMAT}
    where = machine or Machine()
    before = {path: files.signature(path) for path in roles.values() if path.exists()}
    with provenance.stage(
        "preprocess",
        out,
        config=settings,
        inputs=roles,
        seed=seed,
        folder=True,
        force=force,
        keep=True,
        unfinished=where.unfinished,
    ) as run:
        if not run.skip:
            scratch, done_with = run.path / _SCRATCH, run.path / _DONE_WITH
            files.remove(done_with)
            with Inputs(inputs, config, scratch, obs) as opened, where.crew(opened) as crew:
                made = _Preprocessing(opened, crew, run.path, before, where.bucket_values(crew.jobs))
                run.results["store"] = made.run(split, genes, seed)
            # renamed first, because a run that is killed during deletion would leave results without their files
            scratch.rename(done_with)
            files.remove(done_with)
            run.results["checksums"] = checksums.write_checksums(run.path, made.checksums)
            run.checksums |= checksums.read_checksums(run.path) or {}
    return out


class _Preprocessing:
    """One run, with its inputs, its task runner and the unfinished store."""

    def __init__(
        self, inputs: Inputs, crew: TaskRunner, folder: Path, before: dict[Path, tuple[int, int]], values: int
    ) -> None:
        self.inputs, self.config, self.crew, self.folder = inputs, inputs.config, crew, folder.absolute()
        self.scratch, self._before, self._values = self.folder / _SCRATCH, before, values
        self.checksums: dict[str, str] = {}

    def run(self, split: Path | None, genes: Path | None, seed: int) -> dict[str, Any]:
        """Run the passes. Return the facts about the store for its manifest."""
        labels = read_labels(self.inputs)
        look = _visible(labels.conditions, self.config, split)
        passes = Passes(self.inputs, self.crew, self.scratch)
        passes.set_codes(labels.codes)
        conditions, perturbations = labels.conditions, labels.perturbations
        dropped = {"without_label": labels.without_label}
        dropped |= {} if self.config.keep is None else {"left_out": labels.left_out}
        targets = target_genes(self.inputs, labels) if self.config.knockdown else None
        extra = self._save_extra(labels.sets)
        del labels  # 4 bytes per cell
        scan = scan_cells(passes, conditions, look)
        if targets is not None:
            scan, table = apply_knockdown(passes, conditions, look, scan, targets)
            tabular.write_csv(table, self.folder / "knockdown.csv")
        tabular.write_csv(scan.quality, self.folder / "qc.csv")
        layout = self._lay_out(passes, conditions, scan, look, genes, seed)
        segments = reordering.scatter(passes, layout.scatter)
        self._check_unchanged()
        facts = _facts(layout, self.config, int(segments["values"].sum()), seed)
        obs = self._obs_columns(layout.conditions, perturbations, extra)
        parts = gather(self.crew, self._part_tasks(layout, segments, obs, facts))
        self._write_tables(layout, perturbations, parts)
        self.checksums = {f"{p.name}/{file}": digest for p in parts for file, digest in p.checksums.items()}
        return {**facts, **dropped, "parts": [{"name": p.name, "n_cells": p.num_cells} for p in parts]}

    def _lay_out(
        self,
        passes: Passes,
        conditions: pd.DataFrame,
        scan: Scan,
        look: np.ndarray,
        genes: Path | None,
        seed: int,
    ) -> _Layout:
        """Choose target depth and genes, renumber the conditions with cells, and plan partitions and buckets."""
        config, every = self.config, self.inputs.genes
        target_sum = self._target_sum(scan)
        var = self._gene_table(passes, conditions, scan, look, target_sum, genes)
        chosen = list(var.index)
        left = scan.left > 0
        kept = conditions.assign(n_cells=scan.left).loc[left].reset_index(drop=True)
        column = pd.Index(chosen).get_indexer(pd.Index(every)).astype(np.int32)
        density = scan.sums.positive.sum(axis=0)[column >= 0].sum() / max(1, scan.sums.cells.sum())
        part_cells = int(np.clip(scan.left.sum() // _PARTS, *CELLS_PER_PART))
        plan = reordering.plan_buckets(kept, max(1, int(self._values / max(1.0, density))), part_cells)
        small = scan.largest <= np.iinfo(np.uint16).max
        log = config.unit == "log1p"
        dtype = np.dtype(np.float32 if log else np.uint16 if small else np.uint32)
        number = np.where(left, np.cumsum(left) - 1, -1).astype(np.int32)
        settings = reordering.ScatterSettings(plan, number, column, dtype, seed, self._values)
        kept = complete(kept, config.control).assign(part=plan.part)
        return _Layout(kept, chosen, var, target_sum, dtype, settings)

    def _target_sum(self, scan: Scan) -> float:
        if self.config.target_sum != "median":
            return float(self.config.target_sum)
        if self.config.unit == "log1p":
            return float("nan")
        if np.isnan(scan.median_depth):
            raise UserError("no cell that gene selection may look at has any counts")
        return scan.median_depth

    def _gene_table(
        self,
        passes: Passes,
        conditions: pd.DataFrame,
        scan: Scan,
        look: np.ndarray,
        target_sum: float,
        genes: Path | None,
    ) -> pd.DataFrame:
        """Return the statistics of the genes to keep, in the order of the store's columns."""
        config, every = self.config, self.inputs.genes
        group, _ = gene_groups(conditions, look, by_batch=config.hvg_by_batch)
        more = None if genes else second_pass(config, scan.sums, group, target_sum, self.scratch)
        if more is not None:
            passes.run(more.name, more.body, more.request, label="choosing genes")
        stored = config.unit == "log1p" or sums_stored_values(config)
        table = choose_genes(
            scan.sums, every, 1.0 if stored else target_sum, config.num_hvgs if genes is None else None,
            by_batch=config.hvg_by_batch, flavor=config.hvg_flavor,
            second=None if more is None else passes.results(more.name),
        )  # fmt: skip
        if genes is None:
            chosen = [g for g, kept in zip(every, table["highly_variable"], strict=True) if kept]
        else:
            chosen = read_gene_list(genes, every)
        return pd.DataFrame(table.loc[chosen]).drop(columns="highly_variable")

    def _save_extra(self, sets: pd.Categorical | None) -> dict[str, tuple[Path, pd.Index | None]]:
        """Save each further obs column to a file that workers can map. Return the files with their categories."""
        columns: dict[str, tuple[Path, pd.Index | None]] = {}
        if sets is not None:
            columns[SET] = self.scratch / "sets.npy", sets.categories
            save(columns[SET][0], np.asarray(sets.codes))
        for number, name in enumerate(extra_names(self.config)):
            path, values = self.scratch / f"extra-{number:03d}.npy", extra_column(self.inputs, name)
            labelled = isinstance(values.dtype, pd.CategoricalDtype)
            save(path, (values.cat.codes if labelled else values).to_numpy())
            columns[name] = path, values.cat.categories if labelled else None
        return columns

    def _obs_columns(
        self,
        conditions: pd.DataFrame,
        perturbations: pd.DataFrame,
        extra: dict[str, tuple[Path, pd.Index | None]],
    ) -> ObsColumns:
        dose = None
        if not np.isnan(perturbations["dose"].to_numpy(np.float64)).all():
            table = perturbations.set_index("perturbation")["dose"]
            dose = table.loc[conditions["perturbation"]].to_numpy()
        names = short_paths([f.path for f in self.inputs.files])
        return ObsColumns(label_columns(conditions), dose, names, self.inputs.offsets, extra)

    def _part_tasks(
        self, layout: _Layout, segments: np.ndarray, obs: ObsColumns, facts: dict[str, Any]
    ) -> list[PartTask]:
        of_segment = layout.scatter.plan.bucket_part[segments["bucket"]]
        part = layout.conditions["part"]
        return [
            PartTask(
                number, self.folder, self.scratch, layout.conditions.loc[part == number],
                segments[of_segment == number], obs, layout.var, layout.dtype, facts,
            )
            for number in range(int(part.max()) + 1)
        ]  # fmt: skip

    def _check_unchanged(self) -> None:
        """Refuse to go on with an input that is not what it was when it was hashed."""
        for path, was in self._before.items():
            if files.signature(path) != was:
                raise UserError(
                    f"{path}: changed while it was read; run again when nothing writes to it any more"
                )

    def _write_tables(self, layout: _Layout, perturbations: pd.DataFrame, parts: Sequence[Part]) -> None:
        largest = np.max([part.largest for part in parts], axis=0)
        maximum = largest if self.config.unit == "log1p" else np.log1p(largest)
        layout.var.assign(max_log1p=maximum).to_parquet(self.folder / "genes.parquet")
        layout.conditions.to_parquet(self.folder / "conditions.parquet")
        left = perturbations["perturbation"].isin(layout.conditions["perturbation"])
        perturbations.loc[left].reset_index(drop=True).to_parquet(self.folder / "perturbations.parquet")


def _visible(conditions: pd.DataFrame, config: DataConfig, split: Path | None) -> np.ndarray:
    """Return whether the choice of genes and of the target depth may look at each condition."""
    if config.hvg_cells == "all" or split is None:
        return np.ones(len(conditions), bool)
    from perturbdiff.splits import splits

    return np.asarray(splits.parts(conditions, splits.read_split(split)) == "train")


def _facts(layout: _Layout, config: DataConfig, num_values: int, seed: int) -> dict[str, Any]:
    """Return the facts about the store for the manifest."""
    selection = {
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
        "input_scale": config.unit,
        "target_sum": None if np.isnan(layout.target_sum) else layout.target_sum,
        "scale": config.scale,
        "control": config.control,
        "seed": seed,
        "hvg": selection,
        **({} if config.set_key is None else {"set_key": config.set_key}),
    }
