"""TensorBoard, Weights & Biases and MLflow beside our own table. None of them needs a network."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

NOTES = _SENT, _MLFLOW_RUN = ("sent", "mlflow-run")
"""Files beside the loggers' own by which the next attempt goes on."""

_PROJECT = "perturbdiff"


class Backend(Protocol):
    """A logger."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of a step and write them to the disk."""

    def close(self, *, success: bool) -> None:
        """End the logger's files."""


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, success: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run kept in files, which ``wandb sync`` sends later."""

    def __init__(self, folder: Path, run: str, identity: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            name=run, dir=str(folder), project=_PROJECT, mode="offline", id=identity, resume="allow"
        )
        self._run.define_metric("trainer/global_step")
        self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "trainer/global_step": step})

    def close(self, *, success: bool) -> None:
        self._run.finish(exit_code=int(not success))


class _MLflow:
    """A run in local files. A later attempt adds to the same run, whose id a note keeps."""

    def __init__(self, folder: Path, run: str) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient(f"file:{folder.resolve() / 'mlflow'}")
        note = folder / _MLFLOW_RUN
        if note.is_file():
            self._run = note.read_text()
            return
        experiment = self._client.get_experiment_by_name(_PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(_PROJECT)
        self._run = self._client.create_run(number, run_name=run).info.run_id
        note.write_text(self._run)

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in values.items()])

    def close(self, *, success: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if success else "FAILED")


class Curves:
    """Sends rows of the training's table to loggers, none of which can end a training.

    A run that was interrupted passes rows that it has sent already. They are counted in a file beside the
    loggers' own and not sent again, so the curves have neither steps twice nor gaps.

    Parameters
    ----------
    names
        Of ``tensorboard``, ``wandb`` and ``mlflow``.
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
        self.backends: list[Backend] = []
        self._sent_note = folder / _SENT
        self._sent = 0
        makers: dict[str, Callable[[], Backend]] = {
            "tensorboard": lambda: _TensorBoard(folder),
            "wandb": lambda: _WeightsAndBiases(folder, run, identity),
            "mlflow": lambda: _MLflow(folder, run),
        }

        def start() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            self._sent = int(self._sent_note.read_text() or 0) if self._sent_note.is_file() else 0
            for name in names:
                try:
                    self.backends.append(makers[name]())
                except ModuleNotFoundError:
                    raise UserError(
                        f"train.loggers: {name} is not installed; pip install 'perturbdiff[{name}]'"
                    ) from None

        if names:
            self._guarded(start)

    def send(self, number: int, step: int, values: Mapping[str, float]) -> None:
        """Send a row of the table, the ``number``-th counted from 0, unless it was sent before."""
        if not self.backends or number < self._sent:
            return

        def send() -> None:
            for backend in self.backends:
                backend.log(values, step)
            self._sent_note.write_text(str(number + 1))

        self._guarded(send)

    def close(self, *, success: bool) -> None:
        """End the loggers' files."""

        def close() -> None:
            for backend in self.backends:
                backend.close(success=success)

        self._guarded(close)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - a full disk shows in each library's own words
            logger.warning("the loggers (train.loggers) stop here, training goes on: %s", error)
            self.backends = []
