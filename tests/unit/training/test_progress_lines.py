"""The lines by which one follows a training: early, often enough, and right about speed and time left."""

from __future__ import annotations

import json
import re
import signal

import pytest

from perturbdiff.config import recipes
from perturbdiff.runtime.errors import StoppedEarly
from perturbdiff.training.callbacks import training_log, validation
from perturbdiff.training.callbacks.training_log import Throughput, span
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.training_stages import train

LINE = re.compile(r"step (\d+)/20: loss \S+ \(.*\), rate \S+, (\d+) cells/s, (.*) left")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(training_log.time, "monotonic", lambda: Clock.now)
    return Clock


def test_speed_and_time_left(clock):
    one = Throughput()
    one.start(100)
    for _ in range(10):
        clock.now += 2
        one.step(64)
    assert one.words(110, 200) == "32 cells/s, 180 s left".replace("180 s", "3 min")
    clock.now += 30
    one.validated(30)  # no time of training, but the end is later for it
    clock.now += 2
    one.step(64)
    assert one.words(111, 200) == f"32 cells/s, {span(89 * 52 / 11)} left"
    assert one.facts() == {
        "attempts": 1, "first_step": 100, "train_seconds": 52, "validation_seconds": 30,
        "cells_per_second": 32, "train_seconds_of_all_attempts": 52,
    }  # fmt: skip
    other = Throughput(**one.state())
    other.start(111)
    clock.now += 4
    other.step(64)
    assert other.words(112, 200) == f"16 cells/s, {span(88 * 4)} left"  # this attempt's speed
    assert other.facts()["attempts"] == 2
    assert other.facts()["train_seconds_of_all_attempts"] == 56


def test_a_line_is_due_after_the_first_step_and_after_a_minute(clock):
    one = Throughput()
    one.start(0)
    one.step(1)
    assert one.line_is_due()
    one.words(1, 9)
    assert not one.line_is_due()
    clock.now += 59
    assert not one.line_is_due()
    clock.now += 2
    assert one.line_is_due()


def run(trained, out, *changes):
    recipe = recipes.load(
        "tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4", "train.loggers=[]", *changes]
    )
    return train(trained / "store", trained / "split.parquet", out, recipe, device="cpu")


def test_lines_of_a_training_and_its_continuation(trained, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "perturbdiff")
    step = TrainingLoop.advance

    def interrupted(self, *sets):
        if self.step == 6:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *sets)

    with monkeypatch.context() as patch, pytest.raises(StoppedEarly):
        patch.setattr(TrainingLoop, "advance", interrupted)
        run(trained, tmp_path / "b")
    steps = [int(found[1]) for m in caplog.messages if (found := LINE.fullmatch(m))]
    assert steps == [1, 5]
    assert re.search(r"attempt 1: steps 1 to 7 of 20 in .* s \(validation 0 s\), \d+ cells/s", caplog.text)
    caplog.clear()
    out = run(trained, tmp_path / "b")
    steps = [int(found[1]) for m in caplog.messages if (found := LINE.fullmatch(m))]
    assert steps == [8, 10, 15, 20]
    assert re.search("attempt 2: steps 8 to 20 of 20", caplog.text)
    assert re.search(r"validation at step 10: energy distance .* \(\d+ s\)", caplog.text)
    assert json.loads((out / "run.json").read_text())["first_step"] == 7
    assert (out / "training.csv").read_bytes() == (trained / "bundle" / "training.csv").read_bytes()


def test_lines_between_rows_and_in_validations_change_nothing(trained, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "perturbdiff")
    monkeypatch.setattr(training_log, "SPEAK_SECONDS", 0.0)
    monkeypatch.setattr(validation, "SPEAK_SECONDS", 0.0)
    out = run(trained, tmp_path / "b")
    steps = [int(found[1]) for m in caplog.messages if (found := LINE.fullmatch(m))]
    assert steps == list(range(1, 21))
    assert "validating: 0 of 2 sets done" in caplog.text
    for name in ("training.csv", "model.safetensors"):
        assert (out / name).read_bytes() == (trained / "bundle" / name).read_bytes()
