"""The command ``import-checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perturbdiff.cli.options import Embeddings, Force, Out, embeddings_of


def import_checkpoint(
    file: Annotated[Path, typer.Argument(help="Lightning checkpoint of the authors' released code.")],
    out: Out,
    genes: Annotated[
        Path | None,
        typer.Option("--genes", help="The model's gene list: the released pickle, .txt, .json or .npy."),
    ] = None,
    weights: Annotated[
        Literal["ema", "raw"], typer.Option("--weights", help="Averaged, or as of the step.")
    ] = "ema",
    control: Annotated[
        str | None, typer.Option("--control", help="Label of the controls; default: the released data's.")
    ] = None,
    embeddings: Embeddings = None,
    target_sum: Annotated[
        float | None, typer.Option("--target-sum", min=0, help="Depth the training counts were scaled to.")
    ] = None,
    force: Force = False,
) -> None:
    """Turn a released checkpoint into a bundle.

    Nothing in the file is run. The bundle goes into sample and finetune.
    """
    from perturbdiff.released.checkpoint_import import import_checkpoint as run

    settings: dict[str, Any] = {"genes": genes, "weights": weights, "control": control}
    settings |= {"embeddings": embeddings_of(embeddings), "target_sum": target_sum}
    typer.echo(str(run(file, out, **settings, force=force)))
