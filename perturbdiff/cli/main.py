"""The command line. Each stage is one command that reads files and writes files.

Commands import their code when they run, so that ``--help`` stays fast.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from perturbdiff.cli import hints
from perturbdiff.cli.baseline_commands import baseline_app
from perturbdiff.cli.data_commands import preprocess, stats, store_app, vocabulary_app
from perturbdiff.cli.dataset_commands import data_app
from perturbdiff.cli.evaluate_commands import adversaries, calibrate, ceiling, evaluate, merge
from perturbdiff.cli.model_commands import embed, finetune, import_checkpoint, pretrain, sample, train
from perturbdiff.cli.options import (
    Force,
    Group,
    Out,
    Overrides,
    Program,
    Quick,
    Recipe,
    Seed,
    Shared,
    Work,
    config_of,
    data_options,
    print_version,
    with_options,
)
from perturbdiff.cli.screen_commands import init, run
from perturbdiff.cli.sharing_commands import bundle_app, export
from perturbdiff.runtime.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    EXIT_STOPPED_EARLY,
    EXIT_USER_ERROR,
    INTERRUPTED,
    Interrupted,
    Killed,
    StoppedEarly,
    UserError,
)


def doctor(
    folder: Annotated[
        list[Path] | None,
        typer.Option(
            "--folder", help="Folder that a run will use (repeatable); default: the current folder."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what this machine offers.

    Looks at GPU, memory, Slurm, Apptainer, Nextflow and folders. Inside a job or container, it shows what that job or
    container gets. It says what is missing and what to do about it. The exit code is 1 if something will not work.
    """
    from perturbdiff import doctor as package

    checks = package.diagnose(folder or ())
    typer.echo(package.as_json(checks) if as_json else package.render(checks))
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(EXIT_FAILURE)


app = typer.Typer(
    name="perturbdiff",
    cls=Program,
    help="Predict how populations of single cells respond to a perturbation: raw counts → store → model → report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help halves the start-up time
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(cls=Group, help="Show recipes, or the schema of all settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(store_app, name="store")
app.add_typer(bundle_app, name="bundle")
app.add_typer(vocabulary_app, name="vocabulary")


@app.callback()
def options(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Print more messages.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Set how much a command logs while it runs."""
    if "--help" not in sys.argv and "-h" not in sys.argv:
        from perturbdiff.runtime.progress import set_up_logging

        set_up_logging(-1 if quiet else verbose)


def _done(out: Path) -> None:
    typer.echo(str(out))


app.command(cls=Work)(run)
app.command(cls=Work)(init)


@app.command(cls=Work)
def simulate(
    out: Out,
    recipe: Recipe = None,
    overrides: Overrides = None,
    cells: Annotated[
        int | None, typer.Option("--cells", min=1, help="Number of cells (simulate.cells).")
    ] = None,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Simulate counts with known effects.

    Writes counts.h5ad (raw counts), effects.parquet (the true effects) and conditions.csv.
    """
    from perturbdiff.simulation.simulation_stage import simulate as simulated

    changes = [*(overrides or []), *([f"simulate.cells={cells}"] if cells else [])]
    config = config_of(recipe, changes, seed)
    _done(simulated(out, config.simulate, seed=config.seed, force=force))


app.command(cls=Work)(preprocess)


@app.command(cls=Work)
@with_options(data_options)
def split(
    source: Annotated[Path, typer.Argument(help="A store, or the raw input (h5ad, zarr, 10x, Parquet).")],
    out: Out,
    toml: Annotated[
        Path | None, typer.Option("--toml", help="STATE-style TOML file that defines the split.")
    ] = None,
    obs: Annotated[
        Path | None, typer.Option("--obs", help="Table of cell labels, for raw input that lacks them.")
    ] = None,
    *,
    data: Shared,
) -> None:
    """Choose which conditions are held out.

    Assigns every condition to train, valid, test or unused, and writes the counts. A leak is an error.
    """
    from perturbdiff.splits.splits import make_split

    _done(make_split(source, out, data.config, toml=toml, obs=obs, **data.settings))


app.command(cls=Work)(stats)
app.command(cls=Work)(embed)
app.command(cls=Work)(import_checkpoint)

app.command(cls=Work)(pretrain)
app.command(cls=Work)(train)
app.command(cls=Work)(finetune)
app.command(cls=Work)(sample)
app.add_typer(baseline_app, name="baseline")
app.command(cls=Work)(export)

app.command(cls=Work)(evaluate)
app.command(cls=Work)(ceiling)
app.command(cls=Work)(calibrate)
app.command(cls=Work)(adversaries)
app.command(cls=Work)(merge)


@app.command(cls=Work)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders written by evaluate.")],
    out: Out,
    title: Annotated[str, typer.Option("--title", help="Title of the page.")] = "Perturbation predictions",
    bundle: Annotated[
        list[Path] | None, typer.Option("--bundle", help="Trained bundles, for training curves.")
    ] = None,
    stats: Annotated[list[Path] | None, typer.Option("--stats", help="Folders written by stats.")] = None,
    split: Annotated[list[Path] | None, typer.Option("--split", help="Split files.")] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option("--records", help="Folders of predictions, whose run records give time and memory."),
    ] = None,
    expected: Annotated[
        Path | None,
        typer.Option(
            "--expected",
            help="CSV with dataset, method, kind, log; entries without a run are shown as failed.",
        ),
    ] = None,
    logs: Annotated[
        list[Path] | None, typer.Option("--logs", help="Folders with the logs named in --expected.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Method to compare with, or an arm of --design.")
    ] = None,
    design: Annotated[
        Path | None,
        typer.Option(
            "--design",
            help="CSV of an experiment with dataset, method, part, collection, arm, level, seed, init.",
        ),
    ] = None,
    figures: Annotated[
        str, typer.Option("--figures", help="Comma-separated figures of the experiment: main, zeroshot, …")
    ] = "",
    published: Annotated[
        Path | None,
        typer.Option("--published", help="CSV of published numbers with dataset, method, metric, value."),
    ] = None,
    force: Force = False,
) -> None:
    """Compare methods on one HTML page.

    Also prints the main metrics.
    """
    from perturbdiff.reporting.page.page import headline, write_report

    settings: dict[str, Any] = {"bundles": bundle or (), "statistics": stats or (), "splits": split or ()}
    lost: dict[str, Any] = {"expected": expected, "logs": logs or ()}
    settings |= {"records": records or (), **lost}
    settings |= {"design": design, "shown": figures, "published": published}
    page = write_report(runs, out, title=title, against=against, force=force, **settings)
    typer.echo(headline(runs, **lost, design=design))
    _done(page)


app.command(cls=Work)(doctor)


@config_app.command("show", cls=Quick)
def config_show(
    recipe: Annotated[
        str | None,
        typer.Argument(
            autocompletion=hints.presets,
            help="Preset name or YAML file; without it, the presets are listed.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Print a complete recipe with the source of each value (paper, released, ours, default)."""
    from perturbdiff.config.recipes import describe, presets

    typer.echo(describe(recipe, overrides or ()) if recipe or overrides else "\n".join(presets()))


@config_app.command("schema", cls=Quick)
def config_schema() -> None:
    """Print the JSON schema of the configuration."""
    import json

    from perturbdiff.config.settings import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


def main() -> None:
    """Run the command line, and turn errors into a readable message and an exit code."""
    code, text = 0, ""
    try:
        app(prog_name="perturbdiff")
    except SystemExit as stop:  # Typer ends this way, both on success and on usage errors
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == EXIT_INTERRUPTED:  # Ctrl-C while Typer read the command line
            text = INTERRUPTED
            typer.secho(text, err=True)
    except UserError as error:
        code, text = EXIT_USER_ERROR, f"error: {error}"
        typer.secho(text, fg=typer.colors.RED, err=True)
    except PermissionError as error:
        code = EXIT_USER_ERROR
        text = f"error: {error.filename}: permission denied; get the right to read it, or give a copy that you may read"
        typer.secho(text, fg=typer.colors.RED, err=True)
    except StoppedEarly as error:
        code, text = EXIT_STOPPED_EARLY, f"stopped early: {error}"
        typer.secho(text, err=True)
    except (Interrupted, KeyboardInterrupt):
        warnings.simplefilter("ignore")  # again: a library that was interrupted has put its own filters back
        logging.lastResort = logging.NullHandler()  # libraries tell of their interrupted threads
        code, text = EXIT_INTERRUPTED, INTERRUPTED
        typer.secho(text, err=True)
    except Killed as error:
        code, text = EXIT_KILLED, f"error: {error}"
        typer.secho(text, fg=typer.colors.RED, err=True)
    except Exception:
        logging.getLogger("perturbdiff").exception(
            "this is a bug in perturbdiff; please report it with this trace"
        )
        code = EXIT_FAILURE
    if progress := sys.modules.get("perturbdiff.runtime.progress"):  # not imported by --help and --version
        progress.conclude(code, text)
    sys.exit(code)


if __name__ == "__main__":
    main()
