"""Loggers beside training.csv."""

import importlib.util

import pytest

from perturbdiff.errors import UserError
from perturbdiff.training.loggers import make_loggers


def test_tensorboard_writes_below_the_folder(tmp_path):
    (logger,) = make_loggers(("tensorboard",), tmp_path, "run")
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.finalize("success")
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=rf"pip install 'perturbdiff\[{name}\]'"):
        make_loggers((name,), tmp_path, "run")


def test_none_is_none(tmp_path):
    assert make_loggers((), tmp_path, "run") == []
