"""The commands ``baseline install``, ``list``, ``show``, ``remove``: methods of others and their environments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perturbdiff.cli.options import Force
from perturbdiff.cli.program import Work

if TYPE_CHECKING:
    from perturbdiff.baselines.external.known_tools import Tool

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
