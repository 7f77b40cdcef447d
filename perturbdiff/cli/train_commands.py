"""The commands ``pretrain``, ``train`` and ``finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perturbdiff.cli.options import (
    Checkpoints,
    Device,
    Embeddings,
    Force,
    Out,
    Overrides,
    Recipe,
    Resume,
    Seed,
    config_of,
    embeddings_of,
    store_and_split,
)

KeepEvery = Annotated[
    int | None,
    typer.Option(
        "--keep-every",
        min=1,
        metavar="N",
        help="Keep a whole bundle every N steps, in OUT/steps (train.keep_every).",
    ),
]


def pretrain(
    stores: Annotated[list[Path], typer.Argument(help="Stores of unperturbed (and training) cells.")],
    out: Out,
    downstream: Annotated[
        list[str] | None,
        typer.Option(
            "--downstream",
            metavar="STORE:SPLIT",
            help="Its validation and test conditions and cells are left out.",
        ),
    ] = None,
    genes: Annotated[
        Path | None,
        typer.Option("--genes", help="Text file of the model's genes; default: those of all stores."),
    ] = None,
    embeddings: Embeddings = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    keep_every: KeepEvery = None,
    checkpoints: Checkpoints = None,
    resume: Resume = "auto",
    device: Device = "auto",
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Learn a prior from unperturbed cells."""
    from perturbdiff.training.training_stages import pretrain as run

    pairs = [store_and_split(text) for text in downstream or []]
    config = config_of(recipe, _kept(overrides, keep_every), seed)
    settings: dict[str, Any] = {"downstream": pairs, "genes": genes, "embeddings": embeddings_of(embeddings)}
    settings |= {"checkpoints": checkpoints}
    typer.echo(str(run(stores, out, config, **settings, resume=resume, device=device, force=force)))


def train(
    store: Annotated[Path, typer.Argument(help="Store folder.")],
    split: Annotated[Path, typer.Option("--split", help="Split (parquet).")],
    out: Out,
    embeddings: Embeddings = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    keep_every: KeepEvery = None,
    checkpoints: Checkpoints = None,
    resume: Resume = "auto",
    device: Device = "auto",
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Train a model from scratch and write a bundle."""
    from perturbdiff.training.training_stages import train as run

    config = config_of(recipe, _kept(overrides, keep_every), seed)
    settings: dict[str, Any] = {"embeddings": embeddings_of(embeddings), "checkpoints": checkpoints}
    typer.echo(str(run(store, split, out, config, **settings, resume=resume, device=device, force=force)))


def finetune(
    bundle: Annotated[Path, typer.Argument(help="Pretrained bundle.")],
    store: Annotated[Path, typer.Argument(help="Store folder.")],
    split: Annotated[Path, typer.Option("--split", help="Split (parquet).")],
    out: Out,
    transfer: Annotated[
        Literal["keep", "reinit", "new-genes"],
        typer.Option(
            "--transfer",
            help="Input and output layers: as pretrained; pretrained genes with new weights; this store's genes.",
        ),
    ] = "keep",
    embeddings: Embeddings = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    keep_every: KeepEvery = None,
    checkpoints: Checkpoints = None,
    resume: Resume = "auto",
    device: Device = "auto",
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Continue from a pretrained bundle on perturbation data."""
    from perturbdiff.training.training_stages import finetune as run

    config = config_of(recipe, _kept(overrides, keep_every), seed)
    settings: dict[str, Any] = {"embeddings": embeddings_of(embeddings), "checkpoints": checkpoints}
    settings |= {"resume": resume, "device": device, "force": force}
    typer.echo(str(run(bundle, store, split, out, config, transfer=transfer, **settings)))


def _kept(overrides: list[str] | None, keep_every: int | None) -> list[str]:
    return [*(overrides or ()), *([] if keep_every is None else [f"train.keep_every={keep_every}"])]
