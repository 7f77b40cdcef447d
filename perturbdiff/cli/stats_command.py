"""The command ``stats``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perturbdiff.cli.options import LARGEST_SEED, Force, Out, Scheduler


def stats(
    store: Annotated[Path, typer.Argument(help="Store folder.")],
    out: Out,
    split: Annotated[Path | None, typer.Option("--split", help="Split, to count per part.")] = None,
    genes: Annotated[
        Path | None, typer.Option("--genes", help="Gene list: count the non-zero genes of these too.")
    ] = None,
    pairs: Annotated[
        int, typer.Option("--pairs", min=0, help="Most distances of each kind and level; 0: none.")
    ] = 300,
    cells_per_group: Annotated[
        int, typer.Option("--cells-per-group", min=10, help="Most cells of a group in a distance.")
    ] = 256,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of pairs, cells and intervals.")
    ] = 0,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes; they change no number.")
    ] = 1,
    scheduler: Scheduler = None,
    force: Force = False,
) -> None:
    """Describe a store in tables and figures.

    Non-zero genes, depth, cells per perturbation and condition, composition, distances within and between
    perturbations.
    """
    from perturbdiff.report.figures.store_figures import write_figures
    from perturbdiff.statistics.statistics_stage import write_statistics

    done = write_statistics(
        store,
        out,
        split=split,
        genes=genes,
        pairs=pairs,
        cells_per_group=cells_per_group,
        seed=seed,
        jobs=jobs,
        scheduler=scheduler,
        draw=write_figures,
        force=force,
    )
    typer.echo(f"{done}")
