"""The commands ``store export``, ``store check`` and ``store info``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from perturbdiff.cli.options import Force, Out
from perturbdiff.cli.program import Work
from perturbdiff.runtime.errors import UserError

store_app = typer.Typer(help="Look into a store, check it, copy cells out of it.", no_args_is_help=True)

StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="Store folder.")]


@store_app.command("export", cls=Work)
def store_export(
    store: StorePath,
    out: Out,
    scale: Annotated[
        Literal["log1p", "counts", "model"],
        typer.Option("--scale", help="Units of X: log1p, counts as stored, or log1p / scale."),
    ] = "log1p",
    perturbation: Annotated[
        list[str] | None, typer.Option("--perturbation", help="Only this one (repeatable).")
    ] = None,
    cell_type: Annotated[
        list[str] | None, typer.Option("--cell-type", help="Only this one (repeatable).")
    ] = None,
    batch: Annotated[list[str] | None, typer.Option("--batch", help="Only this one (repeatable).")] = None,
    split: Annotated[Path | None, typer.Option("--split", help="Split, for --part.")] = None,
    part: Annotated[
        Literal["train", "valid", "test", "unused"] | None,
        typer.Option("--part", help="Only conditions in this part of the split."),
    ] = None,
    compression: Annotated[
        Literal["gzip", "lzf", "none"], typer.Option("--compression", help="Of an h5ad's matrix.")
    ] = "gzip",
    force: Force = False,
) -> None:
    """Write cells as one AnnData.

    An .h5ad file or a .zarr folder with obs, var and uns, copied in blocks.
    """
    from perturbdiff.splits.store_export import export

    labels = {"perturbation": perturbation or (), "cell_type": cell_type or (), "batch": batch or ()}
    done = export(
        store,
        out,
        scale=scale,
        labels=labels,
        split=split,
        part=part,
        compression=compression,
        force=force,
    )
    typer.echo(str(done))


@store_app.command("check", cls=Work)
def store_check(
    store: StorePath,
    quick: Annotated[
        bool, typer.Option("--quick", help="Checksums, tables and metadata only; no cell is decoded.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Worker processes.")] = 1,
) -> None:
    """Look for damage.

    Files against their checksums, every cell against the tables; exit code 2 if anything is wrong.
    """
    from perturbdiff.store.store_check import check_store

    problems = check_store(store, quick=quick, jobs=jobs)
    for line in problems:
        typer.echo(line)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(f"{store}: {count} found; restore the files, or run preprocess again with --force")
    typer.echo(f"{store}: no problem found")


@store_app.command("info")
def store_info(
    store: StorePath,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")] = False,
) -> None:
    """Describe a store.

    Cells, genes, conditions, units, size, inputs and versions.
    """
    from perturbdiff.store.store_facts import describe, render

    facts = describe(store)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo(render(facts))
