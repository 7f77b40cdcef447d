"""Simulate a perturbation screen whose true effects are known, of any size in bounded memory.

The output folder holds ``counts.h5ad`` (raw counts, cells in random order), ``effects.parquet`` (the true log
fold changes), ``conditions.csv`` and the run's records. docs/simulation.md describes the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from perturbdiff.config.settings import SimulateConfig
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.simulation.simulated_counts import Counts, draw_counts, draw_escapes, write_counts
from perturbdiff.simulation.true_effects import (
    MIN_CONTROLS,
    TINY,
    Plan,
    Truth,
    condition_table,
    draw_plan,
    draw_truth,
    stream,
)

WIDTH = 32
_DECIMALS = 4  # beyond these, numbers depend on the linear algebra library


def perturbation_vectors(config: SimulateConfig, truth: Truth, quality: float, seed: int) -> pd.DataFrame:
    """Return a semantic table of the perturbations: ``name``, then 32 numbers ``v0`` to ``v31``.

    The true log fold changes, averaged over cell types, are turned by a random matrix, and noise is added.

    Parameters
    ----------
    config, truth, seed
        The experiment.
    quality
        Correlation of the numbers with those without noise, 0 (noise alone) to 1.
    """
    labels, types = truth.perturbations["perturbation"].iloc[1:], range(len(truth.cell_types))
    effects = np.array(
        [
            np.mean([truth.log_fold_change(p, c, escape=config.escape) for c in types], axis=0)
            for p in range(1, len(labels) + 1)
        ]
    )
    rng = stream(seed, "vectors")
    known = effects @ rng.normal(size=(effects.shape[1], WIDTH))
    known = (known - known.mean(axis=0)) / max(float(known.std()), 1e-12)
    vectors = quality * known + np.sqrt(1 - quality**2) * rng.normal(size=known.shape)
    columns = {f"v{i}": vectors[:, i].round(_DECIMALS).astype(np.float32) for i in range(WIDTH)}
    return pd.DataFrame({"name": labels.to_numpy(), **columns})


_BLOCK_VALUES = 4_000_000  # cells × genes held at once


def simulate(
    out: Path, config: SimulateConfig, *, seed: int, force: bool = False, block_size: int | None = None
) -> Path:
    """Write a simulated experiment and its truth to the folder ``out``.

    Parameters
    ----------
    out
        Output folder.
    config
        The experiment.
    seed
        Determines every byte of the data together with ``config``.
    force
        Run even if an equal output is there.
    block_size
        Cells drawn at once; none: what fits some tens of MiB. Has no effect on the output.

    Returns
    -------
    Path
        ``out``, with ``counts.h5ad`` (X: CSR int32 counts; obs: perturbation, agent, kind, dose, cell_type,
        batch, and the hidden set and latent), ``effects.parquet`` (perturbation, cell_type, gene,
        log_fold_change: natural log, of the expected share of counts, against control), ``conditions.csv`` and, if
        the configuration asks for it, ``vectors.parquet`` (a semantic table of the perturbations).

    Raises
    ------
    UserError
        If the configuration asks for the impossible, e.g. fewer cells than conditions.
    """
    _check(config)
    plain = config.model_dump(mode="json")
    with provenance.stage(
        "simulate", out, config=plain, inputs={}, seed=seed, folder=True, force=force
    ) as run:
        if run.skip:
            return out
        truth = draw_truth(config, seed)
        plan = draw_plan(config, truth, seed)
        rows = block_size or max(1, min(8192, _BLOCK_VALUES // config.genes))
        blocks = draw_blocks(config, truth, plan, seed, rows)
        mean = truth.expected_counts(config.counts_per_gene * config.genes)
        values = write_counts(run.path / "counts.h5ad", blocks, truth, plan, mean=mean, seed=seed)
        _write_effects(run.path / "effects.parquet", config, truth)
        if config.vector_quality is not None:
            vectors = perturbation_vectors(config, truth, config.vector_quality, seed)
            vectors.to_parquet(run.path / "vectors.parquet", index=False)
        table = condition_table(truth, plan)
        tabular.write_csv(table, run.path / "conditions.csv")
        sizes = table["n_cells"]
        run.results |= {
            "cells": int(sizes.sum()),
            "genes": config.genes,
            "conditions": len(table),
            "tiny_conditions": int((sizes <= TINY).sum()),
            "density": values / (config.cells * config.genes),
        }
    return out


def _check(config: SimulateConfig) -> None:
    if config.drugs and not config.doses:
        raise UserError("simulate.doses is empty but simulate.drugs is not 0: give at least one dose")
    if any(dose <= 0 for dose in config.doses) or len(set(config.doses)) < len(config.doses):
        raise UserError(f"simulate.doses must be positive and different, got {list(config.doses)}")
    if config.knockdowns > config.genes:
        raise UserError(
            f"simulate.knockdowns={config.knockdowns} needs as many genes to name, simulate.genes={config.genes}"
        )
    labels = config.knockdowns + config.drugs * len(config.doses) + config.cytokines
    if labels == 0:
        raise UserError(
            "nothing to simulate: set one of simulate.knockdowns, simulate.drugs, simulate.cytokines"
        )
    contexts = config.cell_types * config.batches
    need = contexts * (MIN_CONTROLS + labels * (TINY + 1))
    if config.cells < need:
        raise UserError(
            f"simulate.cells={config.cells} is too few for {labels} perturbations and controls in {contexts} "
            f"(cell type, batch) pairs: at least {need} are needed"
        )


def draw_blocks(config: SimulateConfig, truth: Truth, plan: Plan, seed: int, rows: int) -> Iterator[Counts]:
    """Yield all cells in order, ``rows`` at a time; the counts do not depend on ``rows``."""
    is_knockdown = (truth.perturbations["kind"] == "knockdown").to_numpy()
    escape = config.escape * is_knockdown[plan.of_set("perturbation")]
    depth = config.counts_per_gene * config.genes * truth.depth
    for start in range(0, config.cells, rows):
        sets = plan.set_of_cell[start : start + rows]
        cells = np.arange(start, start + len(sets), dtype=np.int64)
        escaped = draw_escapes(seed, cells, escape[sets])
        populations, of_cell = np.unique(2 * sets.astype(np.int64) + escaped, return_inverse=True)
        yield draw_counts(
            seed,
            cells,
            of_cell.astype(np.int64),
            _rates(config, truth, plan, populations),
            truth.cell_programmes,
            depth=depth[plan.of_set("cell_type"), plan.of_set("batch")][populations // 2],
            depth_spread=config.depth_spread,
            dispersion=truth.dispersion,
        )


def _rates(
    config: SimulateConfig, truth: Truth, plan: Plan, populations: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the expected expression ``[U, G]`` of populations, numbered 2 · set + (1 if escaped)."""
    rates = np.empty((len(populations), config.genes), np.float32)
    effects: dict[tuple[int, int], NDArray[np.float32]] = {}
    sets, escaped = populations // 2, populations % 2
    names = ("cell_type", "batch", "perturbation")
    cell_types, batches, perturbations = (plan.of_set(name)[sets].tolist() for name in names)
    latents = plan.sets["latent"].to_numpy(np.float64)[sets].tolist()
    for row, (c, b, p, z) in enumerate(zip(cell_types, batches, perturbations, latents, strict=True)):
        log_rate = truth.base[c] + truth.batch[c, b]
        log_rate += np.float32(config.latent_shift * z) * truth.direction
        if p and not escaped[row]:
            if (p, c) not in effects:
                effects[p, c] = truth.effect(p, c)
            log_rate += np.float32(max(0.0, 1.0 + config.latent_strength * z)) * effects[p, c]
        rates[row] = np.exp(log_rate - log_rate.max())
    return rates


def _write_effects(path: Path, config: SimulateConfig, truth: Truth) -> None:
    """Write the true log fold changes, one row group per perturbation and cell type."""
    genes = pa.array(truth.genes).dictionary_encode()
    writer = None
    for p in range(1, len(truth.perturbations)):
        for c, cell_type in enumerate(truth.cell_types):
            label = truth.perturbations["perturbation"].iat[p]
            change = truth.log_fold_change(p, c, escape=config.escape)
            table = pa.table(
                {
                    "perturbation": pa.array([label] * len(genes)).dictionary_encode(),
                    "cell_type": pa.array([cell_type] * len(genes)).dictionary_encode(),
                    "gene": genes,
                    "log_fold_change": pa.array(change.astype(np.float32)),
                }
            )
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
    if writer is not None:
        writer.close()
