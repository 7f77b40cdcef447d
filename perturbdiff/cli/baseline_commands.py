"""The command ``baseline NAME …`` and its sub-commands: built-in methods, external tools and users' scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perturbdiff.cli.options import (
    Device,
    Force,
    Group,
    Out,
    Overrides,
    Part,
    Quick,
    Recipe,
    Seed,
    SplitFile,
    StorePath,
    Work,
    config_of,
    embeddings_of,
)
from perturbdiff.runtime.errors import UserError, listing, nearest

if TYPE_CHECKING:
    from perturbdiff.baselines.external.known_tools import Tool


_PREDICT = "predict"
_HELP = ("-h", "--help")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a tool, as printed by 'baseline list'.")]
Names = Annotated[
    list[str], typer.Argument(metavar="NAME…", help="Names of tools, as printed by 'baseline list'.")
]


def mount(app: typer.Typer) -> None:
    """Add the commands to a group."""
    app.command("install", cls=Work)(install)
    app.command("list", cls=Quick)(list_tools)
    app.command("show", cls=Quick)(show)
    app.command("remove", cls=Quick)(remove)


def install(
    names: Names,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            help="Python interpreter for the environment; default: a suitable one found on this machine.",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Install external tools.

    Each tool gets its own environment, with locked versions whose hashes are checked. The command prints the folders.
    """
    from perturbdiff.baselines.external import known_tools, tool_environments

    for tool in [known_tools.load(name) for name in names]:
        typer.echo(f"{tool.title} {tool.version}, licence: {tool.licence}; see {tool.url}", err=True)
        typer.echo(str(tool_environments.install(tool, python, force=force).folder))


def list_tools() -> None:
    """List built-in methods and external tools.

    External tools are shown with their versions and licences.
    """
    from perturbdiff.baselines.external import known_tools, tool_environments
    from perturbdiff.baselines.simple import BASELINES

    rows = [
        (name, "built in", "needs --embedding" if baseline.needs_vectors else "", "")
        for name, baseline in BASELINES.items()
    ]
    for tool in map(known_tools.load, known_tools.names()):
        state = "installed" if tool_environments.installed(tool) else "not installed"
        rows.append((tool.name, tool.version, state, tool.licence))
    rows.append(("script", "your own", "", "docs/adapters.md"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show(name: Name) -> None:
    """Describe a tool and its settings.

    Also shows its licence and where it is installed.
    """
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
    """Remove the environments of tools.

    Environments of earlier versions are removed too.
    """
    from perturbdiff.baselines.external import known_tools, tool_environments

    for tool in [known_tools.load(name) for name in names]:
        for folder in tool_environments.remove(tool) or ["nothing to remove"]:
            typer.echo(f"{tool.name}: {folder}")


def _facts(tool: Tool) -> list[tuple[str, str]]:
    """Return the labelled facts that `show` prints above a tool's settings."""
    from perturbdiff.baselines.external import tool_environments

    environment = tool_environments.installed(tool)
    where = "no"
    if environment:
        record = environment.record
        where = f"{environment.folder} (Python {record['python']}, {record['size_gb']} GB, {record['installed_at']})"
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


class Methods(Group):
    """A command group whose first word is either a sub-command or the name of a method."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the hidden `predict` command before the name of a method."""
        if args and args[0] not in self.commands and args[0] not in _HELP:
            if not ctx.resilient_parsing and not args[0].startswith("-") and not set(args) & set(_HELP):
                self._check(args[0])
            args = [_PREDICT, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Hide the name `predict`, so that usage lines read ``baseline NAME``."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _PREDICT else name), command, rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Offer the names of the methods beside those of the commands."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        offered = super().shell_complete(ctx, "")
        item = type(offered[0])
        return [
            one for one in (*offered, *(item(name) for name in methods())) if one.value.startswith(incomplete)
        ]

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
    help="Predict with a baseline method.\n\n"
    "A baseline is a simple method, an external tool (CPA, STATE, …) or your own script. "
    "perturbdiff baseline NAME STORE --split SPLIT --out OUT reads and writes the same files as train and sample. "
    "perturbdiff baseline NAME --help shows its options. docs/baselines.md lists the names.",
)


def methods() -> tuple[str, ...]:
    """Return the names of all built-in methods and external tools, and 'script'."""
    from perturbdiff.baselines.external import known_tools
    from perturbdiff.baselines.simple import BASELINES

    return (*BASELINES, *known_tools.names(), "script")


@baseline_app.command(_PREDICT, cls=Work, hidden=True)
def predict(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the method (docs/baselines.md), or 'script'.")
    ],
    store: StorePath,
    split: SplitFile,
    out: Out,
    part: Part = "test",
    recipe: Recipe = None,
    overrides: Overrides = None,
    embedding: Annotated[
        list[str] | None,
        typer.Option(
            "--embedding",
            metavar="perturbation=FILE",
            help="Table of perturbation vectors (parquet or npz), which kernel-ridge needs (docs/embeddings.md).",
        ),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option("--script", help="Your adapter script, for 'baseline script' (docs/adapters.md)."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python", help="Python interpreter that runs the external method (tools and scripts only)."
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option("--name", help="Name of the method in the tables (tools and scripts only).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Number of CPU threads (tools and scripts only).")
    ] = None,
    device: Device = "auto",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", help="Folder that keeps the method's input and output files (tools and scripts only)."
        ),
    ] = None,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Predict one part of a split with a baseline.

    Change the settings of tools and scripts by --set baseline.settings=quick, --set baseline.options.NAME=VALUE.
    """
    from perturbdiff.baselines import predict as built_in
    from perturbdiff.baselines.simple import BASELINES

    config = config_of(recipe, overrides, seed)
    shared: dict[str, Any] = {"part": part, "seed": config.seed, "force": force}
    external = {"script": script, "python": python, "name": label, "threads": threads, "keep": keep}
    tables = embeddings_of(embedding)
    if others := [kind for kind in tables if kind != "perturbation"]:
        raise UserError(f"--embedding {others[0]}: a baseline has no use for it; give perturbation=FILE")
    if name in BASELINES:
        _refuse(name, {**external, "set baseline.options": config.baseline.options})
        built_in(name, store, split, out, embedding=tables.get("perturbation"), **shared)
    else:
        _refuse(name, {"embedding": embedding})
        _external(name, store, split, out, config.baseline, external, {**shared, "device": device})
    typer.echo(str(out))


def _external(
    name: str,
    store: Path,
    split: Path,
    out: Path,
    config: Any,
    options: dict[str, Any],
    shared: dict[str, Any],
) -> None:
    from perturbdiff.baselines.external import known_tools
    from perturbdiff.baselines.external.external_stage import predict_external
    from perturbdiff.baselines.external.methods import script_method, tool_method

    chosen = {"python": options["python"], "name": options["name"]}
    if name == "script":
        if options["script"] is None:
            raise UserError("baseline script: name the script with --script FILE (docs/adapters.md)")
        method = script_method(options["script"], config, **chosen)
    else:
        _refuse(name, {"script": options["script"]})
        method = tool_method(known_tools.load(name), config, **chosen)
    rest = {"threads": options["threads"], "keep": options["keep"], "timeout_hours": config.timeout_hours}
    predict_external(method, store, split, out, **rest, **shared)


def _refuse(name: str, options: dict[str, Any]) -> None:
    """Raise an error for options that this method does not have."""
    refused = [option for option, value in options.items() if value not in (None, {})]
    if refused:
        raise UserError(f"baseline {name}: has no --{refused[0]}")


mount(baseline_app)
