"""The stage ``import-checkpoint``: a checkpoint of the released code in, a bundle out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.config.settings import Config
from perturbdiff.embeddings.embedding_tables import EmbeddingTable, SemanticKind, semantic_rows
from perturbdiff.released.released_checkpoint import Checkpoint, Weights, build
from perturbdiff.released.released_labels import read_genes, vocabulary_of
from perturbdiff.released.released_settings import recipe_of
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_SEEN = pd.Index(["dataset", "cell_type", "batch", "perturbation", "is_control", "n_cells", "role"])
_CURVE = pd.Index(["step", "split", "total", "mmd", "mse"])  # both empty: the file does not tell


def import_checkpoint(
    file: Path,
    out: Path,
    *,
    genes: Path | None = None,
    weights: Weights = "ema",
    control: str | None = None,
    embeddings: Mapping[SemanticKind, Path] | None = None,
    target_sum: float | None = None,
    force: bool = False,
) -> Path:
    """Turn a checkpoint of the released code into a bundle that `sample` and `finetune` use.

    Parameters
    ----------
    file
        Lightning file, or the weights-only file of the end of training. Nothing in it is run.
    out
        Bundle folder.
    genes
        The gene list of the model's columns; see `read_genes`. The file has only their number.
    weights
        ``ema``: averaged, if the run averaged; ``raw``: as of the step.
    control
        Label of the controls; None: the released data sets' own.
    embeddings
        Semantic tables by covariate, for frozen vectors that the file lacks.
    target_sum
        Depth that the training counts were scaled to, if known.
    force
        Run even if an equal output is there.

    Raises
    ------
    UserError
        If the file cannot be read safely or computes what ours cannot, or genes, labels or tables do not fit.
    """
    tables = dict(embeddings or {})
    if genes is None:
        count = Checkpoint.read(file, weights).layout.num_genes
        raise UserError(
            f"{file}: it has {count} genes but not their names; give the list that the model was trained with "
            "(selected genes: a pickle, .txt, .json or .npy) with --genes"
        )
    inputs = {"checkpoint": file, "genes": genes, **{f"embedding_{k}": p for k, p in tables.items()}}
    settings = {"weights": weights, "control": control, "target_sum": target_sum}
    with provenance.stage(
        "import-checkpoint", out, config=settings, inputs=inputs, folder=True, force=force
    ) as stage:
        if not stage.skip:
            found, names = Checkpoint.read(file, weights), read_genes(genes)
            given: dict[SemanticKind, EmbeddingTable] = {
                kind: EmbeddingTable.read(path) for kind, path in tables.items()
            }
            bundle = bundle_of(found, names, name=file.stem, control=control, tables=given)
            bundle.target_sum = target_sum
            for line in bundle.training["import"]:
                logger.info("import: %s", line)
            bundle.save(stage.path)
            stage.results |= {"parameters": bundle.training["parameters"], "genes": len(names)}
    return out


def bundle_of(
    found: Checkpoint,
    genes: list[str],
    *,
    name: str = "imported",
    control: str | None = None,
    tables: Mapping[SemanticKind, EmbeddingTable] | None = None,
) -> Bundle:
    """Return the bundle of a released checkpoint; see `import_checkpoint`."""
    layout, stored = found.layout, found.stored
    if len(genes) != layout.num_genes:
        raise UserError(
            f"{stored.source}: the model has {layout.num_genes} genes, the gene list {len(genes)}; give the list "
            "that it was trained with"
        )
    told = stored.told
    vocabulary = vocabulary_of(
        stored.covariates, datasets=layout.datasets, sources=stored.datasets, control=control, told=told,
        source=stored.source,
    )  # fmt: skip
    config = recipe_of(layout, stored, name=name)
    translated = found.translated()
    state = translated.state
    report = [*found.report, _shape(found), *translated.report()]
    if not told:
        _forget_perturbations(state)
        report.append("perturbations: none was told in training, so only the control's label is kept")
    if 0 < stored.dropped_controls < 1:
        report.append(
            f"controls were zero in a share {stored.dropped_controls:g} of the steps; ours never are"
        )
    given = dict(tables or {})
    report += _fill(state, found, config, vocabulary, given)
    model = build(layout, config, state)
    size = sum(parameter.numel() for parameter in model.parameters())
    held = sum(tensor.numel() for tensor in found.weights.values())
    report.append(f"{size / 1e6:.2f} M parameters here, {held / 1e6:.2f} M values in the file")
    facts = {"import": report, "parameters": size, "source": "released code"}
    return Bundle(
        model, config, genes, vocabulary,
        training=facts, seen=pd.DataFrame(columns=_SEEN), curve=pd.DataFrame(columns=_CURVE), tables=given,
    )  # fmt: skip


def _shape(found: Checkpoint) -> str:
    layout = found.layout
    kinds = [f"{k} ({'frozen vectors' if k in layout.semantic else 'learned'})" for k in layout.covariates]
    layers = f", input layers for {listing(layout.datasets)}" if len(layout.datasets) > 1 else ""
    inner = f", covariates through {layout.inner_width}" if layout.inner_width != layout.num_genes else ""
    return (
        f"{layout.num_genes} genes, width {layout.width}, depth {layout.depth}, {layout.heads} heads"
        f"{layers}{inner}; {', '.join(kinds)}{f', {layout.num_doses} doses' if layout.num_doses else ''}"
    )


def _forget_perturbations(state: dict[str, Tensor]) -> None:
    """Give the control's label the vector that stood for every perturbation."""
    for name in ("vectors", "weight"):
        key = f"covariate_encoder.tables.perturbation.{name}"
        if key in state:
            state[key] = state[key][:1].repeat(2, 1)
    if "covariate_encoder.dose.weights" in state:
        state["covariate_encoder.dose.weights"] = state["covariate_encoder.dose.weights"][:1].repeat(2, 1)


def _fill(
    state: dict[str, Tensor],
    found: Checkpoint,
    config: Config,
    vocabulary: Vocabulary,
    tables: Mapping[SemanticKind, EmbeddingTable],
) -> list[str]:
    """Put the vectors of given tables where the file has none."""
    layout, lines = found.layout, []
    missing = layout.missing_tables
    for kind in tables:
        if kind not in missing:
            why = "are in the file" if kind in layout.semantic else "are not frozen ones"
            raise UserError(f"{found.stored.source}: --embedding {kind}: its vectors {why}; leave it out")
    lost = [kind for kind in missing if kind not in tables]
    if lost:
        raise UserError(
            f"{found.stored.source}: the frozen vectors of {listing(lost)} are not in the file; give them with "
            f"--embedding {lost[0]}=FILE (docs/embeddings.md)"
        )
    for kind, table in tables.items():
        if table.width != layout.semantic[kind]:
            raise UserError(
                f"--embedding {kind}: vectors of {table.width} numbers, the model takes {layout.semantic[kind]}"
            )
        control = vocabulary.control if kind == "perturbation" else None
        rows = semantic_rows(getattr(vocabulary, kind), table, config.model, kind=kind, control=control)
        lines.append(f"semantic table, {rows.report(kind)}")
        vectors = np.concatenate([np.zeros((1, table.width), np.float32), rows.vectors])
        state[f"covariate_encoder.tables.{kind}.vectors"] = torch.from_numpy(vectors)
    return lines
