"""The record of a training: loss terms by step, a line for the log, rows for loggers."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pandas as pd
from torch import Tensor

from perturbdiff.loading.loader import CellSetBatch
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.callbacks.loggers import Curves
from perturbdiff.training.callbacks.throughput import Throughput
from perturbdiff.training.module import TrainingModule, ends_step

logger = logging.getLogger(__name__)

COLUMNS: list[str] = ["step", "split", "total", "mmd", "mse", "energy", "r2", "pdcorr", "learning_rate"]


class TrainingLog(pl.Callback):
    """Keeps the table of loss terms, the same after an interruption as without one.

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
        self.pace = Throughput()
        self._sums: dict[str, Tensor] = {}
        self._steps = 0  # forward passes since the last row

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"rows": self.rows, "sums": self._sums, "steps": self._steps, "pace": self.pace.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self.rows, self._steps = list(state_dict["rows"]), int(state_dict["steps"])
        self._sums = dict(state_dict["sums"])
        self.pace = Throughput(**state_dict["pace"])

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the clock."""
        self.pace.start(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: CellSetBatch,
        batch_idx: int,
    ) -> None:
        """Sum the terms; every few steps write a row and a line, and a line alone if a row is long in coming."""
        assert isinstance(pl_module, TrainingModule)
        for name, value in pl_module.terms.items():
            value = value.double()
            self._sums[name] = value if self._steps == 0 else self._sums[name].to(value.device) + value
        self._steps += 1
        step = trainer.global_step
        if not ends_step(trainer, batch_idx):
            return
        sets = batch.target.shape[0] * trainer.accumulate_grad_batches * trainer.world_size
        self.pace.step(sets * batch.target.shape[1])
        if step % self.every and step != trainer.max_steps:
            if trainer.is_global_zero and self.pace.silent():
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
            pl_module.learning_rate(step - 1), self.pace.said(step, trainer.max_steps),
        )  # fmt: skip

    def table(self) -> pd.DataFrame:
        """Return the rows as a table of `COLUMNS`."""
        return pd.DataFrame(self.rows, columns=pd.Index(COLUMNS))

    def write(self, path: Path) -> None:
        """Write the table as CSV."""
        tabular.write_csv(self.table(), path, float_format="%.6g")
