"""The command ``baseline NAME …`` for methods of the package, of others and of users, and its sub-commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from perturbdiff.cli.options import Device, Force, Out, Overrides, Part, Recipe, Seed, config_of
from perturbdiff.cli.program import Work
from perturbdiff.cli.tool_commands import mount
from perturbdiff.runtime.errors import UserError, listing, nearest

_PREDICT = "predict"
_HELP = ("-h", "--help")


class Methods(TyperGroup):
    """A group whose first word is a sub-command or else the name of a method."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the hidden command that predicts before a method's name."""
        if args and args[0] not in self.commands and args[0] not in _HELP:
            if not args[0].startswith("-") and not set(args) & set(_HELP):
                self._check(args[0])
            args = [_PREDICT, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; the one that predicts is shown as the group itself, whose words it takes."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _PREDICT else name), command, rest

    def _check(self, name: str) -> None:
        known = methods()
        if name not in known:
            commands = [command for command in self.commands if command != _PREDICT]
            raise UserError(
                f"no baseline '{name}'{nearest(name, [*known, *commands]) or ';'} baselines: {listing(known, 20)}; "
                f"commands: {listing(commands)}"
            )


baseline_app = typer.Typer(
    cls=Methods,
    no_args_is_help=True,
    subcommand_metavar="NAME STORE --split SPLIT --out OUT [OPTIONS] | COMMAND …",
    help="Predict with a baseline: a simple method, one of others (CPA, STATE, …) or a script of yours.\n\n"
    "perturbdiff baseline NAME STORE --split SPLIT --out OUT takes the same files in and out as train and sample; "
    "its options: perturbdiff baseline NAME --help. Names: docs/baselines.md.",
)


def methods() -> tuple[str, ...]:
    """Return all names: of the package's methods, of tools, and 'script'."""
    from perturbdiff.baselines import NAMES
    from perturbdiff.baselines.external import known_tools

    return (*NAMES, *known_tools.names(), "script")


@baseline_app.command(_PREDICT, cls=Work, hidden=True)
def predict(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which (docs/baselines.md), or 'script'.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Store folder.")],
    split: Annotated[Path, typer.Option("--split", help="Split (parquet).")],
    out: Out,
    part: Part = "test",
    recipe: Recipe = None,
    overrides: Overrides = None,
    script: Annotated[
        Path | None, typer.Option("--script", help="Of 'script': the adapter (docs/adapters.md).")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option("--python", help="Of tools and scripts: the interpreter, with its packages, to run it."),
    ] = None,
    label: Annotated[
        str | None, typer.Option("--name", help="Of tools and scripts: what to call it in tables.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Of tools and scripts: CPU threads.")
    ] = None,
    device: Device = "auto",
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Of tools and scripts: keep what it was given and gave in this folder."),
    ] = None,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Predict the conditions of a part with a baseline.

    Settings of tools and scripts: --set baseline.settings=quick, --set baseline.options.NAME=VALUE.
    """
    from perturbdiff.baselines import NAMES
    from perturbdiff.baselines import predict as built_in

    config = config_of(recipe, overrides, seed)
    shared: dict[str, Any] = {"part": part, "seed": config.seed, "force": force}
    own = {"script": script, "python": python, "name": label, "threads": threads, "keep": keep}
    if name in NAMES:
        _refuse(name, {**own, "set baseline.options": config.baseline.options})
        built_in(name, store, split, out, **shared)
    else:
        _external(name, store, split, out, config.baseline, own, {**shared, "device": device})
    typer.echo(str(out))


def _external(
    name: str, store: Path, split: Path, out: Path, config: Any, own: dict[str, Any], shared: dict[str, Any]
) -> None:
    from perturbdiff.baselines.external import known_tools
    from perturbdiff.baselines.external.external_stage import predict_external
    from perturbdiff.baselines.external.methods import script_method, tool_method

    chosen = {"python": own["python"], "name": own["name"]}
    if name == "script":
        if own["script"] is None:
            raise UserError("baseline script: name the script with --script FILE (docs/adapters.md)")
        method = script_method(own["script"], config, **chosen)
    else:
        _refuse(name, {"script": own["script"]})
        method = tool_method(known_tools.load(name), config, **chosen)
    rest = {"threads": own["threads"], "keep": own["keep"], "timeout_hours": config.timeout_hours}
    predict_external(method, store, split, out, **rest, **shared)


def _refuse(name: str, options: dict[str, Any]) -> None:
    """Refuse options that a method does not have."""
    given = [option for option, value in options.items() if value not in (None, {})]
    if given:
        raise UserError(f"baseline {name}: has no --{given[0]}")


mount(baseline_app)
