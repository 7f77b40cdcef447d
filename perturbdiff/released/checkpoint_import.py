"""The stage ``import-checkpoint``: a checkpoint of the released code in, a bundle out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.bundle_record import CARD
from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.config.settings import Config
from perturbdiff.embeddings.embedding_tables import EmbeddingTable, SemanticKind, semantic_rows
from perturbdiff.model import Denoiser
from perturbdiff.released.pickles import plain, read_torch, tensors
from perturbdiff.released.released_settings import (
    NORMALISATION,
    Stored,
    ordered,
    read_genes,
    recipe_of,
    vocabulary_of,
)
from perturbdiff.released.released_weights import Layout, Translated, layout_of, translate
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

_NO_EMA = "weights: the file has one set (at the end of training the averaged ones, if they were averaged)"

Weights = Literal["ema", "raw"]


@dataclass
class Checkpoint:
    """The content of a released checkpoint.

    Attributes
    ----------
    weights
        Tensors by their released names, still on disk.
    stored
        Its settings.
    layout
        Architecture of the network that the tensors form.
    report
        Lines about the import.
    """

    weights: Mapping[str, Tensor]
    stored: Stored
    layout: Layout
    report: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, weights: Weights = "ema") -> Checkpoint:
        """Read a file without running anything in it. See `perturbdiff.released.pickles`.

        Raises
        ------
        UserError
            If the file is not a released checkpoint, or lacks the wanted weights.
        """
        content, source = read_torch(path), str(path)
        chosen, line = _choose(content, weights, source)
        hyper = plain(content.get("hyper_parameters", {}))
        stored = Stored.of(hyper if isinstance(hyper, dict) else {}, source)
        step = content.get("global_step")
        report = [*([f"step {step} of training"] if isinstance(step, int) else []), line]
        return cls(chosen, stored, layout_of(chosen, source), report)

    def sizes(self) -> dict[str, int]:
        """Return the number of labels of each covariate of the network."""
        sizes = {}
        for kind in self.layout.covariates:
            labels = ordered(self.stored.covariates, kind, self.stored.source)
            if not labels:
                raise UserError(f"{self.stored.source}: it has no dictionary of the labels of {kind}")
            sizes[kind] = len(labels)
        return sizes

    def translated(self) -> Translated:
        """Return the tensors under our names."""
        return translate(self.weights, self.layout, self.sizes(), self.stored.source)


def _choose(content: Mapping[str, Any], weights: Weights, source: str) -> tuple[dict[str, Tensor], str]:
    """Return the chosen weights. With averaging, ``state_dict`` has the averaged weights and another entry the raw."""
    state, raw = tensors(content, "state_dict"), tensors(content, "current_model_state")
    if not state:
        raise UserError(f"{source}: no 'state_dict' with tensors; not a checkpoint of the released code")
    if weights == "ema":
        return state, "weights: averaged (EMA)" if raw else _NO_EMA
    if not raw:
        raise UserError(f"{source}: holds one set of weights only, no raw ones; use --weights ema")
    return raw, "weights: raw, as of the step"


def load_released(path: str | Path, *, weights: Weights = "ema") -> Denoiser:
    """Return the network of a checkpoint that the released code wrote.

    Parameters
    ----------
    path
        Lightning file, or the weights-only file of the end of training.
    weights
        ``ema``: averaged, if the run averaged. ``raw``: as of the step.

    Returns
    -------
    In evaluation mode, on the CPU. Its unit is the released scale, 10. Ids are the released codes plus one.

    Raises
    ------
    UserError
        If the file is not such a checkpoint, asks for code to be run, or lacks a frozen table.
    """
    checkpoint = Checkpoint.read(Path(path), weights)
    missing = checkpoint.layout.missing_tables
    if missing:
        raise UserError(
            f"{path}: the frozen vectors of {listing(missing)} are not in the file; give them to import-checkpoint "
            "with --embedding KIND=FILE"
        )
    config = recipe_of(checkpoint.layout, checkpoint.stored)
    return build(checkpoint.layout, config, checkpoint.translated().state)


def denoiser_of(
    weights: Mapping[str, Tensor], hyper: Mapping[str, Any], *, unit: float = NORMALISATION
) -> Denoiser:
    """Return the network of a released state dict and its settings. See `load_released`.

    Parameters
    ----------
    weights
        Tensors by the names of the released code.
    hyper
        ``model_cfg`` and ``cov_encoding_cfg`` (with the dictionaries), plain.
    unit
        Model values are log1p / unit.
    """
    checkpoint = Checkpoint(weights, Stored.of(hyper), layout_of(weights))
    config = recipe_of(checkpoint.layout, checkpoint.stored)
    return build(checkpoint.layout, config, checkpoint.translated().state, unit)


class _WithoutInit(TorchFunctionMode):
    """Networks made in this block do not fill their tensors, because memory that is never written costs nothing.

    The meta device would have the same effect, but it imports libraries for some seconds.
    """

    _FILLS = frozenset({torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.zero_, torch.Tensor.mul_})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call every function except those that fill tensors (methods, and functions of torch.nn.init)."""
        options = kwargs or {}
        if func in self._FILLS or getattr(func, "__module__", None) == "torch.nn.init":
            return options["tensor"] if "tensor" in options else args[0]
        return func(*args, **options)


def build(
    layout: Layout, config: Config, state: Mapping[str, Tensor], unit: float = NORMALISATION
) -> Denoiser:
    """Return a network that owns copies of translated tensors. Nothing is initialised on the way.

    Parameters
    ----------
    layout, config
        Architecture and recipe of the network that the tensors form.
    state
        Tensors by our names (see `translate`).
    unit
        Model values are log1p / unit.
    """
    sizes = {kind: len(_table(state, kind)) for kind in layout.covariates}
    with _WithoutInit():
        model = Denoiser(
            config.model,
            num_genes=layout.num_genes,
            num_perturbations=sizes["perturbation"],
            num_cell_types=sizes["cell_type"],
            num_batches=sizes.get("batch", 2),
            datasets=layout.datasets,
            semantic=layout.semantic,
            num_doses=layout.num_doses,
        )
    copies = {
        name: tensor.detach().float().clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }
    copies["unit"], copies["gate_threshold"] = torch.tensor(float(unit)), torch.zeros(())
    copies["maximum"] = torch.full((layout.num_genes,), float("inf"))
    copies["zero_level"] = torch.zeros(layout.num_genes)
    copies["size_spread"] = model.size_spread.clone()
    model.load_state_dict(copies, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def _table(state: Mapping[str, Tensor], kind: str) -> Tensor:
    name = f"covariate_encoder.tables.{kind}"
    return state[f"{name}.vectors" if f"{name}.vectors" in state else f"{name}.weight"]


_SEEN = pd.Index(["dataset", "cell_type", "batch", "perturbation", "is_control", "n_cells", "role"])
_CURVE = pd.Index(
    ["step", "split", "total", "mmd", "mse"]
)  # both tables are empty: the file does not have them


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
        The gene list of the model's columns. See `read_genes`. The file has only their number.
    weights
        ``ema``: averaged, if the run averaged. ``raw``: as of the step.
    control
        Label of the controls. None: the released data sets' own.
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
            checkpoint, names = Checkpoint.read(file, weights), read_genes(genes)
            vectors: dict[SemanticKind, EmbeddingTable] = {
                kind: EmbeddingTable.read(path) for kind, path in tables.items()
            }
            bundle = bundle_of(checkpoint, names, name=file.stem, control=control, tables=vectors)
            bundle.target_sum = target_sum
            for line in bundle.training["import"]:
                logger.info("import: %s", line)
            bundle.save(stage.path)
            stage.chance = (CARD,)
            stage.results |= {"parameters": bundle.training["parameters"], "genes": len(names)}
    return out


def bundle_of(
    checkpoint: Checkpoint,
    genes: list[str],
    *,
    name: str = "imported",
    control: str | None = None,
    tables: Mapping[SemanticKind, EmbeddingTable] | None = None,
) -> Bundle:
    """Return the bundle of a released checkpoint. See `import_checkpoint`."""
    layout, stored = checkpoint.layout, checkpoint.stored
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
    translated = checkpoint.translated()
    state = translated.state
    report = [*checkpoint.report, _shape(layout), *translated.report()]
    if not told:
        _forget_perturbations(state)
        report.append("perturbations: none was told in training, so only the control's label is kept")
    if 0 < stored.dropped_controls < 1:
        report.append(
            f"controls were zero in a share {stored.dropped_controls:g} of the steps; ours never are"
        )
    vectors = dict(tables or {})
    report += _fill(state, checkpoint, config, vocabulary, vectors)
    model = build(layout, config, state)
    size = sum(parameter.numel() for parameter in model.parameters())
    held = sum(tensor.numel() for tensor in checkpoint.weights.values())
    report.append(f"{size / 1e6:.2f} M parameters here, {held / 1e6:.2f} M values in the file")
    facts = {"import": report, "parameters": size, "source": "released code"}
    return Bundle(
        model, config, genes, vocabulary,
        training=facts, seen=pd.DataFrame(columns=_SEEN), curve=pd.DataFrame(columns=_CURVE), tables=vectors,
    )  # fmt: skip


def _shape(layout: Layout) -> str:
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
    checkpoint: Checkpoint,
    config: Config,
    vocabulary: Vocabulary,
    tables: Mapping[SemanticKind, EmbeddingTable],
) -> list[str]:
    """Add the vectors of ``tables`` where the file has none."""
    layout, source, lines = checkpoint.layout, checkpoint.stored.source, []
    missing = layout.missing_tables
    for kind in tables:
        if kind not in missing:
            why = "are in the file" if kind in layout.semantic else "are not frozen ones"
            raise UserError(f"{source}: --embedding {kind}: its vectors {why}; leave it out")
    lacking = [kind for kind in missing if kind not in tables]
    if lacking:
        raise UserError(
            f"{source}: the frozen vectors of {listing(lacking)} are not in the file; give them with "
            f"--embedding {lacking[0]}=FILE (docs/embeddings.md)"
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
