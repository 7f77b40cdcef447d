"""``perturbdiff doctor``: what this machine, job, container and storage offer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perturbdiff.runtime.errors import EXIT_FAILURE


def doctor(
    folder: Annotated[
        list[Path] | None,
        typer.Option("--folder", help="Folder that a run will use (repeatable); default: the current one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what this machine offers.

    GPU, memory, Slurm, Apptainer, Nextflow, folders; inside a job or container: what that gets. What is missing, and
    what to do about it. Exit code 1 if something will not work.
    """
    from perturbdiff import doctor as package

    checks = package.diagnose(folder or ())
    typer.echo(package.as_json(checks) if as_json else package.render(checks))
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(EXIT_FAILURE)
