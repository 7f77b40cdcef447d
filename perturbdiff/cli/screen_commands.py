"""The commands ``run`` and ``init``: from one file to a report, or to the recipe and the samplesheet of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perturbdiff.cli.options import (
    Device,
    Embeddings,
    Overrides,
    Recipe,
    Seed,
    Shared,
    embeddings_of,
    with_options,
)
from perturbdiff.runtime.errors import UserError

if TYPE_CHECKING:
    from perturbdiff.screen.plan import Plan

Input = Annotated[
    Path, typer.Argument(metavar="INPUT", help="One h5ad, zarr or 10x h5 file, or a 10x folder.")
]
Perturbation = Annotated[
    str | None,
    typer.Option(
        "--pert-col",
        "--perturbation",
        metavar="COLUMN",
        help="obs column with the perturbation, or one of its labels; default: guessed.",
    ),
]
Control = Annotated[
    str | None,
    typer.Option("--control", metavar="LABEL", help="Label of the control cells; default: guessed."),
]
CellType = Annotated[
    str | None,
    typer.Option(
        "--cell-type-col",
        "--cell-type",
        metavar="COLUMN",
        help="obs column with the cell type, or 'none'; default: guessed.",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch-col",
        "--batch",
        metavar="COLUMN",
        help="obs column with the batch or donor, or 'none'; default: guessed.",
    ),
]
Table = Annotated[
    Path | None,
    typer.Option(
        "--obs", help="Table of cell labels by cell name (csv, tsv, parquet), for a file that lacks them."
    ),
]
_NONE = "none"


def plan_options(
    perturbation: Perturbation = None,
    control: Control = None,
    cell_type: CellType = None,
    batch: Batch = None,
    obs: Table = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    seed: Seed = None,
) -> Shared:
    """Collect the options that ``run`` and ``init`` share."""
    said = {
        "perturbation_key": perturbation,
        "control": control,
        "cell_type_key": cell_type,
        "batch_key": batch,
    }
    given = {
        key: None if value == _NONE and key != "control" else value for key, value in said.items() if value
    }
    settings = {"given": given, "obs": obs, "overrides": overrides or (), "seed": seed}
    return Shared(recipe, settings)


def _plan(source: Path, options: Shared) -> Plan:
    """Return the plan for a file, and say in the log what was decided."""
    import logging

    from perturbdiff.screen.plan import plan_screen

    plan = plan_screen(source, options.config, **options.settings)
    for line in plan.lines:
        logging.getLogger("perturbdiff").info("%s", line)
    return plan


def _folder(source: Path, out: Path | None) -> Path:
    from perturbdiff.runtime.outputs import check_place

    folder = out or Path(f"{source.name.partition('.')[0] or 'screen'}-results")
    check_place(folder)
    return folder


@with_options(plan_options)
def run(
    source: Input,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for all results; default: NAME-results, NAME from the input."
        ),
    ] = None,
    embeddings: Embeddings = None,
    device: Device = "auto",
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace results of other settings that took long to make; they are kept as NAME.previous.",
        ),
    ] = False,
    *,
    options: Shared,
) -> None:
    """Go from one file to a report.

    Finds the counts and the columns, holds out what can be judged, trains a model, and compares its predictions with
    simple baselines. Every guess is printed with its reason, and can be changed by an option. The same command again
    continues an interrupted run. With vectors of the perturbations (--embedding), kernel-ridge is a baseline too.
    """
    from perturbdiff.screen.plan import RECIPE, check_unedited

    tables = embeddings_of(embeddings)
    folder = _folder(source, out)
    recipe = folder / RECIPE
    own = options.config is not None and Path(options.config).absolute() == recipe.absolute()
    said = options.settings
    if not own:
        check_unedited(recipe)
    elif said["given"] or said["overrides"] or said["seed"] is not None:
        raise UserError(
            f"{recipe}: is the recipe of this folder; write the changes into it, and leave the options out"
        )
    plan = _plan(source, options)
    from perturbdiff.screen.stages import run_plan

    done = run_plan(
        plan, folder, recipe=recipe if own else None, embeddings=tables, device=device, force=force
    )
    for line in done.lines:
        typer.echo(line)
    typer.echo(str(done.report))


@with_options(plan_options)
def init(
    source: Input,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the two files.")] = Path(),
    *,
    options: Shared,
) -> None:
    """Write the recipe and the samplesheet that ``run`` would use.

    Writes recipe.yaml, in which each decision has its reason as a comment, and samplesheet.csv for the workflow. Files
    that were made by someone else or edited are not replaced.
    """
    plan = _plan(source, options)
    recipe = plan.write(out)
    typer.echo(str(recipe))
    from perturbdiff.screen.plan import SHEET

    typer.echo(str(recipe.with_name(SHEET)))
