"""The commands that make and use models: ``pretrain``, ``train``, ``finetune``, ``sample`` and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perturbdiff.cli import hints
from perturbdiff.cli.options import (
    LARGEST_SEED,
    BatchColumn,
    CellTypeColumn,
    Checkpoints,
    Control,
    Device,
    Embeddings,
    Force,
    Out,
    Overrides,
    Part,
    PerturbationColumn,
    Recipe,
    Resume,
    Seed,
    Shared,
    SplitFile,
    StorePath,
    config_of,
    embeddings_of,
    shard_of,
    store_and_split,
    with_options,
)

ModelGenes = Annotated[
    Path | None,
    typer.Option(
        "--genes",
        help="Text file, vocabulary or store with the genes of the model; default: the genes of the data.",
    ),
]


def training_options(
    embeddings: Embeddings = None,
    scored_on: Annotated[
        Path | None,
        typer.Option(
            "--scored-on",
            metavar="GENES",
            help="Text file, vocabulary or store. Stop at once if the model lacks one of its genes, because "
            "predictions could then not be scored on it.",
        ),
    ] = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            min=1,
            metavar="N",
            help="Keep a complete bundle every N steps in OUT/steps (train.keep_every).",
        ),
    ] = None,
    checkpoints: Checkpoints = None,
    resume: Resume = "auto",
    device: Device = "auto",
    seed: Seed = None,
    force: Force = False,
) -> Shared:
    """Collect the options that ``pretrain``, ``train`` and ``finetune`` share."""
    changes = [*(overrides or ()), *([] if keep_every is None else [f"train.keep_every={keep_every}"])]
    settings: dict[str, Any] = {"embeddings": embeddings_of(embeddings), "checkpoints": checkpoints}
    settings |= {"scored_on": scored_on, "resume": resume, "device": device, "force": force}
    return Shared(config_of(recipe, changes, seed), settings)


@with_options(training_options)
def pretrain(
    stores: Annotated[list[Path], typer.Argument(help="Stores with unperturbed cells (and training cells).")],
    out: Out,
    downstream: Annotated[
        list[str] | None,
        typer.Option(
            "--downstream",
            metavar="STORE:SPLIT",
            help="Store and split used for finetuning later. Their validation and test data are left out.",
        ),
    ] = None,
    genes: ModelGenes = None,
    *,
    training: Shared,
) -> None:
    """Learn a prior from unperturbed cells."""
    from perturbdiff.training.training_stages import pretrain as run

    pairs = [store_and_split(text) for text in downstream or []]
    bundle = run(stores, out, training.config, downstream=pairs, genes=genes, **training.settings)
    typer.echo(str(bundle))


@with_options(training_options)
def train(
    store: StorePath, split: SplitFile, out: Out, genes: ModelGenes = None, *, training: Shared
) -> None:
    """Train a model from scratch and write a bundle."""
    from perturbdiff.training.training_stages import train as run

    typer.echo(str(run(store, split, out, training.config, genes=genes, **training.settings)))


@with_options(training_options)
def finetune(
    bundle: Annotated[Path, typer.Argument(help="Pretrained model bundle.")],
    store: StorePath,
    split: SplitFile,
    out: Out,
    transfer: Annotated[
        Literal["keep", "reinit", "new-genes"],
        typer.Option(
            "--transfer",
            help="Input and output layers: pretrained (keep), new weights for the pretrained genes (reinit), or new "
            "weights for the genes of this store (new-genes).",
        ),
    ] = "keep",
    *,
    training: Shared,
) -> None:
    """Continue from a pretrained bundle on perturbation data."""
    from perturbdiff.training.training_stages import finetune as run

    typer.echo(str(run(bundle, store, split, out, training.config, transfer=transfer, **training.settings)))


def sample(
    bundle: Annotated[Path, typer.Argument(help="Model bundle.")],
    store: Annotated[Path, typer.Argument(help="Store with the control cells.")],
    out: Out,
    split: Annotated[
        Path | None, typer.Option("--split", help="Split file. The conditions of one part are predicted.")
    ] = None,
    part: Part = "test",
    conditions: Annotated[
        Path | None,
        typer.Option(
            "--conditions",
            help="CSV of conditions to predict instead: cell_type, batch, perturbation[, n_cells, guidance].",
        ),
    ] = None,
    perturbation: PerturbationColumn = None,
    cell_type: CellTypeColumn = None,
    batch: BatchColumn = None,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Predict only part I of N, counted from 0.")
    ] = "0/1",
    random_init: Annotated[
        bool,
        typer.Option(
            "--random-init", help="Use untrained weights, to see what the architecture alone predicts."
        ),
    ] = False,
    values: Annotated[
        Literal["log1p", "counts"] | None,
        typer.Option(
            "--values",
            help="What to write: log1p values of the model's genes, or whole counts of all genes of the store "
            "(sample.values).",
        ),
    ] = None,
    embeddings: Embeddings = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--config",
            "-c",
            autocompletion=hints.presets,
            help="Preset name or YAML file; default: the bundle's own recipe.",
        ),
    ] = None,
    overrides: Overrides = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="Device to compute on: auto, cpu, cuda, or a list of GPUs such as cuda:0,cuda:1."
        ),
    ] = "auto",
    processes: Annotated[
        int,
        typer.Option(
            "--processes", min=1, help="Number of processes on each device. The results do not depend on it."
        ),
    ] = 1,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            max=LARGEST_SEED,
            help="Random seed for the noise and the choice of control cells.",
        ),
    ] = 0,
    force: Force = False,
) -> None:
    """Generate cells with a trained model.

    Predicts the conditions in one part of a split, or those in a table. Writes AnnData in log1p units, or counts, that
    includes the real control cells. Without --config, the bundle's own recipe is used, with any changes made by --set.
    --pert-col, --cell-type-col and --batch-col name the columns of the table that --conditions gives.
    """
    from perturbdiff.checkpoint.bundle_record import recipe_of
    from perturbdiff.config import recipes
    from perturbdiff.sampling import sample as run

    changes = [*(overrides or ()), *([] if values is None else [f"sample.values={values}"])]
    config = recipes.load(recipe, changes) if recipe else None
    if config is None and changes:
        config = recipes.changed(recipe_of(bundle), changes)
    settings: dict[str, Any] = {
        "split": split,
        "part": part,
        "conditions": conditions,
        "columns": {"perturbation": perturbation, "cell_type": cell_type, "batch": batch},
        "shard": shard_of(shard),
        "random_init": random_init,
        "embeddings": embeddings_of(embeddings),
        "config": config.sample if config else None,
        "device": device,
        "processes": processes,
        "seed": seed,
    }
    typer.echo(str(run(bundle, store, out, **settings, force=force)))


def import_checkpoint(
    file: Annotated[Path, typer.Argument(help="Lightning checkpoint from the authors' released code.")],
    out: Out,
    genes: Annotated[
        Path | None,
        typer.Option(
            "--genes", help="Gene list of the model: the released pickle, or a .txt, .json or .npy file."
        ),
    ] = None,
    weights: Annotated[
        Literal["ema", "raw"],
        typer.Option(
            "--weights",
            help="Weights to import: the moving average (ema), or those of the step itself (raw).",
        ),
    ] = "ema",
    control: Control = None,
    embeddings: Embeddings = None,
    target_sum: Annotated[
        float | None,
        typer.Option("--target-sum", min=0, help="Depth to which the training counts were scaled."),
    ] = None,
    force: Force = False,
) -> None:
    """Turn a released checkpoint into a bundle.

    No code in the file is executed. The bundle works with sample and finetune. Without --control, the control has the
    label that it has in the released data.
    """
    from perturbdiff.released.checkpoint_import import import_checkpoint as run

    settings: dict[str, Any] = {"genes": genes, "weights": weights, "control": control}
    settings |= {"embeddings": embeddings_of(embeddings), "target_sum": target_sum}
    typer.echo(str(run(file, out, **settings, force=force)))


def embed(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="FASTA file, or CSV/TSV with columns name and sequence, smiles or text; a store for co-expression.",
        ),
    ],
    out: Out,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Encoder: a folder, a name on the Hugging Face hub, or a short name such as esm2-650m, chemberta. "
            "co-expression: vectors of genes from the control cells of a store.",
        ),
    ],
    kind: Annotated[
        Literal["sequence", "smiles", "text"] | None,
        typer.Option("--kind", help="What INPUT contains; default: inferred from its columns."),
    ] = None,
    pool: Annotated[
        Literal["mean", "cls", "last"] | None,
        typer.Option(
            "--pool", help="How the token vectors become one vector; default: mean, or cls for SMILES."
        ),
    ] = None,
    layer: Annotated[
        int, typer.Option("--layer", help="Layer whose hidden states are pooled; -1 is the last layer.")
    ] = -1,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length", min=3, help="Maximum number of tokens read per entry; default: the model's limit."
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Number of entries encoded at a time.")
    ] = 8,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of the model on the hub.")
    ] = None,
    local_only: Annotated[bool, typer.Option("--local-only", help="Never use the network.")] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Compute a table of semantic vectors.

    A pretrained encoder turns protein sequences, SMILES or texts into vectors, for the option --embedding of train.
    With the model co-expression, the vectors of genes come from the control cells of a store.
    """
    from perturbdiff.embeddings import embed as run
    from perturbdiff.genes.co_expression import CO_EXPRESSION, embed_genes

    settings: dict[str, Any] = {"kind": kind, "pool": pool, "layer": layer, "max_length": max_length}
    if model == CO_EXPRESSION:
        typer.echo(str(embed_genes(source, out, force=force)))
        return
    settings |= {"batch_size": batch_size, "revision": revision, "local_only": local_only}
    typer.echo(str(run(source, out, model=model, device=device, force=force, **settings)))
