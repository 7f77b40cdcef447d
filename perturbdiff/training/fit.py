"""The training loop: Lightning with our callbacks, resumable at any step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor

from perturbdiff.data.loader import Batch, SetLoader
from perturbdiff.errors import UserError
from perturbdiff.model import Denoiser
from perturbdiff.training.checkpoints import Allocation, CheckpointFolder, Checkpoints
from perturbdiff.training.counts import describe
from perturbdiff.training.journal import Journal
from perturbdiff.training.loggers import make_loggers
from perturbdiff.training.material import Material
from perturbdiff.training.module import TrainingModule
from perturbdiff.training.processes import Processes
from perturbdiff.training.validation import Averaging, Validation, averaged

logger = logging.getLogger(__name__)


@dataclass
class Fitted:
    """What a training ends with.

    Attributes
    ----------
    model
        The network with the chosen weights.
    curve
        Loss terms by step.
    facts
        Steps, chosen step and its score.
    """

    model: Denoiser
    curve: pd.DataFrame
    facts: dict[str, Any]


class _Endless:
    """A loader without a length, so that Lightning counts optimiser steps and not epochs."""

    def __init__(self, loader: SetLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)


def fit(
    material: Material,
    folder: Path,
    fingerprint: Mapping[str, Any],
    *,
    resume: Literal["auto", "never"],
    device: Literal["cpu", "cuda"],
    processes: Processes,
) -> Fitted:
    """Train, from the last checkpoint of ``folder`` if there is one.

    Raises
    ------
    UserError
        If the folder is in use or its checkpoint is another run's; if the loss diverges.
    StoppedEarly
        After writing a checkpoint, if the allocation ends or a signal says so.
    """
    checkpoints = CheckpointFolder(folder, fingerprint)
    with ExitStack() as stack:
        if processes.rank == 0:
            stack.enter_context(checkpoints.locked())
        # Only the first process clears the folder; the others need not wait for that.
        start, step = (None, 0) if processes.rank and resume == "never" else checkpoints.find(resume)
        stream = material.train_sampler(processes)
        material.limit_steps(stream.steps_per_epoch)
        for line in describe(material.model, material.config):
            logger.info("%s", line)
        if start is not None:
            logger.info("continuing at step %d of %d", step, material.config.train.max_steps)
        module = TrainingModule(material.model, material.config)
        journal = Journal(material.config.train.log_every)
        averaging = _averaging(material)
        validation = _validation(material, checkpoints, journal, averaging)
        callbacks = _callbacks(material, checkpoints, journal, averaging, validation)
        stack.enter_context(_quiet())
        trainer = _trainer(material, callbacks, folder, device, processes)
        loader = material.loader(
            stream,
            start_step=step, stop_step=material.config.train.max_steps, pin_memory=device == "cuda",
        )  # fmt: skip
        trainer.fit(module, _Endless(loader), ckpt_path=start, weights_only=True)  # pyright: ignore[reportArgumentType]
        chosen = validation if processes.rank == 0 else None  # the first process alone writes the bundle
        return _finish(averaged(averaging, module), journal, chosen, checkpoints)


def _averaging(material: Material) -> Averaging | None:
    train = material.config.train
    if not train.ema_decay:
        return None
    return Averaging(decay=train.ema_decay, update_every_n_steps=train.ema_every)


def _validation(
    material: Material, checkpoints: CheckpointFolder, journal: Journal, averaging: Averaging | None
) -> Validation | None:
    sets = material.validation()
    if sets is None:
        logger.info("no condition is for validation: the last step's weights will be used")
        return None
    number = material.config.train.valid_sets
    return Validation(*sets, number, folder=checkpoints, journal=journal, averaging=averaging)


def _callbacks(
    material: Material,
    checkpoints: CheckpointFolder,
    journal: Journal,
    averaging: Averaging | None,
    validation: Validation | None,
) -> list[pl.Callback]:
    """Return the callbacks in the order in which a step's end concerns them; the checkpoint comes last."""
    train = material.config.train
    saving = Checkpoints(checkpoints, train.checkpoint_every, Allocation(train.stop_margin))
    return [callback for callback in (averaging, journal, validation, saving) if callback is not None]


def _trainer(
    material: Material,
    callbacks: list[pl.Callback],
    folder: Path,
    device: Literal["cpu", "cuda"],
    processes: Processes,
) -> pl.Trainer:
    train = material.config.train
    return pl.Trainer(
        **processes.trainer_options(device),
        max_steps=train.max_steps,
        max_epochs=-1,
        precision=train.precision,
        gradient_clip_val=train.clip_norm,
        callbacks=callbacks,
        logger=make_loggers(train.loggers, folder, material.config.name),
        deterministic=True,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def _finish(
    module: TrainingModule, journal: Journal, validation: Validation | None, checkpoints: CheckpointFolder
) -> Fitted:
    """Return the best step's weights, or the last's if nothing was validated."""
    model, steps = module.denoiser, module.config.train.max_steps
    facts: dict[str, Any] = {"steps": steps, "chosen_step": steps}
    if validation is not None:
        if validation.best_step < 0:
            raise UserError("no validation gave a finite score: training diverged; lower train.learning_rate")
        best = checkpoints.best(validation.best_step)
        model.load_state_dict(_read(best))
        facts |= {
            "chosen_step": validation.best_step,
            f"validation_{module.config.train.valid_metric}": round(validation.best_value, 6),
        }
        logger.info("weights of step %d chosen by validation", validation.best_step)
    return Fitted(model.cpu().eval(), journal.table(), facts)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except OSError:
        raise UserError(f"{path}: the best weights are gone; run again with --resume never") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's remarks to itself while the block runs, and put torch's settings back."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning")
    levels = {name: logging.getLogger(name).level for name in names}
    deterministic = torch.are_deterministic_algorithms_enabled()
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        warnings.filterwarnings("ignore", message=".*(lr_scheduler|pkg_resources|isinstance\\(treespec).*")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
