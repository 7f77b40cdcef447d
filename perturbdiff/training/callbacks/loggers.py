"""Where the loss curves go beside ``training.csv``: TensorBoard files, and W&B or MLflow where they are installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)

NOTES = _SENT, _MLFLOW_RUN = ("sent", "mlflow-run")
"""Files beside the loggers' own by which the next attempt goes on."""


class Curves:
    """Sends rows of the journal to loggers, none of which needs a network, and none of which can end a training.

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
        """Send a row of the journal, the ``number``-th counted from 0, unless it was sent before."""
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
