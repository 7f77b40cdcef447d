"""The command ``sample``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perturbdiff.cli.options import (
    LARGEST_SEED,
    Embeddings,
    Force,
    Out,
    Overrides,
    Part,
    embeddings_of,
    shard_of,
)


def sample(
    bundle: Annotated[Path, typer.Argument(help="Model bundle.")],
    store: Annotated[Path, typer.Argument(help="Store with the control cells to start from.")],
    out: Out,
    split: Annotated[
        Path | None, typer.Option("--split", help="Predict the conditions of a part of this split.")
    ] = None,
    part: Part = "test",
    conditions: Annotated[
        Path | None,
        typer.Option(
            "--conditions",
            help="CSV of cell_type, batch, perturbation[, n_cells, guidance] to predict instead.",
        ),
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Only the I-th of N parts, from 0.")
    ] = "0/1",
    random_init: Annotated[
        bool, typer.Option("--random-init", help="Untrained weights: what the architecture alone predicts.")
    ] = False,
    embeddings: Embeddings = None,
    recipe: Annotated[
        str | None,
        typer.Option("--config", "-c", help="Preset name or YAML file; default: the bundle's own recipe."),
    ] = None,
    overrides: Overrides = None,
    device: Annotated[
        str, typer.Option("--device", help="Where to compute: auto, cpu, cuda, or GPUs like cuda:0,cuda:1.")
    ] = "auto",
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes on each device; they change no result.")
    ] = 1,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of noise and control cells.")
    ] = 0,
    force: Force = False,
) -> None:
    """Generate cells with a trained model.

    For the conditions of a split's part or of a table; writes AnnData in log1p units with the real controls. Without
    --config the bundle's own recipe holds, changed by --set.
    """
    from perturbdiff.checkpoint.bundle import recipe_of
    from perturbdiff.config import recipes
    from perturbdiff.sampling import sample as run

    config = recipes.load(recipe, overrides or ()) if recipe else None
    if config is None and overrides:
        config = recipes.changed(recipe_of(bundle), overrides)
    settings: dict[str, Any] = {
        "split": split,
        "part": part,
        "conditions": conditions,
        "shard": shard_of(shard),
        "random_init": random_init,
        "embeddings": embeddings_of(embeddings),
        "config": config.sample if config else None,
        "device": device,
        "processes": processes,
        "seed": seed,
    }
    typer.echo(str(run(bundle, store, out, **settings, force=force)))
