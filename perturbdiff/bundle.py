"""The bundle: a folder that holds all that sampling needs, and can be shared. No pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from perturbdiff import files
from perturbdiff.config import Config
from perturbdiff.data.embeddings import SEMANTIC_KINDS, EmbeddingTable, SemanticKind
from perturbdiff.data.vocabulary import Vocabulary
from perturbdiff.errors import UserError
from perturbdiff.model import Denoiser

FORMAT = 1
TABLES = "embeddings"
SAME_DEPTH = 0.01
"""Depths that cells are scaled to count as one if they differ by no more than this share."""

_FILES = ("model.safetensors", "config.json", "genes.json", "vocabulary.json")


@dataclass
class Bundle:
    """A trained model with its recipe, genes and labels.

    Attributes
    ----------
    model
        The denoiser with averaged weights, its units in its buffers.
    config
        The recipe it was trained with.
    genes
        Names of the model's genes, in the order of its columns.
    vocabulary
        Labels and ids of the covariates; its data sets are those of the input layers.
    target_sum
        Depth that the training counts were scaled to; None if unknown.
    training
        Facts of the training: steps, best step, what was transferred.
    seen
        Conditions used in training: ``dataset, cell_type, batch, perturbation, is_control, n_cells, role``.
    curve
        Loss terms by step.
    tables
        The whole semantic tables of covariates or genes with frozen vectors, for labels met later.
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
        """Write the bundle's files into an existing folder (the manifest is the stage's)."""
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
        self.curve.to_csv(folder / "training.csv", index=False, float_format="%.6g")
        for kind, table in self.tables.items():
            (folder / TABLES).mkdir(exist_ok=True)
            (folder / TABLES / f"{kind}.npz").write_bytes(table.to_npz())
        (folder / "README.md").write_text(card(self))

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> Bundle:
        """Read a bundle.

        Raises
        ------
        UserError
            If files are missing, damaged or do not fit together.
        """
        record, config = _record(folder)
        try:
            genes = [str(gene) for gene in json.loads((folder / "genes.json").read_text())]
            weights = load_file(folder / "model.safetensors")
        except (ValueError, TypeError, SafetensorError) as error:
            raise _damaged(folder, error) from None
        vocabulary = Vocabulary.from_json(folder / "vocabulary.json")
        weights.setdefault("zero_level", torch.zeros(len(genes)))  # a bundle of an earlier version has none
        doses = weights.get("covariate_encoder.dose.vectors", torch.empty(0))
        model = build_model(config, genes, vocabulary, semantic=frozen_widths(weights), num_doses=len(doses))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(
                f"{folder}: weights and config.json do not fit together ({str(error).splitlines()[0]})"
            ) from None
        seen, curve = folder / "seen.parquet", folder / "training.csv"
        return cls(
            model.to(device).eval(),
            config,
            genes,
            vocabulary,
            record["target_sum"],
            record["training"],
            pd.read_parquet(seen) if seen.is_file() else pd.DataFrame(),
            pd.read_csv(curve) if curve.is_file() else pd.DataFrame(),
            _tables(folder / TABLES),
        )


def recipe_of(folder: Path) -> Config:
    """Return the recipe that a bundle was trained with.

    Raises
    ------
    UserError
        If it is not a bundle, or a damaged one.
    """
    return _record(folder)[1]


def _record(folder: Path) -> tuple[dict[str, Any], Config]:
    missing = [name for name in _FILES if not (files.existing(folder, "bundle") / name).is_file()]
    if missing:
        raise UserError(f"{folder}: not a model bundle, {', '.join(missing)} missing; make one with train")
    try:
        record = json.loads((folder / "config.json").read_text())
        if record["format"] > FORMAT:
            raise UserError(f"{folder}: bundle format {record['format']} is newer than this version reads")
        return record, Config.model_validate(record["config"])
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise _damaged(folder, error) from None


def _damaged(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"{folder}: the bundle is damaged and cannot be read ({type(error).__name__}); "
        "copy it again or train anew"
    )


def _tables(folder: Path) -> dict[SemanticKind, EmbeddingTable]:
    found: dict[SemanticKind, EmbeddingTable] = {}
    for kind in SEMANTIC_KINDS:
        if (folder / f"{kind}.npz").is_file():
            found[kind] = EmbeddingTable.read(folder / f"{kind}.npz")
    return found


def write_weights(model: Denoiser, path: Path) -> None:
    """Write a model's weights and units as safetensors; equal weights give equal bytes."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    path.touch()
    mode = path.stat().st_mode  # safetensors would let nobody else read the file
    try:
        save_file(state, path)  # tensor by tensor: no copy of all weights in memory
    except SafetensorError as error:  # a full disk, in words of its own
        raise OSError(str(error)) from error
    path.chmod(mode)


def frozen_widths(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the widths of the frozen vectors that a state dict holds, by covariate or ``gene``."""
    kinds = ("perturbation", "cell_type", "batch")
    places = {kind: f"covariate_encoder.tables.{kind}.vectors" for kind in kinds} | {
        "gene": "gene_table.vectors"
    }
    return {kind: weights[name].shape[1] for kind, name in places.items() if name in weights}


def build_model(
    config: Config,
    genes: list[str],
    vocabulary: Vocabulary,
    *,
    semantic: Mapping[str, int] | None = None,
    num_doses: int = 0,
) -> Denoiser:
    """Return an untrained denoiser for these genes and labels; see `Denoiser` for ``semantic`` and ``num_doses``.

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
    """Return the bundle's README: what it is, what it saw, how to use it."""
    words, model = bundle.vocabulary, bundle.model
    facts = dict(sorted(bundle.training.items()))
    size = sum(p.numel() for p in model.parameters())
    targets = bundle.seen[bundle.seen["role"] == "target"] if len(bundle.seen) else bundle.seen
    cells = int(targets["n_cells"].sum()) if len(targets) else 0
    lines = [
        f"# perturbdiff model ({bundle.config.name})",
        "",
        bundle.config.description or "A diffusion model over sets of cells.",
        "",
        f"- {size / 1e6:.2f} M parameters, {len(bundle.genes)} genes, data sets: {', '.join(words.datasets)}",
        f"- {len(words.perturbation)} perturbations (control: `{words.control}`), {len(words.cell_type)} cell types, "
        f"{len(words.batch)} batches",
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
