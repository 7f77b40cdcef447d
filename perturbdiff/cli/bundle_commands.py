"""The commands ``bundle info``, ``bundle push`` and ``bundle pull``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perturbdiff.cli.options import Group, Out, Quick, Work

Repository = Annotated[
    str, typer.Argument(metavar="REPO", help="Repository on the Hugging Face Hub: OWNER/NAME.")
]

bundle_app = typer.Typer(cls=Group, help="Describe a trained model, or share it.", no_args_is_help=True)


@bundle_app.command("info", cls=Quick)
def bundle_info(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Model bundle.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all labels, for scripts.")] = False,
) -> None:
    """Describe a bundle.

    Prints its recipe, genes, the labels that it knows, its training, inputs and versions.
    """
    from perturbdiff.checkpoint.bundle_record import describe, render

    facts = describe(bundle)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        typer.echo(render(facts))


@bundle_app.command("push", cls=Work)
def bundle_push(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Model bundle.")],
    repository: Repository,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see the repository; default: private.")
    ] = False,
) -> None:
    """Upload a bundle to the Hugging Face Hub.

    Compares it with its manifest first, and prints the address of the repository. Needs an account: hf auth login.
    """
    from perturbdiff.checkpoint.hub import push

    typer.echo(push(bundle, repository, public=public))


@bundle_app.command("pull", cls=Work)
def bundle_pull(
    repository: Repository,
    out: Out,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit; default: the newest state.")
    ] = None,
) -> None:
    """Download a bundle from the Hugging Face Hub.

    Compares every file with the bundle's manifest. After an interruption, the same command keeps the files that are
    complete.
    """
    from perturbdiff.checkpoint.hub import pull

    typer.echo(str(pull(repository, out, revision=revision)))
