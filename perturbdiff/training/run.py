"""The stages `train`, `pretrain` and `finetune`: stores and splits in, a bundle out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from perturbdiff import files, provenance
from perturbdiff.config import Config
from perturbdiff.data.embeddings import SemanticKind
from perturbdiff.devices import resolve_device
from perturbdiff.semantics import read_tables
from perturbdiff.training.fit import Fitted, fit
from perturbdiff.training.keeping import hand_over, kept_steps
from perturbdiff.training.material import Material, for_finetuning, for_pretraining, from_scratch
from perturbdiff.training.processes import Processes
from perturbdiff.training.transfer import Transfer

logger = logging.getLogger(__name__)

Resume = Literal["auto", "never"]
_SECTIONS = ("model", "schedule", "loss", "train", "sample")
_NO_EFFECT = {"loader_threads"}


def train(
    store: Path,
    split: Path,
    out: Path,
    config: Config,
    *,
    embeddings: Mapping[SemanticKind, Path] | None = None,
    checkpoints: Path | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    force: bool = False,
) -> Path:
    """Train a model from scratch on the training part of a split.

    Parameters
    ----------
    store, split
        Cells, and which conditions are for training and validation.
    out
        The bundle, a folder.
    config
        The recipe.
    embeddings
        Files of semantic tables, by ``perturbation``, ``cell_type`` or ``gene``; without one, vectors are learned.
    checkpoints
        Folder of resumable checkpoints; by default ``OUT.checkpoints``, deleted at the end.
    resume
        ``auto`` continues from a checkpoint of the same run, ``never`` starts afresh.
    device
        ``auto``, ``cpu`` or ``cuda``.
    force
        Train even if an equal bundle is there.

    Raises
    ------
    UserError
        If inputs do not fit, or the checkpoint folder is in use or belongs to another run.
    StoppedEarly
        With a checkpoint, if the allocation ends or a signal says so.
    """
    given = embeddings or {}
    inputs = {"store": store, "split": split, **_roles(given)}

    def build() -> Material:
        return from_scratch(store, split, config, read_tables(given))

    return _stage(
        "train",
        out,
        config,
        inputs,
        build,
        checkpoints=checkpoints,
        resume=resume,
        device=device,
        force=force,
    )


def finetune(
    bundle: Path,
    store: Path,
    split: Path,
    out: Path,
    config: Config,
    *,
    transfer: Transfer = "keep",
    embeddings: Mapping[SemanticKind, Path] | None = None,
    checkpoints: Path | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    force: bool = False,
) -> Path:
    """Train on, from the weights of a pretrained bundle; see `train` and `transfer_weights`.

    ``transfer`` is what becomes of the input and output layers: ``keep`` (pretrained genes and weights),
    ``reinit`` (pretrained genes, new weights) or ``new-genes`` (this store's genes, new weights).
    """
    given = embeddings or {}
    inputs = {"bundle": bundle, "store": store, "split": split, **_roles(given)}

    def build() -> Material:
        return for_finetuning(bundle, store, split, config, transfer, read_tables(given))

    return _stage(
        "finetune", out, config, inputs, build,
        checkpoints=checkpoints, resume=resume, device=device, force=force, extra={"transfer": transfer},
    )  # fmt: skip


def pretrain(
    stores: Sequence[Path],
    out: Path,
    config: Config,
    *,
    downstream: Sequence[tuple[Path, Path]] = (),
    genes: Path | None = None,
    embeddings: Mapping[SemanticKind, Path] | None = None,
    checkpoints: Path | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    force: bool = False,
) -> Path:
    """Learn the distribution of cells in their context: control stream zero, perturbations untold.

    Parameters
    ----------
    stores
        Each becomes a data set with its own input layers. The genes are the union of theirs.
    downstream
        Pairs (store, split) of later experiments: their validation and test conditions, and cells that bear a
        name of such a cell, are left out.
    genes
        Text file of gene names to use instead of the union.

    Others as in `train`.
    """
    settings = config.train.model_copy(update={"zero_control": True})
    config = config.model_copy(update={"train": settings})
    names = files.existing(genes, "gene list").read_text().split() if genes else None
    inputs = {f"store.{i}": path for i, path in enumerate(stores)}
    inputs |= {f"downstream.{i}.store": pair[0] for i, pair in enumerate(downstream)}
    inputs |= {f"downstream.{i}.split": pair[1] for i, pair in enumerate(downstream)}
    inputs |= {"genes": genes} if genes else {}
    given = embeddings or {}
    inputs |= _roles(given)

    def build() -> Material:
        return for_pretraining(stores, config, downstream, names, read_tables(given))

    return _stage(
        "pretrain",
        out,
        config,
        inputs,
        build,
        checkpoints=checkpoints,
        resume=resume,
        device=device,
        force=force,
    )


def _roles(embeddings: Mapping[SemanticKind, Path]) -> dict[str, Path]:
    """Return semantic tables as inputs of a stage."""
    return {f"embedding.{kind}": path for kind, path in embeddings.items()}


def _stage(
    name: str,
    out: Path,
    config: Config,
    inputs: dict[str, Path],
    build: Callable[[], Material],
    *,
    checkpoints: Path | None,
    resume: Resume,
    device: str,
    force: bool,
    extra: dict[str, Any] | None = None,
) -> Path:
    processes, where = Processes.from_environment(), resolve_device(device)
    recipe = {
        section: getattr(config, section).model_dump(mode="json", exclude=_NO_EFFECT) for section in _SECTIONS
    }
    settings = {**recipe, **(extra or {})}
    folder = checkpoints or out.with_name(f"{out.name}.checkpoints")
    hashes = {role: {"sha256": files.sha256(files.existing(path, role))} for role, path in inputs.items()}
    fingerprint = {"stage": name, **settings, "seed": config.seed, "inputs": hashes}

    def run() -> tuple[Material, Fitted]:
        material = build()
        return material, fit(material, folder, fingerprint, resume=resume, device=where, processes=processes)

    if processes.rank > 0:  # the first process alone writes
        if force or not provenance.up_to_date(name, out, config=settings, inputs=inputs, seed=config.seed):
            run()
        return out
    with provenance.stage(
        name, out, config=settings, inputs=inputs, seed=config.seed, folder=True, force=force
    ) as stage:
        if stage.skip:
            return out
        material, fitted = run()
        bundle = material.bundle(fitted.model, fitted.facts, fitted.curve)
        bundle.save(stage.path)
        kept = material.config.train
        hand_over(folder, stage.path, kept_steps(kept.keep_every, kept.max_steps))
        stage.results |= bundle.training
    if checkpoints is None:
        files.remove(folder)
    return out
