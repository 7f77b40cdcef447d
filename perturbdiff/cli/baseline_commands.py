"""The command ``baseline NAME …`` for methods of the package, of others and of users, and its sub-commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from perturbdiff.cli.options import Device, Force, Out, Overrides, Part, Recipe, Seed, Work, config_of
from perturbdiff.runtime.errors import UserError, listing, nearest

if TYPE_CHECKING:
    from perturbdiff.baselines.external.known_tools import Tool


_PREDICT = "predict"
_HELP = ("-h", "--help")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A tool that 'baseline list' lists.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Tools that 'baseline list' lists.")]


def mount(app: typer.Typer) -> None:
    """Add the commands to a group."""
    app.command("install", cls=Work)(install)
    app.command("list")(list_tools)
    app.command("show")(show)
    app.command("remove")(remove)


def install(
    names: Names,
    python: Annotated[
        Path | None, typer.Option("--python", help="Its Python; found by itself if there is a fitting one.")
    ] = None,
    force: Force = False,
) -> None:
    """Make the environments of tools.

    Each gets one of its own from locked versions, checked by their hashes. Prints where they lie.
    """
    from perturbdiff.baselines.external import known_tools, tool_environments

    for tool in [known_tools.load(name) for name in names]:
        typer.echo(f"{tool.title} {tool.version}, licence: {tool.licence}; see {tool.url}", err=True)
        typer.echo(str(tool_environments.install(tool, python, force=force).folder))


def list_tools() -> None:
    """List the methods: built in, and tools of others with version and licence."""
    from perturbdiff.baselines import NAMES
    from perturbdiff.baselines.external import known_tools, tool_environments

    rows = [(name, "built in", "", "") for name in NAMES]
    for tool in map(known_tools.load, known_tools.names()):
        found = tool_environments.installed(tool)
        rows.append((tool.name, tool.version, "installed" if found else "not installed", tool.licence))
    rows.append(("script", "your own", "", "docs/adapters.md"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show(name: Name) -> None:
    """Show what a tool is, what can be set and where it is installed."""
    from perturbdiff.baselines.external import known_tools

    tool = known_tools.load(name)
    for label, text in _facts(tool):
        typer.echo(f"{label:<13}{text}")
    if tool.settings:
        typer.echo(
            "\nSettings (--set baseline.settings=recommended|quick, --set baseline.options.NAME=VALUE):"
        )
        rows: list[tuple[str, str, str, str]] = [("name", "recommended", "quick", "")]
        for key, setting in tool.settings.items():
            rows.append((key, _value(setting.recommended), _value(setting.quick), setting.help))
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:3]]
        for row in rows:
            left = "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True))
            typer.echo(f"  {left}  {row[3]}".rstrip())


def remove(names: Names) -> None:
    """Remove the environments of tools, those of earlier versions too."""
    from perturbdiff.baselines.external import known_tools, tool_environments

    for tool in [known_tools.load(name) for name in names]:
        for folder in tool_environments.remove(tool) or ["nothing to remove"]:
            typer.echo(f"{tool.name}: {folder}")


def _facts(tool: Tool) -> list[tuple[str, str]]:
    """Return what is said of a tool above its settings."""
    from perturbdiff.baselines.external import tool_environments

    found = tool_environments.installed(tool)
    where = "no"
    if found:
        record = found.record
        where = (
            f"{found.folder} (Python {record['python']}, {record['size_gb']} GB, {record['installed_at']})"
        )
    facts = [
        ("title", f"{tool.title} ({tool.package} {tool.version})"),
        ("page", tool.url),
        ("cite", tool.citation),
        ("licence", tool.licence),
        ("Python", tool.python),
        ("platforms", ", ".join(tool.platforms)),
        ("disk", f"{tool.size_gb:g} GB"),
        ("determinism", tool.determinism),
        ("installed", where),
    ]
    return [*facts, ("note", tool.note)] if tool.note else facts


def _value(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


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
