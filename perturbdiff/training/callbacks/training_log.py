"""The record of a training: loss terms by step, a line for the log, rows for loggers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pandas as pd
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.module import TrainingModule, ends_step

logger = logging.getLogger(__name__)

SPEAK_SECONDS = 60.0
"""Seconds after which a line is logged even if no row of the training log is due."""
COLUMNS: list[str] = ["step", "split", "total", "mmd", "mse", "energy", "r2", "pdcorr", "learning_rate"]

NOTES = _SENT, _MLFLOW_RUN = ("sent", "mlflow-run")
"""Files beside the loggers' own, from which the next attempt continues."""


class Curves:
    """Sends rows of the training log to loggers, none of which needs a network, and none of which can end a training.

    A run that was interrupted comes past rows that it has sent already. They are counted in a file beside the
    loggers' own and not sent again, so the curves have neither steps twice nor gaps.

    Parameters
    ----------
    names
        Of ``tensorboard``, ``wandb`` (offline; ``wandb sync`` sends it later) and ``mlflow`` (local files).
    folder
        Where they write; the same for all attempts of a run.
    run
        Name of the run.
    identity
        What tells it from other runs of that name.

    Raises
    ------
    UserError
        If a logger's package is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path, run: str, identity: str) -> None:
        self.backends: list[Logger] = []
        self._sent_note = folder / _SENT
        if not names:
            return
        folder.mkdir(parents=True, exist_ok=True)
        makers = _makers(folder, run, identity)
        for name in names:
            try:
                self.backends.append(makers[name]())
            except ModuleNotFoundError:
                raise UserError(
                    f"train.loggers: {name} is not installed; pip install 'perturbdiff[{name}]'"
                ) from None
        self._sent = int(self._sent_note.read_text() or 0) if self._sent_note.is_file() else 0

    def send(self, number: int, step: int, values: Mapping[str, float]) -> None:
        """Send a row of the training log, the ``number``-th counted from 0, unless it was sent before."""
        if not self.backends or number < self._sent:
            return

        def send() -> None:
            for backend in self.backends:
                backend.log_metrics(dict(values), step=step)
                if isinstance(backend, TensorBoardLogger):
                    backend.experiment.flush()
            self._sent_note.write_text(str(number + 1))

        self._guarded(send)

    def close(self, status: str) -> None:
        """End the loggers' files: ``success`` or ``failed``."""

        def close() -> None:
            for backend in self.backends:
                backend.finalize(status)

        self._guarded(close)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a full disk shows in each library's own words
            logger.warning("the loggers (train.loggers) stop here, training goes on: %s", error)
            self.backends = []


def _makers(folder: Path, run: str, identity: str) -> dict[str, Callable[[], Logger]]:
    def mlflow() -> Logger:
        note = folder / _MLFLOW_RUN
        former = note.read_text() if note.is_file() else None
        uri = f"file:{folder.resolve() / 'mlflow'}"
        made = MLFlowLogger("perturbdiff", run, tracking_uri=uri, run_id=former)
        note.write_text(made.run_id or "")
        return made

    return {
        "tensorboard": lambda: TensorBoardLogger(folder, name="tensorboard", version=""),
        "wandb": lambda: WandbLogger(
            name=run, save_dir=folder, project="perturbdiff", offline=True, id=identity, resume="allow"
        ),
        "mlflow": mlflow,
    }


class Throughput:
    """Measures the speed of this attempt, and adds the earlier attempts.

    Parameters
    ----------
    attempts, seconds
        Attempts before this one, and their time up to the checkpoint that this one goes on from.
    """

    def __init__(self, attempts: int = 0, seconds: float = 0.0) -> None:
        self.attempts, self.seconds = attempts + 1, seconds
        self.first, self.steps, self.cells, self.validating = 0, 0, 0, 0.0
        self._began: float | None = None
        self._ended = self._spoken = 0.0
        self._cells_since = 0  # cells since the last line
        self._quiet = True  # no line was logged in this attempt

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"attempts": self.attempts, "seconds": self.seconds + self.elapsed()}

    def start(self, step: int) -> None:
        """Start the clock before the first step."""
        if self._began is None:
            self._began = self._ended = self._spoken = time.monotonic()
            self.first = step

    def step(self, cells: int) -> None:
        """Count a step of so many cells."""
        self.steps += 1
        self.cells += cells
        self._cells_since += cells
        self._ended = time.monotonic()

    def validated(self, seconds: float) -> None:
        """Leave the time of a validation out of the throughput."""
        self.validating += seconds
        self._spoken += seconds

    def line_is_due(self) -> bool:
        """Return whether a line is due: after the first step, and when the last one was long ago."""
        return self._quiet or time.monotonic() - self._spoken >= SPEAK_SECONDS

    def elapsed(self) -> float:
        """Return the seconds of this attempt until its last step."""
        return 0.0 if self._began is None else self._ended - self._began

    def words(self, step: int, last: int) -> str:
        """Return throughput since the last line and time left, for a line."""
        now = time.monotonic()
        rate = self._cells_since / max(now - self._spoken, 1e-9)
        self._spoken, self._cells_since, self._quiet = now, 0, False
        left = (last - step) * (now - (self._began or now)) / max(self.steps, 1)
        return f"{rate:.0f} cells/s, {span(left)} left"

    def facts(self) -> dict[str, Any]:
        """Return the figures of this attempt and of all attempts, for the record of the run."""
        working = max(self.elapsed() - self.validating, 1e-9)
        return {
            "attempts": self.attempts,
            "first_step": self.first,
            "train_seconds": round(self.elapsed(), 3),
            "validation_seconds": round(self.validating, 3),
            "cells_per_second": round(self.cells / working, 1),
            "train_seconds_of_all_attempts": round(self.seconds + self.elapsed(), 3),
        }

    def conclude(self, last: int) -> None:
        """Log the figures of this attempt."""
        if not self.steps:
            return
        facts = self.facts()
        logger.info(
            "attempt %d: steps %d to %d of %d in %s (validation %s), %.0f cells/s",
            self.attempts, self.first + 1, self.first + self.steps, last, span(self.elapsed()),
            span(self.validating), facts["cells_per_second"],
        )  # fmt: skip


def span(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class TrainingLog(pl.Callback):
    """Keeps the table of loss terms. It is the same with and without an interruption.

    Rows of split ``train`` are means over the steps since the last row; ``valid`` rows are added by `Validation`.

    Parameters
    ----------
    every
        Steps between rows.
    curves
        Loggers that get the rows as well.
    """

    def __init__(self, every: int, curves: Curves | None = None) -> None:
        self.every, self.curves = every, curves
        self.rows: list[dict[str, Any]] = []
        self.throughput = Throughput()
        self._sums: dict[str, Tensor] = {}
        self._steps = 0  # forward passes since the last row

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"rows": self.rows, "sums": self._sums, "steps": self._steps, "pace": self.throughput.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.rows, self._steps = list(state_dict["rows"]), int(state_dict["steps"])
        self._sums = dict(state_dict["sums"])
        self.throughput = Throughput(**state_dict["pace"])

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the clock."""
        self.throughput.start(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: CellSetBatch,
        batch_idx: int,
    ) -> None:
        """Sum the terms. Add a row and log a line every few steps, and a line alone if the next row is far off."""
        assert isinstance(pl_module, TrainingModule)
        for name, value in pl_module.terms.items():
            value = value.double()
            self._sums[name] = value if self._steps == 0 else self._sums[name].to(value.device) + value
        self._steps += 1
        step = trainer.global_step
        if not ends_step(trainer, batch_idx):
            return
        sets = batch.target.shape[0] * trainer.accumulate_grad_batches * trainer.world_size
        self.throughput.step(sets * batch.target.shape[1])
        if step % self.every and step != trainer.max_steps:
            if trainer.is_global_zero and self.throughput.line_is_due():
                self._say(trainer, pl_module, {n: float(v) / self._steps for n, v in self._sums.items()})
            return
        means = {name: value / self._steps for name, value in self._sums.items()}
        row = {name: float(value) for name, value in means.items()}
        self._sums, self._steps = {}, 0
        if not math.isfinite(row["total"]):
            raise UserError(
                f"training diverged: the loss is {row['total']} at step {step}; lower train.learning_rate"
            )
        row["learning_rate"] = pl_module.learning_rate(step - 1)
        self.add(trainer, "train", row)
        if trainer.is_global_zero:
            self._say(trainer, pl_module, row)

    def add(self, trainer: pl.Trainer, split: str, values: dict[str, float]) -> None:
        """Add a row at the current step and send it to the loggers."""
        self.rows.append({"step": trainer.global_step, "split": split, **values})
        if self.curves is not None:
            named = {f"{split}/{k}": v for k, v in values.items()}
            self.curves.send(len(self.rows) - 1, trainer.global_step, named)

    def _say(self, trainer: pl.Trainer, pl_module: TrainingModule, row: dict[str, float]) -> None:
        step = trainer.global_step
        logger.info(
            "step %d/%d: loss %.4g (%s), rate %.2g, %s",
            step, trainer.max_steps, row["total"],
            ", ".join(f"{name} {row[name]:.4g}" for name in ("mmd", "mse") if name in row),
            pl_module.learning_rate(step - 1), self.throughput.words(step, trainer.max_steps),
        )  # fmt: skip

    def table(self) -> pd.DataFrame:
        """Return the rows as a table of `COLUMNS`."""
        return pd.DataFrame(self.rows, columns=pd.Index(COLUMNS))

    def write(self, path: Path) -> None:
        """Write the table as CSV."""
        tabular.write_csv(self.table(), path, float_format="%.6g")
