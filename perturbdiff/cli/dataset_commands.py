"""The commands ``data list``, ``data get`` and ``data check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perturbdiff.cli import hints
from perturbdiff.cli.options import Group, Labels, Overrides, Quick, Recipe, Work
from perturbdiff.runtime.errors import UserError

data_app = typer.Typer(
    cls=Group, help="List, fetch or check data before hours are spent on them.", no_args_is_help=True
)


@data_app.command("list", cls=Quick)
def data_list(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", autocompletion=hints.datasets, help="Data set; without it, all are listed."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List published data sets, or say all that is known of one.

    Prints where a data set is published, its size, sums, licence, columns and what is odd about it. The registry is a
    part of the package, so that no network is needed.
    """
    from perturbdiff.datasets import lookup, registered, registry

    if as_json:
        import json

        chosen = [lookup(name)] if name else registered().values()
        typer.echo(json.dumps([registry.facts(one) for one in chosen], indent=2, ensure_ascii=False))
    else:
        typer.echo(registry.render(lookup(name)) if name else registry.table())


@data_app.command("get", cls=Work)
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=hints.datasets, help="Data set.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder; default: the folder PERTURBDIFF_DATA, else the user's cache."
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="Accept the cost. Needed above 10 GB, where the size is unknown, and where the reader pays.",
        ),
    ] = False,
) -> None:
    """Fetch a published data set, and check it.

    Says first what that costs. An interrupted transfer goes on where it stopped. Sums are compared with the published
    ones; where nobody publishes one, the first fetch records it beside the file. What is complete needs no network. Run
    it on a login node.
    """
    from perturbdiff.datasets import get

    for path in get(name, out, yes=yes):
        typer.echo(str(path))


@data_app.command("check", cls=Work)
def data_check(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH|NAME", help="Files of one data set, a store, or the name of a published data set."
        ),
    ] = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    toml: Annotated[
        Path | None, typer.Option("--toml", help="STATE-style TOML file that defines the split.")
    ] = None,
    genes: Annotated[
        Path | None, typer.Option("--genes", help="Genes to keep: a text file or a vocabulary.")
    ] = None,
    prior: Annotated[
        Path | None,
        typer.Option("--prior", help="Model that will be finetuned: a bundle, or the list of its genes."),
    ] = None,
    obs: Labels = None,
    experiment: Annotated[
        str | None,
        typer.Option("--experiment", help="Check all data of an experiment: its name, or a samplesheet."),
    ] = None,
) -> None:
    """Check data against a recipe before hours are spent.

    Reads labels and some values. Tells of missing columns, missing control cells, every held-out condition without
    cells, doubled genes, values of another scale, genes that a prior lacks, differences from the paper's tables, and
    what preprocessing, training and sampling will cost. Names all problems at once, with exit code 2.
    """
    from perturbdiff.inspection import inspect_study, render, studies_of_sheet, study_of

    if bool(targets) == bool(experiment):
        raise UserError("give the files or the name of a data set, or --experiment")
    if experiment:
        studies = studies_of_sheet(experiment)
    else:
        files = {"toml": toml, "genes": genes, "prior": prior, "obs": obs or ()}
        studies = [study_of(targets or (), recipe, overrides or (), **files)]
    found = [inspect_study(study) for study in studies]
    typer.echo(render(found))
    problems = list(dict.fromkeys(f"{one.study}: {text}" for one in found for text in one.problems))
    if problems:
        raise UserError(f"{len(problems)} problem{'s' * (len(problems) != 1)} found", problems)
