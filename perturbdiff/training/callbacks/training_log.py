"""The record of a training: loss terms by step, and a line for the log."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import PROGRESS, Track, span
from perturbdiff.training.callbacks.loggers import Curves
from perturbdiff.training.loop import TrainingLoop

logger = logging.getLogger(__name__)

SPEAK_SECONDS = 60.0
"""Seconds after which a line is logged even if no row of the training log is due."""
LOSS_SECONDS = 2.0
"""Seconds after which the bar shows a new loss. To read it, a GPU has to finish the steps that it was given."""
COLUMNS: list[str] = [
    "step",
    "split",
    "total",
    "mmd",
    "mse",
    "energy",
    "r2",
    "pdcorr",
    "learning_rate",
]


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


class TrainingLog:
    """Keeps the table of loss terms, the same after an interruption as without one, and tells how training goes.

    Rows of split ``train`` are means over the steps since the last row; ``valid`` rows are added by `Validation`.

    Parameters
    ----------
    every
        Steps between rows.
    curves
        Loggers that get the rows as well.

    Attributes
    ----------
    bar
        Progress of the steps, which shows `details`.
    """

    def __init__(self, every: int, curves: Curves | None = None) -> None:
        self.every, self.curves = every, curves
        self.rows: list[dict[str, Any]] = []
        self.throughput = Throughput()
        self.bar: Track | None = None
        self._validation = ""  # in words, for the bar
        self._loss, self._loss_read = math.nan, 0.0  # of the bar, and when it was read
        self._sums: dict[str, Tensor] = {}
        self._passes = 0  # since the last row

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "rows": self.rows,
            "sums": self._sums,
            "passes": self._passes,
            "pace": self.throughput.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self.rows, self._passes = list(state["rows"]), int(state["passes"])
        self._sums = dict(state["sums"])
        self.throughput = Throughput(**state["pace"])

    def after_step(self, loop: TrainingLoop) -> None:
        """Sum the terms; every few steps write a row and a line, and a line alone if a row is long in coming."""
        for terms in loop.terms:
            for name, value in terms.items():
                value = value.double()
                self._sums[name] = self._sums[name].to(value.device) + value if self._passes else value
            self._passes += 1
        sets, cells, _ = loop.batch_shape
        self.throughput.step(sets * len(loop.terms) * loop.processes.world_size * cells)
        if self.bar is not None:
            self.bar.advance()
        if loop.step % self.every and loop.step != loop.max_steps:
            if loop.first_process and self.throughput.line_is_due():
                self._say(loop, {name: float(value) / self._passes for name, value in self._sums.items()})
            return
        row = {name: float(value / self._passes) for name, value in self._sums.items()}
        self._sums, self._passes = {}, 0
        if not math.isfinite(row["total"]):
            raise UserError(
                f"training diverged: the loss is {row['total']} at step {loop.step}; lower train.learning_rate"
            )
        row["learning_rate"] = loop.optimizer.learning_rate(loop.step - 1)
        self.add(loop.step, "train", row)
        if loop.first_process:
            self._say(loop, row)

    def details(self) -> list[str]:
        """Return what the bar says of the training: loss, validation and cells per second of this attempt."""
        now = time.monotonic()
        if self._passes and (math.isnan(self._loss) or now - self._loss_read >= LOSS_SECONDS):
            self._loss, self._loss_read = float(self._sums["total"] / self._passes), now
        loss = [] if math.isnan(self._loss) else [f"loss {self._loss:.3g}"]
        return [*loss, self._validation, f"{self.throughput.facts()['cells_per_second']:.0f} cells/s"]

    def tell(self, validation: str) -> None:
        """Let the bar say how the last validation went, or how far the present one is."""
        self._validation = validation
        if self.bar is not None:
            self.bar.advance(0)

    def add(self, step: int, split: str, values: dict[str, float]) -> None:
        """Add a row of a step and send it to the loggers."""
        self.rows.append({"step": step, "split": split, **values})
        if self.curves is not None:
            named = {f"{split}/{name}": value for name, value in values.items()}
            self.curves.send(len(self.rows) - 1, step, named)

    def _say(self, loop: TrainingLoop, row: dict[str, float]) -> None:
        self._loss, self._loss_read = row["total"], time.monotonic()
        logger.info(
            "step %d/%d: loss %.4g (%s), rate %.2g, %s",
            loop.step, loop.max_steps, row["total"],
            ", ".join(f"{name} {row[name]:.4g}" for name in ("mmd", "mse") if name in row),
            loop.optimizer.learning_rate(loop.step - 1), self.throughput.words(loop.step, loop.max_steps),
            extra={PROGRESS: True},
        )  # fmt: skip

    def table(self) -> pd.DataFrame:
        """Return the rows as a table of `COLUMNS`."""
        return pd.DataFrame(self.rows, columns=pd.Index(COLUMNS))

    def write(self, path: Path) -> None:
        """Write the table as CSV."""
        tabular.write_csv(self.table(), path, float_format="%.6g")
