"""Saves every few steps, and stops in time."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from perturbdiff.runtime.errors import StoppedEarly, UserError
from perturbdiff.training.callbacks.time_limit import TimeLimit
from perturbdiff.training.checkpoints.run_folder import CheckpointFolder
from perturbdiff.training.module import ends_step

logger = logging.getLogger(__name__)


class Checkpoints(pl.Callback):
    """Saves every few steps, and stops in time.

    Parameters
    ----------
    folder
        Where to.
    every
        Steps between checkpoints.
    allocation
        When to stop.

    Raises
    ------
    StoppedEarly
        From the training loop, after a checkpoint, if it is time to stop; or without one if the folder is no longer
        ours.
    UserError
        If it is time to stop and nothing of this attempt could be kept: another attempt would not get further.
    """

    def __init__(self, folder: CheckpointFolder, every: int, allocation: TimeLimit) -> None:
        self.folder, self.every, self.allocation = folder, every, allocation
        self._first = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to signals, after Lightning has set its own handlers."""
        self._first = trainer.global_step
        self.allocation.listen()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time; stop if it must be. Never between the passes of a step."""
        if not ends_step(trainer, batch_idx):
            return
        step, last = trainer.global_step, trainer.max_steps
        reason = self.allocation.reason() or self.folder.lost
        if trainer.world_size > 1 and trainer.strategy.reduce_boolean_decision(reason is not None, all=False):
            reason = reason or "another process was told to stop"
        if reason and step < last:
            self.folder.save(trainer)
            kind, text = trainer.strategy.broadcast(self._parting(step, last, reason))
            raise StoppedEarly(text) if kind == "early" else UserError(text)
        if step % self.every == 0 or step == last:
            self.folder.save(trainer)
            self._complain(step, last)

    def _parting(self, step: int, last: int, reason: str) -> tuple[str, str]:
        """Return whether another attempt makes sense (``early``) or not (``error``), and what to say."""
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
        """Say that the checkpoint of a step could not be written, and what that means."""
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

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put the former signal handlers back."""
        self.allocation.stop_listening()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the former signal handlers back."""
        self.allocation.stop_listening()
