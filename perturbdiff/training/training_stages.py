"""The stages `train`, `pretrain` and `finetune`. They read stores and splits and write a bundle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perturbdiff.checkpoint.bundle_record import CARD
from perturbdiff.checkpoint.pretrained_embeddings import read_tables
from perturbdiff.config.settings import Config
from perturbdiff.embeddings.embedding_tables import SemanticKind
from perturbdiff.genes.gene_lists import read_gene_set
from perturbdiff.runtime import provenance
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.outputs import Output
from perturbdiff.runtime.resources import resolve_device
from perturbdiff.training.distributed.processes import Processes, TimeLimit
from perturbdiff.training.run_folder import LOGS, CheckpointFolder, Start
from perturbdiff.training.setup import TrainingSetup, for_finetuning, for_pretraining, from_scratch
from perturbdiff.training.transfer import Transfer

if TYPE_CHECKING:
    from perturbdiff.training.fit import Fitted

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
    genes: Path | None = None,
    scored_on: Path | None = None,
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
    genes
        Text file, vocabulary or store with the genes of the model, which the store must have; default: all its genes.
    scored_on
        Text file, vocabulary or store: predictions will be scored on its genes, so that the model must have them.
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
    files = embeddings or {}
    names = _names(genes)
    inputs = {"store": store, "split": split, **({"genes": genes} if genes else {}), **_roles(files)}

    def build() -> TrainingSetup:
        return _scorable(from_scratch(store, split, config, read_tables(files), names), scored_on)

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
    scored_on: Path | None = None,
    embeddings: Mapping[SemanticKind, Path] | None = None,
    checkpoints: Path | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    force: bool = False,
) -> Path:
    """Continue training from the weights of a pretrained bundle; see `train` and `transfer_weights`.

    ``transfer`` is what becomes of the input and output layers: ``keep`` (pretrained genes and weights),
    ``reinit`` (pretrained genes, new weights) or ``new-genes`` (this store's genes, new weights).
    """
    files = embeddings or {}
    inputs = {"bundle": bundle, "store": store, "split": split, **_roles(files)}

    def build() -> TrainingSetup:
        setup = for_finetuning(bundle, store, split, config, transfer, read_tables(files))
        return _scorable(setup, scored_on)

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
    scored_on: Path | None = None,
    embeddings: Mapping[SemanticKind, Path] | None = None,
    checkpoints: Path | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    force: bool = False,
) -> Path:
    """Learn the distribution of cells in their context, without control cells and perturbations as inputs.

    Parameters
    ----------
    stores
        Each becomes a data set with its own input layers. The genes are the union of theirs.
    downstream
        Pairs (store, split) of later experiments: their validation and test conditions, and cells that bear a
        name of such a cell, are left out.
    genes
        Text file, vocabulary or store with the genes to use instead of the union.

    Others as in `train`.
    """
    settings = config.train.model_copy(update={"zero_control": True})
    config = config.model_copy(update={"train": settings})
    names = _names(genes)
    inputs = {f"store.{i}": path for i, path in enumerate(stores)}
    inputs |= {f"downstream.{i}.store": pair[0] for i, pair in enumerate(downstream)}
    inputs |= {f"downstream.{i}.split": pair[1] for i, pair in enumerate(downstream)}
    inputs |= {"genes": genes} if genes else {}
    files = embeddings or {}
    inputs |= _roles(files)

    def build() -> TrainingSetup:
        return _scorable(for_pretraining(stores, config, downstream, names, read_tables(files)), scored_on)

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


def _names(genes: Path | None) -> list[str] | None:
    """Return the genes of a text file, a vocabulary or a store; None without one."""
    return None if genes is None else read_gene_set(genes, genes.name, None, Path()).genes


def _scorable(setup: TrainingSetup, scored_on: Path | None) -> TrainingSetup:
    """Return the setup of a model that can predict all genes of ``scored_on``.

    Raises
    ------
    UserError
        If the model lacks some: `evaluate` would refuse its predictions after the whole training.
    """
    if missing := sorted(set(_names(scored_on) or ()) - set(setup.genes)):
        raise UserError(
            f"{scored_on}: {len(missing)} of its genes are not among the model's {len(setup.genes)}, so that "
            f"predictions could not be scored on it: {listing(missing)}; train with these genes (--genes, or "
            "--transfer new-genes), or score fewer"
        )
    return setup


def _roles(embeddings: Mapping[SemanticKind, Path]) -> dict[str, Path]:
    """Return semantic tables as inputs of a stage."""
    return {f"embedding.{kind}": path for kind, path in embeddings.items()}


def _stage(
    name: str,
    out: Path,
    config: Config,
    inputs: dict[str, Path],
    build: Callable[[], TrainingSetup],
    *,
    checkpoints: Path | None,
    resume: Resume,
    device: str,
    force: bool,
    extra: dict[str, Any] | None = None,
) -> Path:
    config.sample.check_levels(config.schedule.num_steps)  # because training samples cells too
    processes, where = Processes.from_environment(), resolve_device(device)
    recipe = {
        section: getattr(config, section).model_dump(mode="json", exclude=_NO_EFFECT) for section in _SECTIONS
    }
    base = provenance.determinants(name, {**recipe, **(extra or {})}, inputs, config.seed)
    folder = CheckpointFolder(checkpoints or out.with_name(f"{out.name}.checkpoints"), _fingerprint(base))
    time_limit = TimeLimit(config.train.stop_margin)
    place = Output(name, out, folder=True)
    place.check_place({**inputs, "checkpoints": folder.path})

    with ExitStack() as stack:

        def begin() -> dict[str, Any] | None:
            """Lock the folder and return where to start, or None if there is nothing to do."""
            # a run that was killed after its last rename leaves its checkpoints, which go below
            left = checkpoints is None and folder.was_used
            if not (force or left) and provenance.up_to_date(out, base):
                return None
            place.check(base, force=force)
            with time_limit.listening():
                stack.enter_context(folder.locked(time_limit.reason))
            stack.callback(folder.tidy)
            if not force and provenance.up_to_date(out, base):  # the run that we waited for has made it
                return None
            checkpoint, step = folder.find(resume)
            return {"checkpoint": checkpoint and str(checkpoint), "step": step}

        processes.meet(where)
        beginning = processes.first("begin", begin)
        if beginning is not None:
            checkpoint = beginning["checkpoint"]
            start = Start(None if checkpoint is None else Path(checkpoint), beginning["step"])
            _train(out, folder, base, inputs, build, start, time_limit, processes, where, force=force)
        if checkpoints is None and folder.held:
            folder.discard()
    return out


def _train(
    out: Path,
    folder: CheckpointFolder,
    base: dict[str, Any],
    inputs: Mapping[str, Path],
    build: Callable[[], TrainingSetup],
    start: Start,
    time_limit: TimeLimit,
    processes: Processes,
    device: Literal["cpu", "cuda"],
    *,
    force: bool,
) -> None:
    """Train and write the bundle. Only the first process writes."""

    def run() -> tuple[TrainingSetup, Fitted]:
        setup = build()
        if start.checkpoint is not None:
            last = setup.config.train.max_steps
            logger.info("continuing at step %d of %d from %s", start.step, last, start.checkpoint)
        from perturbdiff.training.fit import fit

        return setup, fit(setup, folder, start, time_limit=time_limit, device=device, processes=processes)

    if processes.rank > 0:
        run()
        return
    with provenance.stage(
        base["stage"], out, config={}, inputs=inputs, folder=True, force=force, base=base
    ) as stage:
        if stage.skip:
            return
        setup, fitted = run()
        bundle = setup.bundle(fitted.model, fitted.facts, fitted.curve)
        bundle.save(stage.path)
        from perturbdiff.training.callbacks.checkpointing import hand_over, kept_steps

        kept = setup.config.train
        hand_over(folder, stage.path, kept_steps(kept.keep_every, kept.max_steps))
        stage.chance = (LOGS, CARD)
        stage.results |= bundle.training
        stage.notes |= fitted.notes


def _fingerprint(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines a run apart from versions and the names of its inputs."""
    hashes = {role: {"sha256": facts["sha256"]} for role, facts in base["inputs"].items()}
    return {"stage": base["stage"], **base["config"], "seed": base["seed"], "inputs": hashes}
