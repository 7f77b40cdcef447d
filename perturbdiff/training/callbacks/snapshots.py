"""Weights that are kept on the way: whole bundles every so many steps, and the end of the first epoch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from perturbdiff.checkpoint.bundle import STEPS, Bundle, write_weights
from perturbdiff.model import Denoiser
from perturbdiff.runtime import files
from perturbdiff.training.callbacks.loggers import NOTES
from perturbdiff.training.callbacks.validation import Averaging, averaged
from perturbdiff.training.checkpoints.run_folder import FIRST_EPOCH, LOGS, CheckpointFolder
from perturbdiff.training.module import TrainingModule, ends_step

_EVENTS = "events.out.tfevents."


class Snapshots(pl.Callback):
    """Writes averaged weights into the checkpoint folder; an interrupted run writes the same bytes again.

    Parameters
    ----------
    folder
        The checkpoint folder.
    first_epoch
        Step at which the first pass over the training cells ends, whose weights to keep; None for not.
    every
        Steps between the bundles to keep, or None.
    bundle
        Makes a bundle of a module and its step.
    averaging
        Where the weights come from.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        *,
        first_epoch: int | None,
        every: int | None,
        bundle: Callable[[TrainingModule, int], Bundle],
        averaging: Averaging | None,
    ) -> None:
        self.folder, self.first_epoch, self.every = folder, first_epoch, every
        self.bundle, self.averaging = bundle, averaging

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep what is due after this step."""
        assert isinstance(pl_module, TrainingModule)
        if not (trainer.is_global_zero and ends_step(trainer, batch_idx)):
            return
        step, module = trainer.global_step, averaged(self.averaging, pl_module)
        if step == self.first_epoch:
            self.folder.keep(FIRST_EPOCH, module.denoiser, write_weights)
        if self.every is not None and step % self.every == 0:
            bundle = self.bundle(module, step)

            def write(model: Denoiser, path: Path) -> None:
                replace(bundle, model=model).save(path)

            self.folder.keep(f"{STEPS}/{step:07d}", bundle.model, write, folder=True)


def kept_steps(every: int | None, max_steps: int) -> list[str]:
    """Return the names of the folders of the bundles that a training keeps."""
    return [] if every is None else [f"{step:07d}" for step in range(every, max_steps + 1, every)]


def hand_over(checkpoints: CheckpointFolder, bundle: Path, names: list[str]) -> None:
    """Put kept bundles of a checkpoint folder into a bundle, without a second copy on the disk if it can be.

    Raises
    ------
    UserError
        If one is gone.
    """
    for name in names:
        target = bundle / STEPS / name
        if item := checkpoints.unwritten.get(f"{STEPS}/{name}"):
            target.mkdir(parents=True)
            item.write(item.model, target)
            continue
        source = checkpoints.path / STEPS / name
        files.existing(source, "kept bundle (run again with --resume never)")
        shutil.copytree(source, target, copy_function=_link)
    if (logs := checkpoints.path / LOGS).is_dir():
        shutil.copytree(
            logs, bundle / LOGS, ignore=shutil.ignore_patterns(*NOTES), copy_function=_copy_without_host
        )


def _copy_without_host(source: str, target: str) -> None:
    """Copy a log; TensorBoard names its files by time, host, process and number, and a bundle is shared."""
    path = Path(target)
    if path.name.startswith(_EVENTS):
        began, *_, number = path.name.removeprefix(_EVENTS).split(".")
        path = path.with_name(f"{_EVENTS}{began}.{number}")
    shutil.copy2(source, path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
