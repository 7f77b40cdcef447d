"""The commands ``vocabulary build`` and ``vocabulary align``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perturbdiff.cli.options import (
    Force,
    Jobs,
    MemoryLimit,
    Out,
    Overrides,
    Recipe,
    Scheduler,
    config_of,
    size_in_bytes,
)
from perturbdiff.cli.program import Work

vocabulary_app = typer.Typer(help="One gene list for many data sets.", no_args_is_help=True)


@vocabulary_app.command("build", cls=Work)
def build(
    studies: Annotated[
        list[Path],
        typer.Argument(metavar="STUDY", help="Files of raw counts, or a .txt file that lists them."),
    ],
    out: Out,
    composites: Annotated[
        int | None,
        typer.Option("--composites", min=1, help="Merge the studies into so many; default: at most 23."),
    ] = None,
    assign: Annotated[
        Path | None, typer.Option("--assign", help="CSV of study, composite instead of balanced ones.")
    ] = None,
    join: Annotated[
        Literal["union", "intersection"],
        typer.Option("--join", help="Genes of a composite: those any of its studies has, or all have."),
    ] = "union",
    top: Annotated[
        int | None, typer.Option("--top", min=1, help="Genes chosen in each composite (data.num_hvgs).")
    ] = None,
    add: Annotated[
        list[Path] | None, typer.Option("--add", help="Store or gene list whose genes are joined.")
    ] = None,
    cover: Annotated[
        list[Path] | None, typer.Option("--cover", help="Further data to count in coverage.csv.")
    ] = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    memory_limit: MemoryLimit = None,
    force: Force = False,
) -> None:
    """Choose the genes of many studies.

    Merges them into composites, takes each one's highly variable genes and joins these with the genes of stores.
    """
    from perturbdiff.preprocessing.preprocessing_stage import Machine
    from perturbdiff.preprocessing.shared_genes import build_vocabulary

    given = [*(overrides or []), *([f"data.num_hvgs={top}"] if top else [])]
    settings: dict[str, Any] = {
        "composites": composites,
        "assign": assign,
        "join": join,
        "machine": Machine(jobs, scheduler, size_in_bytes(memory_limit)),
    }
    settings |= {"add": add or (), "cover": cover or (), "force": force}
    typer.echo(str(build_vocabulary(studies, out, config_of(recipe, given).data, **settings)))


@vocabulary_app.command("align", cls=Work)
def align(
    source: Annotated[Path, typer.Argument(metavar="DATA", help="Store, or file of raw counts.")],
    genes: Annotated[
        Path, typer.Option("--genes", help="Folder of a vocabulary, or text file of gene names.")
    ],
    out: Out,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the cells with these genes as h5ad as well.")
    ] = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    force: Force = False,
) -> None:
    """Report how the genes of data match a vocabulary.

    Shared, missing and extra genes, the share of the counts kept, other spellings of missing genes.
    """
    from perturbdiff.genes.alignment import align_genes

    config = config_of(recipe, overrides).data
    typer.echo(str(align_genes(source, genes, out, config, write=write, force=force)))
