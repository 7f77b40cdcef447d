"""An interrupted training ends with the same bytes as an undisturbed one."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from perturbdiff.config import recipes
from perturbdiff.runtime.errors import StoppedEarly, UserError
from perturbdiff.training.distributed.processes import TimeLimit
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.run_folder import CheckpointFolder
from perturbdiff.training.training_stages import train

SAME = ("model.safetensors", "training.csv", "vocabulary.json", "genes.json", "seen.parquet", "README.md")


def recipe(*changes):
    return recipes.load("tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4", *changes])


def run(trained, out, *changes, **options):
    return train(trained / "store", trained / "split.parquet", out, recipe(*changes), device="cpu", **options)


def assert_same(trained, bundle, names=SAME):
    for name in names:
        assert (bundle / name).read_bytes() == (trained / "bundle" / name).read_bytes(), name


def test_the_same_run_twice(trained, tmp_path):
    assert_same(trained, run(trained, tmp_path / "bundle"), (*SAME, "manifest.json"))
    assert not (tmp_path / "bundle.checkpoints").exists()


def test_crashes_at_many_steps(trained, tmp_path, monkeypatch):
    save, died = CheckpointFolder.save, set()

    def crash(self, state):
        save(self, state)
        if state["global_step"] not in died and state["global_step"] % 7 == 0:
            died.add(state["global_step"])
            raise RuntimeError("power cut")

    monkeypatch.setattr(CheckpointFolder, "save", crash)
    # where checkpoints fall does not change the result, nor whether they lie between log lines
    changes = "train.checkpoint_every=7"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="power cut"):
            run(trained, tmp_path / "bundle", changes)
        assert not (tmp_path / "bundle").exists()
    run(trained, tmp_path / "bundle", changes)
    assert died == {7, 14}
    assert_same(trained, tmp_path / "bundle")


CHILD = """
import sys, time
from pathlib import Path
from perturbdiff.config import recipes
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.training_stages import train
step = TrainingLoop.advance
def slow(self, *arguments):
    time.sleep(0.3)
    return step(self, *arguments)
TrainingLoop.advance = slow
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
recipe = recipes.load("tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4", "train.checkpoint_every=3"])
train(folder / "store", folder / "split.parquet", out, recipe, device="cpu")
"""


def test_a_killed_process_is_continued(trained, tmp_path):
    out = tmp_path / "bundle"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(trained), str(out)], stderr=subprocess.PIPE, text=True
    )
    last = tmp_path / "bundle.checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 240
    while not last.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.4)  # between two checkpoints
    child.kill()
    _, errors = child.communicate(timeout=60)
    assert last.exists(), errors
    assert not out.exists()
    assert child.returncode == -signal.SIGKILL
    run(trained, out, "train.checkpoint_every=3")
    assert_same(trained, out)


def test_stops_before_the_allocation_ends(trained, tmp_path, monkeypatch):
    out = tmp_path / "bundle"
    monkeypatch.setenv("PD_END_TIME", str(time.time() + 60))
    with pytest.raises(StoppedEarly, match=r"step 1 of 20 .*allocation ends"):
        run(trained, out)
    monkeypatch.setenv("PD_END_TIME", str(time.time() + 3600))
    run(trained, out)
    assert_same(trained, out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_stops_with_a_checkpoint(trained, tmp_path, monkeypatch, number):
    step = TrainingLoop.advance

    def interrupted(self, *sets):
        if self.step == 11:
            signal.raise_signal(number)
        return step(self, *sets)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(StoppedEarly, match=f"step 12 .*{number.name}"):
        patch.setattr(TrainingLoop, "advance", interrupted)
        run(trained, tmp_path / "bundle")
    assert signal.getsignal(number) is before
    run(trained, tmp_path / "bundle")
    assert_same(trained, tmp_path / "bundle")


def test_another_runs_checkpoint_is_refused(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time()))
    with pytest.raises(StoppedEarly):
        run(trained, tmp_path / "a", checkpoints=tmp_path / "kept")
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(
        UserError, match=r"another run; different: train.learning_rate \(0.002 then, 0.1 now\)"
    ):
        run(trained, tmp_path / "b", "train.learning_rate=0.1", checkpoints=tmp_path / "kept")
    assert not (tmp_path / "b").exists()
    run(trained, tmp_path / "b", checkpoints=tmp_path / "kept", resume="never")
    assert_same(trained, tmp_path / "b")
    assert (tmp_path / "kept" / "last.ckpt").exists()


def test_a_finished_run_is_only_exported_again(trained, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    run(trained, tmp_path / "a", checkpoints=kept)

    def never(self, *sets):
        raise AssertionError("a finished run trained on")

    monkeypatch.setattr(TrainingLoop, "advance", never)
    run(trained, tmp_path / "a", checkpoints=kept, force=True)
    assert_same(trained, tmp_path / "a")


def test_from_disk_in_windows(trained, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "perturbdiff")
    small = "train.memory_gib=0"
    run(trained, tmp_path / "a", small)
    assert "read from disk" in caplog.text
    with monkeypatch.context() as patch:
        patch.setenv("PD_END_TIME", str(time.time()))
        with pytest.raises(StoppedEarly):
            run(trained, tmp_path / "b", small)
    run(trained, tmp_path / "b", small)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_two_processes_of_torchrun_learn_what_one_does(trained, tmp_path):
    """Our own launcher's do, with and without passes: test_world_size.py."""
    changes = ', "train.accumulate=2", "train.keep_every=10"'
    script = tmp_path / "child.py"
    script.write_text(
        CHILD.replace("time.sleep(0.3)", "pass").replace(', "train.checkpoint_every=3"', changes)
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*launcher, str(script), str(trained), str(tmp_path / "bundle")], check=True)
    one, two = (load_file(folder / "bundle" / "model.safetensors") for folder in (trained, tmp_path))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-5)
    kept = [folder.name for folder in (tmp_path / "bundle").glob("steps/*")]
    assert sorted(kept) == ["0000010", "0000020"]


def test_a_damaged_checkpoint_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path, {})
    folder.last.write_bytes(b"half a checkpoi")
    with pytest.raises(UserError, match="cannot be read .* --resume never"):
        folder.find("auto")
    assert folder.find("never") == (None, 0)


def test_two_trainers_cannot_share_a_folder(tmp_path):
    with CheckpointFolder(tmp_path, {}).locked():
        with (tmp_path / ".lock").open("a+") as other, pytest.raises(OSError, match="unavailable"):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(UserError, match="another training is using .*process"):
            with CheckpointFolder(tmp_path, {}).locked():
                pass
    with CheckpointFolder(tmp_path, {}).locked():
        pass


def test_signals_are_put_back():
    before = signal.getsignal(signal.SIGUSR1)
    allocation = TimeLimit(margin=10)
    allocation.listen()
    assert allocation.reason() is None
    signal.raise_signal(signal.SIGUSR1)
    assert allocation.reason() == "signal SIGUSR1"
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    allocation.stop_listening()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_ctrl_c_that_is_ignored_stays_so():
    before = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # as what a script starts in the background inherits it
    allocation = TimeLimit(margin=10)
    try:
        with allocation.listening():
            signal.raise_signal(signal.SIGINT)
            assert allocation.reason() is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_checkpoint_of_an_earlier_version_is_refused_in_a_sentence(tmp_path):
    folder = CheckpointFolder(tmp_path / "kept", {})
    with folder.locked():
        folder.save({"global_step": 3, "pytorch-lightning_version": "2.6.6", "state_dict": {}})
    with pytest.raises(UserError, match=r"last.ckpt: an earlier version .* --resume never"):
        CheckpointFolder(tmp_path / "kept", {}).find("auto")


def test_checkpoints_that_a_run_killed_at_its_very_end_left_go_with_the_next(trained, tmp_path, monkeypatch):
    recipe = recipes.load("tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4", "train.max_steps=3"])

    def run():
        return train(trained / "store", trained / "split.parquet", tmp_path / "b", recipe, device="cpu")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "discard", lambda self: None)  # as a kill after the bundle's renaming
        bundle = run()
    written = (bundle / "model.safetensors").stat().st_mtime_ns
    assert (tmp_path / "b.checkpoints" / "last.ckpt").is_file()
    assert run() == bundle
    assert (bundle / "model.safetensors").stat().st_mtime_ns == written
    assert not (tmp_path / "b.checkpoints").exists()
