"""The commands that work on data: ``preprocess``, ``stats``, ``store`` and ``vocabulary``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perturbdiff.cli import hints
from perturbdiff.cli.options import (
    LARGEST_SEED,
    Force,
    Group,
    Jobs,
    Labels,
    MemoryLimit,
    Out,
    Overrides,
    Quick,
    Recipe,
    Scheduler,
    Shared,
    StorePath,
    Work,
    config_of,
    data_options,
    size_in_bytes,
    with_options,
)
from perturbdiff.runtime.errors import UserError


@with_options(data_options)
def preprocess(
    inputs: Annotated[list[Path], typer.Argument(help="h5ad, zarr, 10x or Parquet files with raw counts.")],
    out: Out,
    split: Annotated[
        Path | None,
        typer.Option("--split", help="Split file, needed to select genes from the training cells only."),
    ] = None,
    genes: Annotated[
        Path | None,
        typer.Option("--genes", help="Genes to keep, in this order: a text file or a vocabulary."),
    ] = None,
    obs: Labels = None,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    memory_limit: MemoryLimit = None,
    unfinished: Annotated[
        Path | None,
        typer.Option(
            "--unfinished",
            help="Folder for the unfinished store, where an interrupted run continues; default: next to OUT.",
        ),
    ] = None,
    *,
    data: Shared,
) -> None:
    """Turn raw counts into a store.

    Checks the counts, selects highly variable genes and writes chunked Zarr sorted by condition. An interrupted run
    continues where it stopped.
    """
    from perturbdiff.preprocessing.preprocessing_stage import Machine
    from perturbdiff.preprocessing.preprocessing_stage import preprocess as run

    machine = Machine(jobs, scheduler, size_in_bytes(memory_limit), unfinished)
    files: dict[str, Any] = {"split": split, "genes": genes, "obs": obs or ()}
    run(inputs, out, data.config.data, **files, **data.settings, machine=machine)
    typer.echo(str(out))


def stats(
    store: StorePath,
    out: Out,
    split: Annotated[
        Path | None, typer.Option("--split", help="Split file, to count cells in each part.")
    ] = None,
    genes: Annotated[
        Path | None, typer.Option("--genes", help="Gene list; non-zero genes are also counted within it.")
    ] = None,
    published: Annotated[
        str | None,
        typer.Option(
            "--published",
            metavar="NAME",
            autocompletion=hints.datasets,
            help="Data set of the paper whose numbers of cells and labels are set beside those of the store.",
        ),
    ] = None,
    pairs: Annotated[
        int,
        typer.Option("--pairs", min=0, help="Maximum number of distances of each kind and level; 0: none."),
    ] = 300,
    cells_per_group: Annotated[
        int,
        typer.Option("--cells-per-group", min=10, help="Maximum number of cells of a group in a distance."),
    ] = 256,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, max=LARGEST_SEED, help="Random seed for the pairs, cells and intervals."
        ),
    ] = 0,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Number of processes; the results do not depend on it."),
    ] = 1,
    scheduler: Scheduler = None,
    force: Force = False,
) -> None:
    """Describe a store in tables and figures.

    Covers non-zero genes, sequencing depth, cells per perturbation and condition, composition, and distances within
    and between perturbations.
    """
    from perturbdiff.reporting.figures.store_figures import write_figures
    from perturbdiff.statistics.statistics_stage import write_statistics

    done = write_statistics(
        store,
        out,
        split=split,
        genes=genes,
        published=published,
        pairs=pairs,
        cells_per_group=cells_per_group,
        seed=seed,
        jobs=jobs,
        scheduler=scheduler,
        draw=write_figures,
        force=force,
    )
    typer.echo(f"{done}")


store_app = typer.Typer(cls=Group, help="Describe, check or export a store.", no_args_is_help=True)


@store_app.command("export", cls=Work)
def store_export(
    store: StorePath,
    out: Out,
    scale: Annotated[
        Literal["log1p", "counts", "model"],
        typer.Option(
            "--scale", help="Units of X: log1p, the stored counts, or log1p divided by data.scale (model)."
        ),
    ] = "log1p",
    perturbation: Annotated[
        list[str] | None, typer.Option("--perturbation", help="Export only this perturbation (repeatable).")
    ] = None,
    cell_type: Annotated[
        list[str] | None, typer.Option("--cell-type", help="Export only this cell type (repeatable).")
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", help="Export only this batch (repeatable).")
    ] = None,
    split: Annotated[Path | None, typer.Option("--split", help="Split file that --part refers to.")] = None,
    part: Annotated[
        Literal["train", "valid", "test", "unused"] | None,
        typer.Option("--part", help="Export only the conditions in this part of the split."),
    ] = None,
    compression: Annotated[
        Literal["gzip", "lzf", "none"],
        typer.Option("--compression", help="Compression of the matrix in an h5ad file."),
    ] = "gzip",
    force: Force = False,
) -> None:
    """Export cells as one AnnData file.

    Writes an .h5ad file or a .zarr folder with obs, var and uns. Cells are copied in blocks.
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
        bool,
        typer.Option("--quick", help="Check only checksums, tables and metadata, without decoding any cell."),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of worker processes.")] = 1,
) -> None:
    """Check a store for damage.

    Compares the files with their checksums and every cell with the tables. The exit code is 2 if anything is wrong.
    """
    from perturbdiff.store.store_check import check_store

    problems = check_store(store, quick=quick, jobs=jobs)
    for line in problems:
        typer.echo(line)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(f"{store}: {count} found; restore the files, or run preprocess again with --force")
    typer.echo(f"{store}: no problem found")


@store_app.command("info", cls=Quick)
def store_info(
    store: StorePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Describe a store.

    Prints its cells, genes, conditions, units, size, inputs and versions.
    """
    from perturbdiff.store.store_head import describe, render

    facts = describe(store)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo(render(facts))


vocabulary_app = typer.Typer(cls=Group, help="Choose one gene list for many data sets.", no_args_is_help=True)


@vocabulary_app.command("build", cls=Work)
def build(
    studies: Annotated[
        list[Path],
        typer.Argument(metavar="STUDY", help="Files with raw counts, or a .txt file that lists them."),
    ],
    out: Out,
    composites: Annotated[
        int | None,
        typer.Option(
            "--composites", min=1, help="Number of composites to merge the studies into; default: at most 23."
        ),
    ] = None,
    assign: Annotated[
        Path | None,
        typer.Option(
            "--assign", help="CSV with columns study, composite; default: composites of balanced size."
        ),
    ] = None,
    join: Annotated[
        Literal["union", "intersection"],
        typer.Option(
            "--join", help="Genes of a composite: those in any of its studies, or those in all of them."
        ),
    ] = "union",
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, help="Number of genes to choose in each composite (data.num_hvgs)."),
    ] = None,
    add: Annotated[
        list[Path] | None, typer.Option("--add", help="Store or gene list whose genes are added.")
    ] = None,
    cover: Annotated[
        list[Path] | None, typer.Option("--cover", help="Further data to include in coverage.csv.")
    ] = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    memory_limit: MemoryLimit = None,
    force: Force = False,
) -> None:
    """Choose one gene list for many studies.

    Merges the studies into composites, selects the highly variable genes of each composite, and adds the genes given
    by --add.
    """
    from perturbdiff.preprocessing.preprocessing_stage import Machine
    from perturbdiff.preprocessing.shared_genes import build_vocabulary

    changes = [*(overrides or []), *([f"data.num_hvgs={top}"] if top else [])]
    settings: dict[str, Any] = {
        "composites": composites,
        "assign": assign,
        "join": join,
        "machine": Machine(jobs, scheduler, size_in_bytes(memory_limit)),
    }
    settings |= {"add": add or (), "cover": cover or (), "force": force}
    typer.echo(str(build_vocabulary(studies, out, config_of(recipe, changes).data, **settings)))


@vocabulary_app.command("align", cls=Work)
def align(
    source: Annotated[Path, typer.Argument(metavar="DATA", help="A store, or a file with raw counts.")],
    genes: Annotated[Path, typer.Option("--genes", help="Vocabulary folder, or text file of gene names.")],
    out: Out,
    write: Annotated[
        Path | None, typer.Option("--write", help="Also write the cells with these genes to this h5ad file.")
    ] = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    force: Force = False,
) -> None:
    """Report how the genes of a data set match a vocabulary.

    Counts shared, missing and extra genes and the share of the counts kept, and finds other spellings of missing genes.
    """
    from perturbdiff.genes.alignment import align_genes

    config = config_of(recipe, overrides).data
    typer.echo(str(align_genes(source, genes, out, config, write=write, force=force)))
