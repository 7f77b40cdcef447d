"""The commands ``data list`` and ``data get``: published data sets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perturbdiff.cli import completion
from perturbdiff.cli.options import Group, Quick, Work

data_app = typer.Typer(
    cls=Group, help="List, fetch or check data before hours are spent on them.", no_args_is_help=True
)


@data_app.command("list", cls=Quick)
def data_list(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", autocompletion=completion.datasets, help="Data set; without it, all are listed."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List published data sets, or say all that is known of one.

    Prints where a data set is published, its size, sums, licence, columns and what is odd about it. The registry is a
    part of the package, so that no network is needed.
    """
    from perturbdiff.datasets import description, lookup, registered

    if as_json:
        import json

        chosen = [lookup(name)] if name else registered().values()
        typer.echo(json.dumps([description.facts(one) for one in chosen], indent=2, ensure_ascii=False))
    else:
        typer.echo(description.render(lookup(name)) if name else description.table())


@data_app.command("get", cls=Work)
def data_get(
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=completion.datasets, help="Data set.")
    ],
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
