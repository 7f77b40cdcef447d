"""The command `preprocess`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perturbdiff.cli.options import (
    Force,
    Jobs,
    Labels,
    MemoryLimit,
    Out,
    Overrides,
    Recipe,
    Scheduler,
    Seed,
    config_of,
    size_in_bytes,
)


def preprocess(
    inputs: Annotated[list[Path], typer.Argument(help="h5ad, zarr or 10x h5 files with raw counts.")],
    out: Out,
    recipe: Recipe = None,
    overrides: Overrides = None,
    split: Annotated[
        Path | None, typer.Option("--split", help="Split, for genes from training cells only.")
    ] = None,
    genes: Annotated[
        Path | None, typer.Option("--genes", help="Genes to keep, in order: a text file or a vocabulary.")
    ] = None,
    obs: Labels = None,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    memory_limit: MemoryLimit = None,
    unfinished: Annotated[
        Path | None,
        typer.Option(
            "--unfinished", help="Folder for an unfinished store, to go on there; default: beside OUT."
        ),
    ] = None,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Turn raw counts into a store.

    Checks the counts, selects highly variable genes and writes chunked Zarr sorted by condition. A run that was
    interrupted goes on where it stopped.
    """
    from perturbdiff.preprocessing.preprocessing_stage import Machine
    from perturbdiff.preprocessing.preprocessing_stage import preprocess as run

    config = config_of(recipe, overrides, seed)
    machine = Machine(jobs, scheduler, size_in_bytes(memory_limit), unfinished)
    files: dict[str, Any] = {"split": split, "genes": genes, "obs": obs or ()}
    run(inputs, out, config.data, **files, seed=config.seed, force=force, machine=machine)
    typer.echo(str(out))
