"""Resumable checkpoints: one folder per run, one trainer at a time, whole files only, and a time to stop."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from perturbdiff import files
from perturbdiff.errors import StoppedEarly, UserError, listing
from perturbdiff.training.module import ends_step

logger = logging.getLogger(__name__)

KEY = "perturbdiff"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
_AFRESH = "start afresh with --resume never, or give another --checkpoints folder"


class CheckpointFolder:
    """The folder of one run's checkpoints.

    Parameters
    ----------
    path
        The folder.
    fingerprint
        What determines the run: resolved configuration and hashes of the inputs. It is stored in each checkpoint.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path, self.fingerprint = path, fingerprint

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.path / "last.ckpt"

    def best(self, step: int) -> Path:
        """Where the weights of a step that validated best are kept."""
        return self.path / f"best-{step:09d}.safetensors"

    @property
    def first_epoch(self) -> Path:
        """Where the weights at the end of the first epoch are kept."""
        return self.path / "first-epoch.safetensors"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process alone.

        Raises
        ------
        UserError
            If another process trains there, or the folder cannot be written.
        """
        with files.locked(self.path, "another training"):
            yield

    def find(self, resume: Literal["auto", "never"]) -> tuple[Path | None, int]:
        """Return the checkpoint to continue from and its step, or (None, 0). ``never`` clears the folder.

        Raises
        ------
        UserError
            If the checkpoint belongs to a run with other settings or inputs, or cannot be read.
        """
        if resume == "never":
            self.clear()
        if not self.last.exists():
            return None, 0
        try:
            kept = torch.load(self.last, map_location="cpu", mmap=True, weights_only=True)
            step, fingerprint = int(kept["global_step"]), json.loads(kept[KEY]["fingerprint"])
        except Exception as error:  # noqa: BLE001 - torch raises many kinds for a file that is not whole
            raise UserError(
                f"{self.last}: this checkpoint cannot be read ({type(error).__name__}); {_AFRESH}"
            ) from None
        ours = json.loads(json.dumps(self.fingerprint, default=str))
        if fingerprint != ours:
            raise UserError(
                f"{self.last}: this checkpoint belongs to another run; different: "
                f"{listing(_differences(fingerprint, ours))}; {_AFRESH}"
            )
        return self.last, step

    def clear(self) -> None:
        """Delete the checkpoints, kept weights and logs that are there."""
        kept = ("*.ckpt", ".*.partial", "best-*.safetensors", "first-epoch.safetensors", "steps")
        for pattern in (*kept, "training.csv", "tensorboard"):
            for path in self.path.glob(pattern):
                files.remove(path)

    def save(self, trainer: pl.Trainer) -> None:
        """Write the trainer's state; a reader sees the old checkpoint or the new one, never a part."""
        if not trainer.is_global_zero:
            trainer.save_checkpoint(self.last)  # takes part in gathering the state, writes nothing
            return
        with files.writing(self.last) as partial:
            trainer.save_checkpoint(partial)


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(set(old) | set(new)):
            found += _differences(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
        return found
    if old == new:
        return []
    if prefix.endswith("sha256"):
        return [f"{prefix.removesuffix('.sha256')} (contents)"]
    return [f"{prefix} ({old} then, {new} now)"]


class Allocation:
    """Knows when to stop: the end of the allocation is near, or a signal said so.

    Parameters
    ----------
    margin
        Seconds before the end at which to stop.
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}
        end = os.environ.get("PD_END_TIME") or os.environ.get("SLURM_JOB_END_TIME")
        try:
            self.end = float(end) if end else None
        except ValueError:
            logger.warning("PD_END_TIME or SLURM_JOB_END_TIME is not a time in seconds: %r; ignored", end)
            self.end = None

    def listen(self) -> None:
        """Turn SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C into a wish to stop; a second Ctrl-C stops at once."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in _SIGNALS}

    def stop_listening(self) -> None:
        """Put the former signal handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == self.signal == "SIGINT":
            raise KeyboardInterrupt
        self.signal = name

    def reason(self) -> str | None:
        """Return why to stop now, or None."""
        if self.signal:
            return f"signal {self.signal}"
        if self.end is not None and time.time() > self.end - self.margin:
            return f"the allocation ends in {max(self.end - time.time(), 0):.0f} s"
        return None


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
        From the training loop, after a checkpoint, if it is time to stop.
    """

    def __init__(self, folder: CheckpointFolder, every: int, allocation: Allocation) -> None:
        self.folder, self.every, self.allocation = folder, every, allocation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to signals, after Lightning has set its own handlers."""
        self.allocation.listen()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time; stop if it must be. Never between the passes of a step."""
        if not ends_step(trainer, batch_idx):
            return
        step, last = trainer.global_step, trainer.max_steps
        reason = self.allocation.reason()
        if trainer.world_size > 1 and trainer.strategy.reduce_boolean_decision(reason is not None, all=False):
            reason = reason or "another process was told to stop"
        if reason and step < last:
            self.folder.save(trainer)
            raise StoppedEarly(
                f"stopped at step {step} of {last} with a checkpoint in {self.folder.path}: {reason}; "
                "run the same command again to continue"
            )
        if step % self.every == 0 or step == last:
            self.folder.save(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store what determines the run."""
        checkpoint[KEY] = {"fingerprint": json.dumps(self.folder.fingerprint, sort_keys=True, default=str)}

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put the former signal handlers back."""
        self.allocation.stop_listening()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the former signal handlers back."""
        self.allocation.stop_listening()
