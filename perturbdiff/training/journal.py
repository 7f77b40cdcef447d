"""The record of a training: loss terms by step, a line for the log, TensorBoard."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pandas as pd
from torch import Tensor

from perturbdiff.data.loader import Batch
from perturbdiff.errors import UserError
from perturbdiff.training.module import TrainingModule, ends_step

logger = logging.getLogger(__name__)

COLUMNS: list[str] = ["step", "split", "total", "mmd", "mse", "energy", "r2", "pdcorr", "learning_rate"]


class Journal(pl.Callback):
    """Keeps the table of loss terms, the same after an interruption as without one.

    Rows of split ``train`` are means over the steps since the last row; ``valid`` rows are added by `Validation`.

    Parameters
    ----------
    every
        Steps between rows.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.rows: list[dict[str, Any]] = []
        self._sums: dict[str, Tensor] = {}
        self._steps = 0  # forward passes since the last row
        self._clock: tuple[float, int] | None = None
        self._started: tuple[float, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"rows": self.rows, "sums": self._sums, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self.rows, self._steps = list(state_dict["rows"]), int(state_dict["steps"])
        self._sums = dict(state_dict["sums"])

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the clock."""
        if self._clock is None:
            self._clock = self._started = (time.monotonic(), trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Sum the terms; every few steps write a row and a line."""
        assert isinstance(pl_module, TrainingModule)
        for name, value in pl_module.terms.items():
            value = value.double()
            self._sums[name] = value if self._steps == 0 else self._sums[name].to(value.device) + value
        self._steps += 1
        step = trainer.global_step
        if not ends_step(trainer, batch_idx):
            return
        if step % self.every and step != trainer.max_steps:
            return
        means = {name: value / self._steps for name, value in self._sums.items()}
        if trainer.world_size > 1:
            means = {n: trainer.strategy.reduce(v.float(), reduce_op="mean") for n, v in means.items()}
        row = {name: float(value) for name, value in means.items()}
        self._sums, self._steps = {}, 0
        if not math.isfinite(row["total"]):
            raise UserError(
                f"training diverged: the loss is {row['total']} at step {step}; lower train.learning_rate"
            )
        row["learning_rate"] = pl_module.learning_rate(step - 1)
        self.add(trainer, "train", row)
        if trainer.is_global_zero:
            sets = batch.target.shape[0] * trainer.accumulate_grad_batches
            self._say(trainer, row, sets * batch.target.shape[1])

    def add(self, trainer: pl.Trainer, split: str, values: dict[str, float]) -> None:
        """Add a row at the current step and send it to TensorBoard."""
        self.rows.append({"step": trainer.global_step, "split": split, **values})
        for backend in trainer.loggers:
            backend.log_metrics({f"{split}/{k}": v for k, v in values.items()}, step=trainer.global_step)

    def _say(self, trainer: pl.Trainer, row: dict[str, float], cells: int) -> None:
        now, step = time.monotonic(), trainer.global_step
        (since, before), (started, first) = self._clock or (now, step), self._started or (now, step)
        self._clock = (now, step)
        rate = (step - before) * cells * trainer.world_size / max(now - since, 1e-9)
        left = (trainer.max_steps - step) * (now - started) / max(step - first, 1)
        logger.info(
            "step %d/%d: loss %.4g (%s), rate %.2g, %.0f cells/s, %s left",
            step, trainer.max_steps, row["total"],
            ", ".join(f"{name} {row[name]:.4g}" for name in ("mmd", "mse") if name in row),
            row["learning_rate"], rate, _span(left),
        )  # fmt: skip

    def table(self) -> pd.DataFrame:
        """Return the rows as a table of `COLUMNS`."""
        return pd.DataFrame(self.rows, columns=pd.Index(COLUMNS))

    def write(self, path: Path) -> None:
        """Write the table as CSV."""
        self.table().to_csv(path, index=False, float_format="%.6g")


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
