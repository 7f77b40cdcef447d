"""A whole training: the loop with what is done beside it, then the choice of the weights."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.diffusion.samplers import set_noise
from perturbdiff.generation import depth_ceiling
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import EXIT_FAILURE, UserError
from perturbdiff.runtime.progress import track
from perturbdiff.training.callbacks.checkpointing import Checkpoints, Snapshots
from perturbdiff.training.callbacks.loggers import Curves
from perturbdiff.training.callbacks.training_log import TrainingLog
from perturbdiff.training.callbacks.validation import Validation, effect_size
from perturbdiff.training.distributed.processes import Processes, TimeLimit, lost
from perturbdiff.training.loop import Callback, TrainingLoop
from perturbdiff.training.module import ZEROS, TrainingModule, generator
from perturbdiff.training.network_size import describe
from perturbdiff.training.run_folder import FIRST_EPOCH, LOGS, CheckpointFolder, Start
from perturbdiff.training.setup import TrainingSetup

logger = logging.getLogger(__name__)

_CELLS = 4096
_GENES_AT_ONCE = 1024


@torch.no_grad()
def zero_levels(module: TrainingModule, setup: TrainingSetup) -> Tensor:
    """Return the level of each gene, log1p [G], on the network's device. It is 0 where predictions have enough zeros.

    Cells are sampled for the first training sets, at least 4,096 cells: as the recipe says, with zeros and totals as
    predicted. A level is the value from which on predicted cells are as many as real cells with a value above zero.
    """
    settings = module.config.sample.model_copy(update={"zeros": "predicted", "totals": "predicted"})
    device = module.denoiser.unit.device
    stream = setup.train_sampler(Processes(), quiet=True)
    train = setup.config.train
    steps = math.ceil(_CELLS / (train.set_size * train.sets_per_step))
    together = math.gcd(train.sets_per_step, module.config.sample.sets_per_batch)  # sets computed at once
    predicted, real = [], []
    for step, loaded in enumerate(setup.loader(stream, start_step=0, stop_step=steps)):
        noise = generator("cpu", ZEROS, module.config.seed, step)
        for part in loaded.split(train.sets_per_step // together):
            batch = part.to(device)

            def draw(shape: torch.Size = batch.target.shape, noise: torch.Generator = noise) -> Tensor:
                return set_noise(shape, noise, train.set_noise).to(device)

            predicted.append(module.generate(batch, settings, draw).flatten(0, 1))
            real.append((batch.target > 0).sum((0, 1)))
    cells, positive = torch.cat(predicted), torch.stack(real).sum(0)
    levels = _levels(cells, positive)
    above = int(((cells > 0).sum(0) > positive).sum())
    logger.info("zeros: %d of %d genes are predicted above zero more often than they are", above, len(levels))
    return levels


def _levels(predicted: Tensor, positive: Tensor) -> Tensor:
    """Return the ``positive``-th [G] largest value of each gene among cells [n, G]; for 0, the largest."""
    places = (len(predicted) - positive).clamp(max=len(predicted) - 1)
    parts = [
        part.sort(0).values.gather(0, place[None])[0]
        for part, place in zip(predicted.split(_GENES_AT_ONCE, 1), places.split(_GENES_AT_ONCE), strict=True)
    ]
    return torch.cat(parts)


@dataclass
class Fitted:
    """The result of a training.

    Attributes
    ----------
    model
        The network with the chosen weights.
    curve
        Loss terms by step.
    facts
        Steps, chosen step and its score, and how much of the training changes the model reproduces.
    notes
        Figures of this attempt: time, throughput.
    """

    model: Denoiser
    curve: pd.DataFrame
    facts: dict[str, Any]
    notes: dict[str, Any]


def fit(
    setup: TrainingSetup,
    checkpoints: CheckpointFolder,
    start: Start,
    *,
    time_limit: TimeLimit,
    device: Literal["cpu", "cuda"],
    processes: Processes,
) -> Fitted:
    """Train, from the checkpoint of a locked folder if there is one.

    Raises
    ------
    UserError
        If the loss diverges; if it is time to stop and nothing could be kept.
    StoppedEarly
        After writing a checkpoint, if the allocation ends or a signal says so.
    """
    stream = setup.train_sampler(processes)
    setup.limit_steps(stream.steps_per_epoch)
    config, first = setup.config, processes.rank == 0
    for line in describe(setup.model, config):
        logger.info("%s", line)
    module = TrainingModule(setup.model, config, ceiling=depth_ceiling(setup.target_sum()))
    curves = Curves(
        config.train.loggers if first else (), checkpoints.path / LOGS, config.name, checkpoints.key
    )
    run = _Run(setup, checkpoints, TrainingLog(config.train.log_every, curves))
    validation = run.validation()
    kept = (
        {"log": run.training_log}
        if validation is None
        else {"log": run.training_log, "validation": validation}
    )
    callbacks = run.callbacks(validation, stream.steps_per_epoch, time_limit)
    loop = TrainingLoop(module, device, processes, callbacks, kept)
    if start.checkpoint is not None:
        loop.load_state_dict(torch.load(start.checkpoint, map_location="cpu", weights_only=True))
    batches = setup.loader(
        stream,
        start_step=start.step, stop_step=config.train.max_steps,
        packed=device == "cuda", pin_memory=device == "cuda",
    )  # fmt: skip
    with time_limit.listening(), _concluding(run.training_log, curves, start.step, config.train.max_steps):
        run.training_log.throughput.start(start.step)
        try:
            loop.run(batches)
        except RuntimeError as error:
            if processes.world_size == 1 or not lost(error):
                raise
            logger.error("another process of this training ended; see its message")
            raise SystemExit(EXIT_FAILURE) from None
    chosen = loop.averaged
    model = chosen.denoiser
    facts: dict[str, Any] = {"steps": config.train.max_steps, "chosen_step": config.train.max_steps}
    if first:  # which alone writes the bundle
        facts |= run.choose(model, validation, stream.steps_per_epoch)
        if config.model.gate:
            model.zero_level.copy_(zero_levels(chosen, setup))
        if not config.train.zero_control:
            facts["effect_slope"] = effect_size(chosen, setup)
    return Fitted(model.cpu().eval(), run.training_log.table(), facts, run.training_log.throughput.facts())


@contextmanager
def _concluding(training_log: TrainingLog, curves: Curves, first: int, last: int) -> Iterator[None]:
    """Show the progress from step ``first`` to ``last``. Say at the end, however it comes, how fast it was."""
    success = False
    try:
        with track(
            "training", last, "steps", done=first, details=training_log.details, lines=False
        ) as training_log.bar:
            yield
        success = True
    finally:
        training_log.throughput.conclude(last)
        curves.close(success=success)


@dataclass
class _Run:
    """What the callbacks of a training share."""

    setup: TrainingSetup
    checkpoints: CheckpointFolder
    training_log: TrainingLog

    def validation(self) -> Validation | None:
        """Return the callback that validates, or None if there is nothing to validate on."""
        sets, train = self.setup.validation(), self.setup.config.train
        if sets is None:
            logger.info("no condition is for validation")
            return None
        return Validation(
            *sets, train.valid_sets, folder=self.checkpoints, training_log=self.training_log,
            sets_per_pass=max(train.sets_per_step // train.accumulate, 1), keep=train.choose == "validation",
        )  # fmt: skip

    def callbacks(self, validation: Validation | None, epoch: int, time_limit: TimeLimit) -> list[Callback]:
        """Return the callbacks in the order in which a step's end concerns them; the checkpoint comes last.

        ``epoch`` is the number of steps that pass over the training cells once.
        """
        train = self.setup.config.train
        first_epoch = epoch if train.choose == "first-epoch" else None
        snapshots = Snapshots(
            self.checkpoints, first_epoch=first_epoch, every=train.keep_every, bundle=self._bundle
        )
        saving = Checkpoints(self.checkpoints, train.checkpoint_every, time_limit)
        ordered = (self.training_log, validation, snapshots, saving)
        return [callback for callback in ordered if callback is not None]

    def _bundle(self, module: TrainingModule, step: int) -> Bundle:
        model = module.denoiser
        if self.setup.config.model.gate:
            model = copy.deepcopy(model)
            model.zero_level.copy_(zero_levels(module, self.setup))
        facts = {"steps": self.setup.config.train.max_steps, "chosen_step": step}
        return self.setup.bundle(model, facts, self.training_log.table())

    def choose(self, model: Denoiser, validation: Validation | None, epoch: int) -> dict[str, Any]:
        """Load the weights that ``train.choose`` selects into ``model`` and return facts about them."""
        train = self.setup.config.train
        if train.choose == "first-epoch" and epoch <= train.max_steps:
            model.load_state_dict(self.checkpoints.weights(FIRST_EPOCH))
            logger.info("weights of step %d chosen: the end of the first epoch", epoch)
            return {"chosen_step": epoch}
        if train.choose == "validation" and validation is not None:
            if validation.best_step < 0:
                raise UserError(
                    "no validation gave a finite score: training diverged; lower train.learning_rate"
                )
            best = self.checkpoints.best(validation.best_step)
            model.load_state_dict(self.checkpoints.weights(best))
            logger.info("weights of step %d chosen by validation", validation.best_step)
            score = {f"validation_{train.valid_metric}": round(validation.best_value, 6)}
            return {"chosen_step": validation.best_step, **score}
        why = {
            "first-epoch": f": the first epoch would end at step {epoch}",
            "validation": ": there was no validation",
        }
        logger.info("weights of the last step, %d, chosen%s", train.max_steps, why.get(train.choose, ""))
        return {}
