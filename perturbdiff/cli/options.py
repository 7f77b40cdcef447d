"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from perturbdiff import __version__
from perturbdiff.runtime.errors import Interrupted, UserError

if TYPE_CHECKING:
    from perturbdiff.config.settings import Config
    from perturbdiff.embeddings.embedding_tables import SemanticKind

logger = logging.getLogger(__name__)

LARGEST_SEED = (1 << 32) - 1  # as in perturbdiff.config.data_settings, which help does without


class Work(TyperCommand):
    """A command that takes longer than a second: it says so before it imports what it needs."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Say what begins, then run the command."""
        names, at = [], ctx
        while at.parent is not None:
            names.append(str(at.info_name or ""))
            at = at.parent
        logger.info("%s: loading libraries and inputs", " ".join(filter(None, reversed(names))))
        return super().invoke(ctx)


class Program(TyperGroup):
    """The whole command line."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run a command.

        Raises
        ------
        Interrupted
            After Ctrl-C, which Typer would answer without a word.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except SystemExit as stop:  # Lightning's answer to a second Ctrl-C
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise Interrupted from None
            raise


Recipe = Annotated[
    str | None, typer.Option("--config", "-c", help="Preset name or YAML file; default: recommended.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change one value, e.g. train.max_steps=500."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed; default: the recipe's.")
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Run even if an equal output is there. One that took long to make is kept as OUT.previous.",
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to compute.")]


def _new_place(out: Path) -> Path:
    """Refuse at once what can be the place of no output."""
    from perturbdiff.runtime.outputs import check_place

    check_place(out)
    return out


Out = Annotated[
    Path, typer.Option("--out", "-o", callback=_new_place, help="Output; appears only when complete.")
]
Part = Annotated[
    Literal["train", "valid", "test"], typer.Option("--part", help="Part of the split to predict.")
]
Checkpoints = Annotated[
    Path | None,
    typer.Option("--checkpoints", help="Folder for resumable checkpoints; default: OUT.checkpoints."),
]
Resume = Annotated[
    Literal["auto", "never"], typer.Option("--resume", help="Continue from a checkpoint if there is one.")
]
Embeddings = Annotated[
    list[str] | None,
    typer.Option(
        "--embedding",
        metavar="KIND=FILE",
        help="Semantic table (parquet or npz) of KIND perturbation, cell_type or gene; docs/embeddings.md.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, help="Worker processes; default: one per CPU for data that are worth it."
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--dask-scheduler",
        metavar="ADDRESS",
        help="Use a running dask cluster's workers instead. Whoever reaches that scheduler can run code as you, "
        "unless it asks for TLS (tls://HOST:PORT, docs/scale.md).",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", metavar="SIZE", help="Memory of all processes together, e.g. 8GB."),
]
Labels = Annotated[
    list[Path] | None,
    typer.Option(
        "--obs",
        help="Table of cell labels by cell name (csv, tsv, parquet), for inputs without them; once, or per input.",
    ),
]


def size_in_bytes(text: str | None) -> int | None:
    """Return the bytes of a size such as '8GB' or '1.5 GiB'.

    Raises
    ------
    UserError
        If it is none.
    """
    if text is None:
        return None
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except (ValueError, TypeError):
        raise UserError(f"--memory-limit {text}: is not a size; write for example 8GB") from None


def print_version(value: bool) -> None:
    """Print the version and end."""
    if value:
        typer.echo(f"perturbdiff {__version__}")
        raise typer.Exit


def config_of(recipe: str | None, overrides: list[str] | None, seed: int | None = None) -> Config:
    """Return the recipe with its values changed by the command line's."""
    from perturbdiff.config.recipes import load

    chosen = load(recipe, overrides or ())
    return chosen if seed is None else chosen.model_copy(update={"seed": seed})


def store_and_split(text: str) -> tuple[Path, Path]:
    """Read ``STORE:SPLIT``."""
    store, colon, parts = text.partition(":")
    if not colon:
        raise UserError(f"--downstream {text!r}: write it as STORE:SPLIT")
    return Path(store), Path(parts)


def shard_of(text: str) -> tuple[int, int]:
    """Read ``I/N``, I counted from 0."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UserError(f"--shard {text!r}: write it as I/N with I counted from 0, e.g. 0/4")
    return int(index), int(count)


def embeddings_of(texts: list[str] | None) -> dict[SemanticKind, Path]:
    """Read ``KIND=FILE`` texts."""
    kinds: dict[str, SemanticKind] = {
        "perturbation": "perturbation",
        "cell_type": "cell_type",
        "gene": "gene",
    }
    found: dict[SemanticKind, Path] = {}
    for text in texts or ():
        name, _, path = text.partition("=")
        kind = kinds.get(name.strip())
        if kind is None or not path:
            raise UserError(f"--embedding {text!r}: write it as KIND=FILE, KIND one of {', '.join(kinds)}")
        if kind in found:
            raise UserError(f"--embedding: two tables for {kind}; join them into one file")
        found[kind] = Path(path)
    return found
