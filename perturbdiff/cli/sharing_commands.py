"""What is shared with others: the commands ``bundle info``, ``bundle push`` and ``bundle pull``, and ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from perturbdiff.cli.options import Force, Group, Out, Quick, Work
from perturbdiff.runtime.errors import UserError

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


def export(
    predictions: Annotated[Path, typer.Argument(help="Predictions that sample wrote with --values counts.")],
    rules: Annotated[
        Literal["vcc2026", "cell-eval2"],
        typer.Option(
            "--for",
            help="What the file is for: an upload to the Virtual Cell Challenge 2026, or a file with control cells for "
            "the scorer cell-eval2.",
        ),
    ],
    genes: Annotated[
        Path,
        typer.Option(
            "--genes",
            help="Genes in the order of the file: a list such as gene_names.csv, or an h5ad that has them.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output, an h5ad file.")] = None,
    perturbations: Annotated[
        Path | None,
        typer.Option("--perturbations", help="The competition's list of perturbations, pert_counts.csv."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts",
            metavar="A,B,C",
            help="Contexts that the file must have; default: those in the manifest.json beside the list.",
        ),
    ] = None,
    context: Annotated[
        Literal["cell_type", "batch"],
        typer.Option("--context-col", help="Column of the predictions that has the contexts."),
    ] = "cell_type",
    cells: Annotated[
        int | None,
        typer.Option(
            "--cells", min=1, help="Cells of each perturbation in each context; default: by the rules."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say everything that would be rejected, and write nothing.")
    ] = False,
    force: Force = False,
) -> None:
    """Write predictions for a competition.

    Checks genes, perturbations, contexts, numbers of cells and every value, and names all that would be rejected at
    once. Then nothing is written and the exit code is 2.
    """
    from perturbdiff.submission import check
    from perturbdiff.submission import export as run
    from perturbdiff.submission.submission_stage import Request

    labels = tuple(label.strip() for label in contexts.split(",") if label.strip()) if contexts else None
    request = Request(predictions, rules, genes, perturbations, labels, cells, context)
    if not dry_run:
        if out is None:
            raise UserError("export: name the file to write by --out, or check only, with --dry-run")
        typer.echo(str(run(request, out, force=force)))
        return
    found = check(request)
    if found.problems:
        raise UserError(f"{predictions}: would be rejected", found.problems)
    typer.echo(f"{predictions}: {len(found.table)} cells would be accepted; nothing was written")
