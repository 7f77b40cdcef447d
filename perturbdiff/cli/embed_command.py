"""The command ``embed``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perturbdiff.cli.options import Device, Force, Out


def embed(
    source: Annotated[
        Path,
        typer.Argument(metavar="INPUT", help="FASTA, or CSV/TSV with name and sequence, smiles or text."),
    ],
    out: Out,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Folder, name on the Hugging Face hub, or e.g. esm2-650m, chemberta."
        ),
    ],
    kind: Annotated[
        Literal["sequence", "smiles", "text"] | None,
        typer.Option("--kind", help="What INPUT holds; default: what its columns say."),
    ] = None,
    pool: Annotated[
        Literal["mean", "cls", "last"] | None,
        typer.Option("--pool", help="Tokens to one vector; default: mean, for SMILES cls."),
    ] = None,
    layer: Annotated[int, typer.Option("--layer", help="Hidden states to pool; -1 is the last layer.")] = -1,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=3, help="Tokens read of each; default: the model's.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Texts at a time.")] = 8,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")
    ] = None,
    local_only: Annotated[bool, typer.Option("--local-only", help="Never use the network.")] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Compute a semantic table.

    Vectors of protein sequences, SMILES or texts by a pretrained encoder, for --embedding of train.
    """
    from perturbdiff.embeddings import embed as run

    settings: dict[str, Any] = {"kind": kind, "pool": pool, "layer": layer, "max_length": max_length}
    settings |= {"batch_size": batch_size, "revision": revision, "local_only": local_only}
    typer.echo(str(run(source, out, model=model, device=device, force=force, **settings)))
