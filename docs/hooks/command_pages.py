"""Pages on the commands, made of the command line's own objects: their help, arguments, options and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from perturbdiff.cli.main import app

PROGRAM = "perturbdiff"
_KINDS = {"path": "PATH", "str": "TEXT", "int": "NUMBER", "float": "NUMBER"}
_EXAMPLE = re.compile(r"^\s*(\$ )?(perturbdiff|nextflow) ")
_UPPER = re.compile(r"\{([^{}]*)\}")
_DEFAULT = re.compile(r"; default: (?P<default>[^;]+?)\.(?=\s|$)")
_TYPE = re.compile(r"<(?:list\[)?(?P<type>\w+)(?:\])?(?: range)?>")
_RANGE = re.compile(r"^(?:(?P<low>-?\d+)<=)?x(?:<=(?P<high>\d+)|>=(?P<least>-?\d+))?$")
_FACTS = re.compile(r"\s*\[(?P<facts>[^\[\]]*)\]\s*$")  # what Typer appends: [default: 1; required]


@dataclass(frozen=True)
class Command:
    """A command, or a group of commands.

    Attributes
    ----------
    words
        Words after the program's name, such as ``("store", "info")``.
    command, context
        Typer's objects.
    children
        The commands of a group.
    """

    words: tuple[str, ...]
    command: Any
    context: Any
    children: tuple[Command, ...] = ()

    @property
    def title(self) -> str:
        """What one types, such as ``perturbdiff store info``."""
        return " ".join((PROGRAM, *self.words))


def pages() -> dict[str, tuple[str, str]]:
    """Return the title and the Markdown text of every page by its name, the overview first."""
    program = _commands()
    found = {"index": ("Overview", _overview(program))}
    for command in program.children:
        found[command.words[0]] = (command.words[0], "\n".join(_page(command, level=1)))
    return found


def _commands() -> Command:
    root = typer.main.get_command(app)
    return _read((), root, _context(root, PROGRAM, parent=None))


def _context(command: Any, name: str, parent: Any) -> Any:
    return command.context_class(command, info_name=name, parent=parent)


def _read(words: tuple[str, ...], command: Any, context: Any) -> Command:
    children = []
    for name, child in getattr(command, "commands", {}).items():
        # a hidden command stands for every first word that is not a command, such as the name of a baseline
        shown = child.params[0].metavar if child.hidden else name
        inner = _context(child, "" if child.hidden else name, context)
        children.append(_read((*words, shown), child, inner))
    return Command(words, command, context, tuple(children))


def _overview(program: Command) -> str:
    rows = [
        f"| [`{command.title}`]({command.words[0]}.md) | {_first_sentence(command.command.help)} |"
        for command in program.children
    ]
    options = _options(program)
    return "\n".join(
        [
            "# Commands",
            "",
            "These pages are made from the command line itself. `perturbdiff COMMAND --help` prints the same.",
            "",
            "| command | |",
            "|---|---|",
            *rows,
            "",
            "## Options of every command",
            "",
            "They stand before the name of the command, as in `perturbdiff -q train …`.",
            "",
            *options,
            "",
            "## Exit codes",
            "",
            "| code | meaning |",
            "|---|---|",
            *(f"| {code} | {meaning} |" for code, meaning in _exit_codes().items()),
            "",
        ]
    )


def _exit_codes() -> dict[int, str]:
    from perturbdiff.runtime import errors

    return {
        0: "The command is done, or an equal output was there already.",
        errors.EXIT_FAILURE: "An error that is no mistake of yours, or `doctor` found a problem.",
        errors.EXIT_USER_ERROR: "A mistake in the input or the options. The message says what to change.",
        errors.EXIT_STOPPED_EARLY: "Training stopped early and kept a checkpoint. The same command continues.",
        errors.EXIT_INTERRUPTED: "You interrupted the command.",
        errors.EXIT_KILLED: "A process that did the work was killed, most likely for lack of memory.",
    }


def _page(command: Command, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{command.title}`" if level > 1 else f"# {command.words[0]}"
    yield ""
    yield from _text(command.command.help)
    if not command.children:
        yield from ["```console", f"$ {_usage(command)}", "```", ""]
        yield from _options(command)
    yield from _text(_epilog(command))
    for child in command.children:
        yield from _page(child, level + 1)


def _epilog(command: Command) -> str:
    """Return what the help ends with: the command's examples."""
    formatter = command.context.make_formatter()
    formatter.width = 1000
    command.command.format_epilog(command.context, formatter)
    return re.sub(r"^\s*Examples:\s*$", "", formatter.getvalue(), flags=re.M)


def _usage(command: Command) -> str:
    usage = command.command.get_usage(command.context).removeprefix("Usage: ")
    return re.sub(r"\s+", " ", _UPPER.sub(lambda match: match[1].upper(), usage)).strip()


def _options(command: Command) -> Iterator[str]:
    records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in command.command.get_params(command.context):
        record = parameter.get_help_record(command.context)
        if record is not None and parameter.name != "help":
            records[parameter.param_type_name].append(record)
    for kind, found in records.items():
        if found:
            yield from [f"| {kind} | meaning | default |", "|---|---|---|"]
            yield from (_row(_name(kind, name), text) for name, text in found)
            yield ""


def _name(kind: str, shown: str) -> str:
    """Return the name of an argument or option with what stands for its value, as usage lines have it."""
    if kind == "argument":
        return shown.split(" <")[0].upper()
    return _TYPE.sub(lambda match: _KINDS.get(match["type"].lower(), match[0]), shown)


def _row(name: str, text: str) -> str:
    """Return a row of a table. Typer ends a text with facts in brackets, and a text may itself name a default."""
    match = _FACTS.search(text)
    facts = match["facts"].split("; ") if match else []
    text = text[: match.start()] if match else text
    shown = [_fact(fact) for fact in facts]
    if said := _DEFAULT.search(text):
        text = f"{text[: said.start()]}. {text[said.end() :]}"
        shown.insert(0, said["default"])
    return f"| `{_squeezed(name)}` | {_linked(_cell(text))} | {_cell(', '.join(shown))} |"


def _fact(text: str) -> str:
    if text.startswith("default: "):
        return f"`{text.removeprefix('default: ')}`"
    if bounds := _RANGE.match(text):
        return f"at least {bounds['least']}" if bounds["least"] else f"{bounds['low']} to {bounds['high']}"
    return text


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    """Return a text in a table. In code a bar needs no escape."""
    return _squeezed(text).replace("|", "\\|")


def _linked(text: str) -> str:
    """Make links of the pages and code of the options that a text names."""
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1](../../\1.md)", text)
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)


def _text(text: str | None) -> Iterator[str]:
    """Yield the lines of a help text. Its examples become a block of code."""
    examples: list[str] = []
    for paragraph in re.split(r"\n\s*\n", (text or "").replace("\b", "").strip()):
        lines = paragraph.strip("\n").splitlines()
        said = [line.strip() for line in lines if not _EXAMPLE.match(line)]
        if said:
            yield from _block(examples)
            yield from [_linked(" ".join(said)), ""]
            examples = []
        examples += [line.strip().removeprefix("$ ") for line in lines if _EXAMPLE.match(line)]
    yield from _block(examples)


def _block(examples: list[str]) -> list[str]:
    return ["```bash", *examples, "```", ""] if examples else []


def _first_sentence(text: str | None) -> str:
    paragraph = (text or "").strip().split("\n\n")[0]
    return _linked(_cell(paragraph.split(". ")[0]))
