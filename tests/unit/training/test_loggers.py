"""Loggers beside training.csv."""

import importlib.util
import os
import platform
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from perturbdiff.config import recipes
from perturbdiff.runtime.errors import StoppedEarly, UserError
from perturbdiff.training.callbacks.training_log import Curves
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.run_folder import CheckpointFolder
from perturbdiff.training.training_stages import train


def steps_of(folder, tag):
    found = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False)
    found.Reload()
    return [event.step for event in found.Scalars(tag)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=rf"pip install 'perturbdiff\[{name}\]'"):
        Curves((name,), tmp_path, "run", "id")


def test_none_writes_nothing(tmp_path):
    curves = Curves((), tmp_path / "logs", "run", "id")
    curves.send(0, 1, {"loss": 1.0})
    curves.close(success=True)
    assert not (tmp_path / "logs").exists()


def test_rows_that_were_sent_are_not_sent_again(tmp_path):
    for numbers in (range(3), range(1, 5)):  # the second attempt goes on before the end of the first
        curves = Curves(("tensorboard",), tmp_path, "run", "id")
        for number in numbers:
            curves.send(number, 10 * number, {"loss": float(number)})
        curves.close(success=True)
    assert sorted(steps_of(tmp_path, "loss")) == [0, 10, 20, 30, 40]


def test_a_logger_that_fails_ends_no_training(tmp_path, caplog, monkeypatch):
    caplog.set_level("WARNING", "perturbdiff")
    curves = Curves(("tensorboard",), tmp_path, "run", "id")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(curves.backends[0]), "log", full)
    for number in range(3):
        curves.send(number, number, {"loss": 1.0})
    curves.close(success=True)
    assert caplog.text.count("the loggers (train.loggers) stop here") == 1


def test_loggers_that_cannot_start_end_no_training(tmp_path, caplog):
    caplog.set_level("WARNING", "perturbdiff")
    (tmp_path / "logs").touch()  # a file where their folder belongs
    curves = Curves(("tensorboard",), tmp_path / "logs", "run", "id")
    curves.send(0, 1, {"loss": 1.0})
    curves.close(success=True)
    assert caplog.text.count("the loggers (train.loggers) stop here") == 1


def test_interrupted_curves_are_whole_and_end_in_the_bundle(trained, tmp_path, monkeypatch):
    recipe = recipes.load(
        "tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4", "train.log_every=1", "train.max_steps=8"]
    )
    step, save = TrainingLoop.advance, CheckpointFolder.save

    def interrupted(self, *sets):
        if self.step == 6:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *sets)

    def run():
        return train(trained / "store", trained / "split.parquet", tmp_path / "b", recipe, device="cpu")

    with monkeypatch.context() as patch, pytest.raises(StoppedEarly):
        patch.setattr(TrainingLoop, "advance", interrupted)
        # the checkpoint of the stop is lost: rows 6 and 7 come twice
        patch.setattr(CheckpointFolder, "save", lambda s, t: save(s, t) if t["global_step"] == 5 else None)
        run()
    out = run()
    assert steps_of(out / "logs", "train/total") == list(range(1, 9))
    assert steps_of(out / "logs", "valid/energy") == [8]
    assert len(list((out / "logs" / "tensorboard").iterdir())) > 1
    assert [p.name for p in (out / "logs").iterdir()] == ["tensorboard"]
    for path in (out / "logs" / "tensorboard").iterdir():
        assert platform.node() not in path.name
        assert str(os.getpid()) not in path.name.split(".")
    assert not (tmp_path / "b.checkpoints").exists()
