"""The commands ``evaluate``, ``ceiling``, ``calibrate``, ``merge`` and ``adversaries``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perturbdiff.cli.options import (
    BatchColumn,
    CellTypeColumn,
    Control,
    Force,
    Out,
    Overrides,
    Part,
    PerturbationColumn,
    Recipe,
    Seed,
    Shared,
    changed,
    config_of,
    shard_of,
    with_options,
)
from perturbdiff.runtime.errors import UserError

Truth = Annotated[Path, typer.Argument(help="Real cells: a store or an AnnData file (h5ad or zarr).")]
ContextColumn = Annotated[
    str | None,
    typer.Option(
        "--context-col",
        metavar="COLUMN",
        help="obs column of the contexts to score separately; default: cell types, if any.",
    ),
]
DefinitionName = Annotated[
    Literal["perturbdiff", "cell-eval-0.6.6", "cell-eval-0.8.2", "cell-eval2"] | None,
    typer.Option(
        "--definition",
        help="Metric definitions to use: ours (default) or those of a cell-eval release.",
    ),
]
Scale = Annotated[
    Literal["log1p", "counts"] | None,
    typer.Option("--scale", help="Units of the values in AnnData files that do not declare them."),
]
Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="A,B", help="Metrics or metric families to compute; default: all."),
]
TargetGenes = Annotated[
    Path | None,
    typer.Option(
        "--targets",
        help="CSV or TSV (perturbation, gene) of the genes that perturbations act on; default: those in their names.",
    ),
]
ScoredGenes = Annotated[
    Path | None,
    typer.Option(
        "--genes",
        help="Text file, vocabulary or store with the genes to score, if the truth is a store; default: all of them.",
    ),
]
SetColumn = Annotated[
    str | None,
    typer.Option(
        "--set-col",
        metavar="COLUMN",
        help="obs column of the truth that says which cells were a set (well, guide); default: as the store knows it.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", "-t", min=1, help="Number of threads; default: all CPUs. The scores do not depend on it."
    ),
]
Shard = Annotated[
    str,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Compute only part I of N, counted from 0. The command merge joins the parts.",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", help="Name of the data set in the tables; default: the name of the truth."),
]


def scoring_options(
    perturbation: PerturbationColumn = None,
    control: Control = None,
    context: ContextColumn = None,
    cell_type: CellTypeColumn = None,
    batch: BatchColumn = None,
    definition: DefinitionName = None,
    scale: Scale = None,
    metrics: Metrics = None,
    targets: TargetGenes = None,
    genes: ScoredGenes = None,
    sets: SetColumn = None,
    threads: Threads = None,
    shard: Shard = "0/1",
    dataset: Dataset = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    seed: Seed = None,
    force: Force = False,
) -> Shared:
    """Collect the options that ``evaluate``, ``ceiling`` and ``calibrate`` share. Options override the recipe."""
    config = config_of(recipe, overrides, seed)
    options = {
        "perturbation_key": perturbation,
        "control": control,
        "context_column": context,
        "cell_type_key": cell_type,
        "batch_key": batch,
        "definition": definition,
        "scale": scale,
        "metrics": _names(metrics),
        "targets": None if targets is None else str(targets),
        "genes": None if genes is None else str(genes),
        "set_column": sets,
    }
    settings: dict[str, Any] = {"dataset": dataset, "seed": config.seed, "force": force}
    settings |= {"threads": threads, "shard": shard_of(shard)}
    return Shared(changed(config.evaluate, options), settings)


@with_options(scoring_options)
def evaluate(
    predictions: Annotated[Path, typer.Argument(help="Predicted cells: an AnnData file (h5ad or zarr).")],
    truth: Truth,
    out: Out,
    predicted_controls: Annotated[
        bool,
        typer.Option(
            "--predicted-controls", help="Measure predicted changes from the prediction's own control cells."
        ),
    ] = False,
    missing: Annotated[
        Literal["error", "skip"] | None,
        typer.Option("--missing", help="How to handle real conditions without a prediction."),
    ] = None,
    replicate: Annotated[
        str | None,
        typer.Option(
            "--replicate-col",
            metavar="COLUMN",
            help="obs column of the truth with replicates (donors, guides): test their summed counts too (pydeseq2).",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="Name of the method in the tables; default: the file's name."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="DIR",
            help="Folder of calibrate, to say which metrics mean something here.",
        ),
    ] = None,
    ends: Annotated[
        Path | None,
        typer.Option(
            "--ends",
            metavar="DIR",
            help="cell-eval2: folder of an evaluation of the same truth, whose mean response and replicates are read.",
        ),
    ] = None,
    *,
    scoring: Shared,
) -> None:
    """Score predictions against real cells.

    Computes the metrics of cell-eval, R², distances between populations, the realism of the cells, and DE tables.
    Files from perturbdiff need no options. For other AnnData files, name the columns, the control label and the scale.
    Options override the recipe.
    """
    from perturbdiff.evaluation.evaluation_stage import evaluate as run

    controls = "own" if predicted_controls else None
    config = changed(
        scoring.config, {"missing": missing, "controls": controls, "replicate_column": replicate}
    )
    more: dict[str, Any] = {"method": method, "calibration": calibration, "ends": ends}
    typer.echo(str(run(predictions, truth, out, config, **more, **scoring.settings)))


@with_options(scoring_options)
def ceiling(
    truth: Truth,
    out: Out,
    split: Annotated[
        Path | None, typer.Option("--split", help="Score only the conditions in one part of this split.")
    ] = None,
    part: Part = "test",
    reference: Annotated[
        Literal["technical_duplicate", "interpolated_duplicate", "perturbed_mean", "control"],
        typer.Option(
            "--reference",
            help="Real cells that serve as the prediction: the other half, or another reference.",
        ),
    ] = "technical_duplicate",
    *,
    scoring: Shared,
) -> None:
    """Score real cells against real cells.

    One random half of each condition's cells serves as the prediction of the other half, and each half has its own
    half of the controls. The scores are means over five such splits. No model can be expected to score clearly better
    than this ceiling. Without a split, all conditions are used.

    Other references show what less knowledge scores: half of the other half and half cells of other perturbations, only
    cells of other perturbations, or control cells.
    """
    from perturbdiff.evaluation.ceiling_stage import ceiling as run

    settings = {**scoring.settings, "reference": reference}
    typer.echo(str(run(truth, out, scoring.config, split=split, part=part, **settings)))


@with_options(scoring_options)
def calibrate(
    truth: Truth,
    out: Out,
    split: Annotated[
        Path | None, typer.Option("--split", help="Use only the conditions in one part of this split.")
    ] = None,
    part: Part = "test",
    *,
    scoring: Shared,
) -> None:
    """Find out which metrics mean something on these data.

    Scores references whose order is known: half of the real cells, a mixture, the mean of the other perturbations and
    the controls. A metric that does not put them in order cannot tell good predictions from bad ones here. Says also
    how well the effects replicate. The folder is for evaluate --calibration.
    """
    from perturbdiff.evaluation.calibration.calibration_stage import calibrate as run

    settings = {name: value for name, value in scoring.settings.items() if name != "shard"}
    if scoring.settings["shard"] != (0, 1):
        raise UserError("--shard: calibrate has no parts; leave it out")
    typer.echo(str(run(truth, out, scoring.config, split=split, part=part, **settings)))


def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(
            help="All N folders or files that evaluate, ceiling or sample wrote with --shard I/N."
        ),
    ],
    out: Out,
    force: Force = False,
) -> None:
    """Join the parts that --shard I/N wrote.

    The parts belong to one evaluation or one sampling run. The result has the same tables or predictions as a single
    run.
    """
    from perturbdiff.runtime.job_shards import stage_of

    if stage_of(parts[0]) == "sample":
        from perturbdiff.sampling.shards import merge as join
    else:
        from perturbdiff.evaluation.evaluation_stage import merge as join

    typer.echo(str(join(parts, out, force=force)))


def _names(text: str | None) -> tuple[str, ...] | None:
    """Split a comma-separated list of names."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
