"""Options that several commands share, and the functions that parse them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from perturbdiff import __version__
from perturbdiff.cli import hints
from perturbdiff.cli.hints import EXAMPLES
from perturbdiff.cli.usage_errors import UsageError, explain, words_of
from perturbdiff.runtime.errors import Interrupted, UserError

if TYPE_CHECKING:
    from perturbdiff.config.settings import Config
    from perturbdiff.embeddings.embedding_tables import SemanticKind

logger = logging.getLogger(__name__)

LARGEST_SEED = (1 << 32) - 1  # as in perturbdiff.config.data_settings, whose import would slow down --help


def _write_examples(ctx: typer.Context, formatter: Any) -> None:
    """Add a command's examples to its help."""
    with formatter.section("Examples"):
        for line in EXAMPLES.get(" ".join(words_of(ctx)), ()):
            formatter.write(f"{' ' * formatter.current_indent}{line}\n")


class Quick(TyperCommand):
    """A command that ends within a second. Its help ends with examples."""

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(ctx, formatter)


class Work(Quick):
    """A command that takes more than a second. It logs a line before the slow imports."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Log the name of the command, then run it."""
        logger.info("%s: loading libraries and inputs", " ".join(words_of(ctx)))
        return super().invoke(ctx)


class Group(TyperGroup):
    """Several commands. Their help ends with examples."""

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(ctx, formatter)


class Program(Group):
    """The whole command line. A wrong one is a `UserError` that says what to write instead."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the words before the command."""
        with _explaining():
            return super().make_context(*args, **options)

    def invoke(self, ctx: typer.Context) -> Any:
        """Run a command.

        Raises
        ------
        Interrupted
            After Ctrl-C. Typer alone would exit without a message.
        """
        try:
            with _explaining():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Turn what Typer says of a wrong command line into an error that names the right one."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise UserError(explain(error)) from None


@dataclass(frozen=True)
class Shared:
    """What the options that several commands share become: a section of the recipe, and arguments of the stage."""

    config: Any
    settings: dict[str, Any]


def with_options(shared: Callable[..., Shared]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the parameters of ``shared`` too.

    They follow the command's own in the help. The command's last parameter receives what ``shared`` returns.
    """
    common = inspect.signature(shared, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters
        *own, last = parameters

        @functools.wraps(command)
        def run(**values: Any) -> None:
            rest = {name: values.pop(name) for name in common}
            command(**values, **{last: shared(**rest)})

        merged = [*(parameters[name] for name in own), *common.values()]
        run.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue] # Typer reads it
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in merged]
        )
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
        return run

    return decorate


StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="Store folder.")]
SplitFile = Annotated[Path, typer.Option("--split", help="Split file (parquet).")]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        autocompletion=hints.presets,
        help="Recipe: a preset name or a YAML file; default: recommended.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        autocompletion=hints.keys,
        help="Change one value of the recipe (repeatable), e.g. train.max_steps=500.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, max=LARGEST_SEED, help="Random seed; default: the seed in the recipe."),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Run even if an equal output exists. An output that took long to make is kept as OUT.previous.",
    ),
]
PerturbationColumn = Annotated[
    str | None, typer.Option("--pert-col", metavar="COLUMN", help="Column with the perturbation.")
]
Control = Annotated[
    str | None, typer.Option("--control", metavar="LABEL", help="Label of the control cells.")
]
CellTypeColumn = Annotated[
    str | None,
    typer.Option("--cell-type-col", metavar="COLUMN", help="Column with the cell type; none: one type."),
]
BatchColumn = Annotated[
    str | None,
    typer.Option("--batch-col", metavar="COLUMN", help="Column with the batch or donor; none: one batch."),
]
SetColumn = Annotated[
    str | None,
    typer.Option(
        "--set-col",
        metavar="COLUMN",
        help="Column that says which cells were a set (well, plate, guide, replicate); none: unknown.",
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Device to compute on.")]


def _new_place(out: Path) -> Path:
    """Raise an error at once if no output can be written to this path."""
    from perturbdiff.runtime.outputs import check_place

    check_place(out)
    return out


Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        callback=_new_place,
        help="Output path. The output appears there only when it is complete.",
    ),
]
Part = Annotated[
    Literal["train", "valid", "test"], typer.Option("--part", help="Part of the split to predict.")
]
Checkpoints = Annotated[
    Path | None,
    typer.Option("--checkpoints", help="Folder for checkpoints to resume from; default: OUT.checkpoints."),
]
Resume = Annotated[
    Literal["auto", "never"],
    typer.Option("--resume", help="Whether to continue from a checkpoint, if there is one."),
]
Embeddings = Annotated[
    list[str] | None,
    typer.Option(
        "--embedding",
        metavar="KIND=FILE",
        help="Table of semantic vectors (parquet or npz). KIND: perturbation, cell_type or gene (docs/embeddings.md).",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        help="Number of worker processes; default: one per CPU if the data are large enough.",
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--dask-scheduler",
        metavar="ADDRESS",
        help="Use the workers of a running dask cluster instead. Anyone who can reach that scheduler can run code as "
        "you, unless it requires TLS (tls://HOST:PORT). slurm:N starts N Slurm jobs with workers (docs/scale.md).",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", metavar="SIZE", help="Memory limit of all processes together, e.g. 8GB."),
]
Labels = Annotated[
    list[Path] | None,
    typer.Option(
        "--obs",
        help="Table of cell labels by cell name (csv, tsv, parquet), for inputs that lack them. Give it once, or once "
        "per input.",
    ),
]


def size_in_bytes(text: str | None) -> int | None:
    """Return the bytes of a size such as '8GB' or '1.5 GiB'.

    Raises
    ------
    UserError
        If the text is not a size.
    """
    if text is None:
        return None
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except (ValueError, TypeError):
        raise UserError(f"--memory-limit {text}: is not a size; write for example 8GB") from None


def print_version(value: bool) -> None:
    """Print the version and exit."""
    if value:
        typer.echo(f"perturbdiff {__version__}")
        raise typer.Exit


def config_of(recipe: str | None, overrides: list[str] | None, seed: int | None = None) -> Config:
    """Return the recipe with the changes given on the command line."""
    from perturbdiff.config.recipes import load

    config = load(recipe, overrides or ())
    return config if seed is None else config.model_copy(update={"seed": seed})


def changed(section: Any, options: dict[str, Any]) -> Any:
    """Return a section of the recipe with those values replaced whose option was used; 'none' stands for none."""
    used = {key: None if value == "none" else value for key, value in options.items() if value is not None}
    return section.model_copy(update=used)


def data_options(
    perturbation: PerturbationColumn = None,
    control: Control = None,
    cell_type: CellTypeColumn = None,
    batch: BatchColumn = None,
    sets: SetColumn = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    seed: Seed = None,
    force: Force = False,
) -> Shared:
    """Collect the options of commands that read counts: the recipe, with the columns that the options name."""
    config = config_of(recipe, overrides, seed)
    columns = {"perturbation_key": perturbation, "cell_type_key": cell_type, "batch_key": batch}
    columns["set_key"] = sets
    data = changed(config.data, {**columns, "control": control})
    config = config.model_copy(update={"data": data})
    return Shared(config, {"seed": config.seed, "force": force})


def store_and_split(text: str) -> tuple[Path, Path]:
    """Parse ``STORE:SPLIT``."""
    store, colon, parts = text.partition(":")
    if not colon:
        raise UserError(f"--downstream {text!r}: write it as STORE:SPLIT")
    return Path(store), Path(parts)


def shard_of(text: str) -> tuple[int, int]:
    """Parse ``I/N``, with I counted from 0."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UserError(f"--shard {text!r}: write it as I/N with I counted from 0, e.g. 0/4")
    return int(index), int(count)


def embeddings_of(texts: list[str] | None) -> dict[SemanticKind, Path]:
    """Parse a list of ``KIND=FILE`` texts."""
    kinds: dict[str, SemanticKind] = {
        "perturbation": "perturbation",
        "cell_type": "cell_type",
        "gene": "gene",
    }
    tables: dict[SemanticKind, Path] = {}
    for text in texts or ():
        name, _, path = text.partition("=")
        kind = kinds.get(name.strip())
        if kind is None or not path:
            raise UserError(f"--embedding {text!r}: write it as KIND=FILE, KIND one of {', '.join(kinds)}")
        if kind in tables:
            raise UserError(f"--embedding: two tables for {kind}; join them into one file")
        tables[kind] = Path(path)
    return tables
