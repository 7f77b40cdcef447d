"""Saving during a training: checkpoints every few steps, and bundles that are kept."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from perturbdiff.checkpoint.bundle import Bundle, write_weights
from perturbdiff.checkpoint.bundle_record import STEPS
from perturbdiff.model import Denoiser
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import StoppedEarly, UserError
from perturbdiff.training.callbacks.loggers import NOTES
from perturbdiff.training.distributed.processes import TimeLimit
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.module import TrainingModule
from perturbdiff.training.run_folder import FIRST_EPOCH, LOGS, CheckpointFolder

logger = logging.getLogger(__name__)

_EVENTS = "events.out.tfevents."


class Snapshots:
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
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        *,
        first_epoch: int | None,
        every: int | None,
        bundle: Callable[[TrainingModule, int], Bundle],
    ) -> None:
        self.folder, self.first_epoch, self.every, self.bundle = folder, first_epoch, every, bundle

    def after_step(self, loop: TrainingLoop) -> None:
        """Keep what is due after this step."""
        if not loop.first_process:
            return
        step, module = loop.step, loop.averaged
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
    """Put kept bundles of a checkpoint folder into a bundle, if possible without a second copy on the disk.

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


class Checkpoints:
    """Saves every few steps, and stops in time.

    Parameters
    ----------
    folder
        Where to.
    every
        Steps between checkpoints.
    time_limit
        When to stop.

    Raises
    ------
    StoppedEarly
        From the training loop, after a checkpoint, if it is time to stop; or without one if the folder is no longer
        ours.
    UserError
        If it is time to stop and nothing of this attempt could be kept: another attempt would not get further.
    """

    def __init__(self, folder: CheckpointFolder, every: int, time_limit: TimeLimit) -> None:
        self.folder, self.every, self.time_limit = folder, every, time_limit
        self._first = folder.saved_step

    def after_step(self, loop: TrainingLoop) -> None:
        """Save if it is time, and stop if it must be."""
        step, last = loop.step, loop.max_steps
        reason = self.time_limit.reason() or self.folder.lost
        if loop.any_process(reason is not None):
            reason = reason or "another process was told to stop"
        if reason and step < last:
            self._save(loop)
            kind, text = loop.processes.first("parting", lambda: self._parting(step, last, reason))
            raise StoppedEarly(text) if kind == "early" else UserError(text)
        if step % self.every == 0 or step == last:
            self._save(loop)
            self._complain(step, last)

    def _save(self, loop: TrainingLoop) -> None:
        """Write a checkpoint; no process goes on before the file is complete."""
        loop.processes.first("checkpoint", lambda: self.folder.save(loop.state_dict()))

    def _parting(self, step: int, last: int, reason: str) -> tuple[str, str]:
        """Return whether another attempt makes sense (``early``) or not (``error``), and the message."""
        path, kept, trouble = self.folder.path, self.folder.saved_step, self.folder.trouble
        if self.folder.lost:
            return "early", (
                f"stopped at step {step} of {last} without a checkpoint: {self.folder.lost}; "
                "run the same command again, which continues when that one has ended"
            )
        if trouble is None:
            return "early", (
                f"stopped at step {step} of {last} with a checkpoint in {path}: {reason}; "
                "run the same command again to continue"
            )
        if kept > self._first:
            return "early", (
                f"stopped at step {step} of {last}: {reason}; the progress since step {kept} is NOT kept: {path} "
                f"cannot be written ({trouble}); free some space and run the same command again to continue"
            )
        return "error", (
            f"stopped at step {step} of {last}: {reason}; nothing of this attempt, from step {kept} on, is kept: "
            f"{path} cannot be written ({trouble}); free some space, then run the same command again"
        )

    def _complain(self, step: int, last: int) -> None:
        """Warn that the checkpoint of a step could not be written, and what that means."""
        path, kept, trouble = self.folder.path, self.folder.saved_step, self.folder.trouble
        if trouble is None:
            return
        if step == last:
            logger.warning(
                "step %d: the last checkpoint cannot be written to %s (%s); the result does not need it",
                step, path, trouble,
            )  # fmt: skip
            return
        logger.warning(
            "step %d: NO CHECKPOINT, %s cannot be written (%s): training goes on, but an interruption would continue "
            "from step %d; next try at step %d",
            step, path, trouble, kept, min(step + self.every, last),
        )  # fmt: skip
