"""The bundle: a folder with all that sampling needs. It holds no pickles, so it can be shared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from perturbdiff.checkpoint.bundle_record import CARD, FORMAT, TABLES, damaged, read_record
from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.config.settings import Config, ModelConfig
from perturbdiff.embeddings.embedding_tables import SEMANTIC_KINDS, EmbeddingTable, SemanticKind
from perturbdiff.model import Denoiser
from perturbdiff.runtime import tabular, untrusted
from perturbdiff.runtime.errors import UserError, listing

SAME_DEPTH = 0.01
"""Two depths that cells are scaled to count as equal if they differ by at most this share."""

_TABLE_FILES: dict[SemanticKind, str] = {kind: f"{TABLES}/{kind}.npz" for kind in SEMANTIC_KINDS}
_FRONT_MATTER = (
    "---",
    "library_name: perturbdiff",
    "license: unknown",  # that is for the owner of the data to say
    "tags: [biology, single-cell, transcriptomics, perturbation-prediction, diffusion]",
    "---",
    "",
)
"""What the Hugging Face Hub reads of a model card. None of its tasks is ours, and our data sets are not its."""
_SEEN = ("dataset", "cell_type", "batch", "perturbation", "is_control", "n_cells", "role")
_NOT_NEGATIVE = ("unit", "gate_threshold", "maximum", "zero_level", "size_spread")


@dataclass
class Bundle:
    """A trained model with its recipe, genes and labels.

    Attributes
    ----------
    model
        The denoiser with averaged weights. Its buffers hold its units.
    config
        The recipe it was trained with.
    genes
        Names of the model's genes, in the order of its columns.
    vocabulary
        Labels and ids of the covariates. Its data sets are those of the input layers.
    target_sum
        Depth that the training counts were scaled to. None if it is unknown.
    training
        Facts about the training: steps, best step, what was transferred.
    seen
        Conditions used in training: ``dataset, cell_type, batch, perturbation, is_control, n_cells, role``.
    curve
        Loss terms by step.
    tables
        Complete semantic tables of covariates and genes with frozen vectors, for labels that were not trained on.
    """

    model: Denoiser
    config: Config
    genes: list[str]
    vocabulary: Vocabulary
    target_sum: float | None = None
    training: dict[str, Any] = field(default_factory=dict)
    seen: pd.DataFrame = field(default_factory=pd.DataFrame)
    curve: pd.DataFrame = field(default_factory=pd.DataFrame)
    tables: dict[SemanticKind, EmbeddingTable] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the bundle's files into an existing folder. The manifest is written by the stage."""
        write_weights(self.model, folder / "model.safetensors")
        record = {
            "format": FORMAT,
            "config": self.config.model_dump(mode="json"),
            "target_sum": self.target_sum,
            "training": self.training,
        }
        (folder / "config.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        (folder / "genes.json").write_text(json.dumps(self.genes, indent=0, ensure_ascii=False) + "\n")
        self.vocabulary.to_json(folder / "vocabulary.json")
        self.seen.to_parquet(folder / "seen.parquet", index=False)
        tabular.write_csv(self.curve, folder / "training.csv", float_format="%.6g")
        for kind, table in self.tables.items():
            (folder / TABLES).mkdir(exist_ok=True)
            (folder / TABLES / f"{kind}.npz").write_bytes(table.to_npz())
        (folder / CARD).write_text(card(self))

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> Bundle:
        """Read a bundle.

        Raises
        ------
        UserError
            If files are missing, damaged or do not fit together.
        """
        record = read_record(folder)
        config, recorded = record.config, record.unchanged
        genes = _names(folder / "genes.json")
        vocabulary = Vocabulary.from_json(folder / "vocabulary.json")
        weights = _weights(folder / "model.safetensors", config, genes, vocabulary)
        doses = weights.get("covariate_encoder.dose.vectors", torch.empty(0))
        model = build_model(config, genes, vocabulary, semantic=frozen_widths(weights), num_doses=len(doses))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise _unfit(folder, str(error).splitlines()[-1].strip()) from None
        optional = {name: folder / name for name in ("seen.parquet", "training.csv", *_TABLE_FILES.values())}
        present = {name for name, path in optional.items() if path.is_file()}
        if recorded is not None and (foreign := sorted(present - recorded)):
            raise UserError(f"{folder / foreign[0]}: was put into the bundle after it was made; take it out")
        remedy = "copy the bundle again or train anew"
        return cls(
            model.to(device).eval(),
            config,
            genes,
            vocabulary,
            record.target_sum,
            record.training,
            _seen(optional["seen.parquet"], remedy) if "seen.parquet" in present else pd.DataFrame(),
            tabular.read_csv(optional["training.csv"], remedy)
            if "training.csv" in present
            else pd.DataFrame(),
            {
                kind: EmbeddingTable.read(folder / name)
                for kind, name in _TABLE_FILES.items()
                if name in present
            },
        )


def _unfit(folder: Path, why: str) -> UserError:
    return UserError(f"{folder}: weights and config.json do not fit together ({why})")


def _names(path: Path) -> list[str]:
    names = untrusted.read(path, "JSON")
    if not isinstance(names, list) or not names or not all(isinstance(gene, str) for gene in names):
        raise UserError(f"{path}: is not a list of gene names; copy the bundle again")
    return names


def _seen(path: Path, remedy: str) -> pd.DataFrame:
    table = tabular.read_parquet(path, remedy)
    if lacking := [name for name in _SEEN if name not in table]:
        raise UserError(f"{path}: no column {listing(lacking)}; {remedy}")
    return table


def _weights(path: Path, config: Config, genes: list[str], vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Return a bundle's tensors after checking that config.json agrees with their shapes.

    The network is built from config.json. A wrong size there must be found before it costs memory.
    """
    try:
        with safe_open(path, "pt") as file:
            header = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in header.items()}
            types = {name: part.get_dtype() for name, part in header.items()}
        if other := next((name for name, kind in types.items() if kind != "F32"), None):
            raise UserError(f"{path}: '{other}' holds numbers of type {types[other]}, not F32 (32 bits)")
        _check_shapes(path.parent, shapes, config.model, len(genes), vocabulary)
        weights = load_file(path)
    except (ValueError, TypeError, SafetensorError, OSError) as error:
        raise damaged(path.parent, error) from None
    weights.setdefault("zero_level", torch.zeros(len(genes)))  # bundles of earlier versions have neither
    if "expected.measured" in weights:
        # -1: means are left as they were predicted
        weights.setdefault("expected.explained", torch.tensor(-1.0))
    weights.setdefault("size_spread", torch.ones(vocabulary.size("perturbation"), 2, 2))
    for name, tensor in weights.items():
        # the maximum is infinite in models that were trained with the authors' code
        finite = torch.isfinite(tensor) if name != "maximum" else ~torch.isnan(tensor)
        if not finite.all():
            raise UserError(f"{path}: '{name}' holds values that are not finite; copy the bundle again")
        if name in _NOT_NEGATIVE and (tensor < 0).any():
            raise UserError(f"{path}: '{name}' holds negative values; copy the bundle again")
    rows, changes = weights.get("expected.rows"), weights.get("expected.changes")
    if rows is not None and not ((rows >= 0) & (rows < (0 if changes is None else changes.shape[0]))).all():
        raise UserError(f"{path}: 'expected.rows' names changes that are not there; copy the bundle again")
    if not weights.get("unit", torch.ones(())) > 0:
        raise UserError(
            f"{path}: 'unit' is {float(weights['unit']):g}, not above zero; copy the bundle again"
        )
    return weights


def _check_shapes(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    genes: int,
    vocabulary: Vocabulary,
) -> None:
    """Refuse sizes in a recipe that the tensors do not have."""
    width, inner = model.width, model.projection_width or genes
    tables = "covariate_encoder.tables"
    wanted: dict[str, tuple[int, ...]] = {
        "output_layer.weight": (genes, width),
        "blocks.0.attention.qkv.weight": (6 * width, 2 * width),
        "blocks.0.attention.query_norm.weight": (2 * width // model.heads,),
        "blocks.0.mlp.expand.weight": (model.mlp_ratio * width, width),
    }
    if model.covariate_projection == "genes":
        wanted["covariate_projection.weight"] = (width, inner)
    for kind in model.covariates:
        size = vocabulary.size(kind)
        if frozen := shapes.get(f"{tables}.{kind}.vectors"):
            wanted[f"{tables}.{kind}.vectors"] = (size, frozen[-1])
            wanted[f"{tables}.{kind}.project.weight"] = (model.covariate_width, frozen[-1])
        else:
            wanted[f"{tables}.{kind}.weight"] = (size, model.covariate_width)
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            actual = f"is {list(shapes[name])}" if name in shapes else "is missing"
            raise _unfit(folder, f"'{name}' {actual}, config.json asks for {list(shape)}")
    for what, number, name in (
        ("blocks", model.depth, "blocks."),
        ("input layers", len(vocabulary.datasets), "input_layers.layers."),
    ):
        count = len({key.removeprefix(name).split(".")[0] for key in shapes if key.startswith(name)})
        if count != number:
            raise _unfit(folder, f"{count} {what}, config.json asks for {number}")


def write_weights(model: Denoiser, path: Path) -> None:
    """Write a model's weights and units as safetensors. Equal weights give equal bytes."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    path.touch()
    mode = path.stat().st_mode  # safetensors would make the file unreadable for others
    try:
        save_file(state, path)  # writes one tensor at a time, without a copy of all weights in memory
    except SafetensorError as error:  # this is how it reports a full disk
        raise OSError(str(error)) from error
    path.chmod(mode)


def frozen_widths(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the widths of the frozen vectors that a state dict holds, by covariate or ``gene``."""
    kinds = ("perturbation", "cell_type", "batch")
    places = {kind: f"covariate_encoder.tables.{kind}.vectors" for kind in kinds} | {
        "gene": "gene_table.vectors"
    }
    return {kind: weights[name].shape[-1] for kind, name in places.items() if name in weights}


def build_model(
    config: Config,
    genes: list[str],
    vocabulary: Vocabulary,
    *,
    semantic: Mapping[str, int] | None = None,
    num_doses: int = 0,
) -> Denoiser:
    """Return an untrained denoiser for these genes and labels. `Denoiser` explains ``semantic`` and ``num_doses``.

    Raises
    ------
    UserError
        If the architecture does not fit together.
    """
    try:
        return Denoiser(
            config.model,
            num_genes=len(genes),
            num_perturbations=vocabulary.size("perturbation"),
            num_cell_types=vocabulary.size("cell_type"),
            num_batches=vocabulary.size("batch"),
            datasets=vocabulary.datasets,
            semantic=semantic,
            num_doses=num_doses,
        )
    except ValueError as error:
        raise UserError(f"configuration section 'model': {error}") from None


def card(bundle: Bundle) -> str:
    """Return the bundle's README, which describes the model, its training data and its use."""
    labels, model = bundle.vocabulary, bundle.model
    facts = dict(sorted(bundle.training.items()))
    size = sum(p.numel() for p in model.parameters())
    targets = bundle.seen[bundle.seen["role"] == "target"] if len(bundle.seen) else bundle.seen
    cells = int(targets["n_cells"].sum()) if len(targets) else 0
    lines = [
        *_FRONT_MATTER,
        f"# perturbdiff model ({bundle.config.name})",
        "",
        bundle.config.description or "A diffusion model over sets of cells.",
        "",
        f"- {size / 1e6:.2f} M parameters, {len(bundle.genes)} genes, data sets: {', '.join(labels.datasets)}",
        f"- {len(labels.perturbation)} perturbations (control: `{labels.control}`), "
        f"{len(labels.cell_type)} cell types, {len(labels.batch)} batches",
        f"- trained on {cells} cells of {len(targets)} conditions (`seen.parquet`)",
        f"- log1p of counts scaled to {bundle.target_sum or 'an unknown depth'}; "
        f"model unit {float(model.unit):.6g}, detection limit {float(model.gate_threshold):.6g} (log1p)",
        *(
            f"- frozen vectors: {kind}, table of {len(t.names)} names × {t.width} (`{TABLES}/{kind}.npz`)"
            for kind, t in bundle.tables.items()
        ),
        *(
            f"- {key.replace('_', ' ')}: {value}"
            for key, value in facts.items()
            if not isinstance(value, list)
        ),
    ]
    for key, value in facts.items():
        if isinstance(value, list):
            lines += ["", f"## {key.replace('_', ' ').capitalize()}", "", *(f"- {item}" for item in value)]
    lines += [
        "",
        "## Use",
        "",
        "    perturbdiff sample THIS_FOLDER STORE --split SPLIT --out predictions.h5ad",
        "",
        "The store gives the control cells; its genes are matched by name. A perturbation or cell type that was not",
        "trained on can be predicted only if its semantic table has it.",
        "Predictions are for research, not for decisions about patients.",
    ]
    return "\n".join(lines) + "\n"
