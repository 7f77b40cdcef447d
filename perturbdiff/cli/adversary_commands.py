"""The command ``adversaries``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perturbdiff.cli.evaluate_commands import Truth, scoring_options
from perturbdiff.cli.options import Out, Part, Shared, with_options
from perturbdiff.runtime.errors import UserError


@with_options(scoring_options)
def adversaries(
    truth: Truth,
    out: Out,
    split: Annotated[
        Path | None, typer.Option("--split", help="Attack only the conditions in one part of this split.")
    ] = None,
    part: Part = "test",
    *,
    scoring: Shared,
) -> None:
    """Try the known attacks on the metrics.

    Makes predictions that know nothing and hope for a good score, such as a mean profile as every cell, and scores
    them beside honest cells. Tables show what each attack gains on each metric, and what the report would say of it.
    """
    from perturbdiff.adversaries.adversary_stage import adversaries as run

    settings = dict(scoring.settings)
    if settings.pop("shard") != (0, 1):
        raise UserError("--shard: adversaries has no parts; leave it out")
    tables = run(truth, out, scoring.config, split=split, part=part, **settings)
    typer.echo((tables / "adversaries.txt").read_text(encoding="utf-8"), nl=False)
    typer.echo(str(tables))
