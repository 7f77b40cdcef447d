"""Where the loss curves go beside ``training.csv``: TensorBoard files, and W&B or MLflow where they are installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from perturbdiff.errors import UserError


def make_loggers(names: Sequence[str], folder: Path, run: str) -> list[Logger]:
    """Return Lightning's loggers for ``names``; none of them needs a network.

    Parameters
    ----------
    names
        Of ``tensorboard``, ``wandb`` (offline; ``wandb sync`` sends it later) and ``mlflow`` (local files).
    folder
        Where they write.
    run
        Name of the run.

    Raises
    ------
    UserError
        If a logger's package is not installed.
    """
    makers = {
        "tensorboard": lambda: TensorBoardLogger(folder, name="tensorboard", version=""),
        "wandb": lambda: WandbLogger(name=run, save_dir=folder, project="perturbdiff", offline=True),
        "mlflow": lambda: MLFlowLogger(
            "perturbdiff", run, tracking_uri=f"file:{folder.resolve() / 'mlflow'}"
        ),
    }
    made = []
    for name in names:
        try:
            made.append(makers[name]())
        except ModuleNotFoundError:
            raise UserError(
                f"train.loggers: {name} is not installed; pip install 'perturbdiff[{name}]'"
            ) from None
    return made
