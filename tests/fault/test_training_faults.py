"""What clusters do to a training: it ends with the bytes of an undisturbed one, or says clearly what is the matter."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perturbdiff.config import recipes
from perturbdiff.runtime import locks
from perturbdiff.runtime.errors import StoppedEarly, UserError
from perturbdiff.training.loop import TrainingLoop
from perturbdiff.training.run_folder import FIRST_EPOCH, LOGS, CheckpointFolder
from perturbdiff.training.training_stages import train

CHANGES = ("split.held_out=[d2]", "split.valid_fraction=0.4", "train.loggers=[]")


def run(folder, out, *changes, **options):
    recipe = recipes.load("tiny", [*CHANGES, *changes])
    return train(folder / "store", folder / "split.parquet", out, recipe, device="cpu", **options)


def contents(bundle):
    """Every file of a bundle but those that hold times, and the manifest and config, which name the recipe."""
    other = ("run.json", "manifest.json", "config.json")
    found = {p.relative_to(bundle): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    return {n: data for n, data in found.items() if n.name not in other and n.parts[0] != "logs"}


def assert_same(bundle, undisturbed):
    assert contents(bundle) == contents(undisturbed)
    assert len(contents(bundle)) >= 6


def at_step(number, what):
    """Return a training step that does something before step ``number`` + 1, once."""
    step, done = TrainingLoop.advance, []

    def disturbed(self, *sets):
        if self.step == number and not done:
            done.append(1)
            what()
        return step(self, *sets)

    return disturbed


def test_a_reverse_process_that_cannot_be_is_refused_before_training(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "advance", None)
    few = ("schedule.num_steps=20", "model.gate=true")
    with pytest.raises(UserError, match=r"sample.num_steps=40 is more than the model's 20 levels"):
        run(trained, tmp_path / "bundle", *few, "sample.num_steps=40")
    with pytest.raises(UserError, match=r"sample.start_level=30 must lie between"):
        run(trained, tmp_path / "bundle", *few, "sample.num_steps=10", "sample.start_level=30")
    assert not list(tmp_path.iterdir())


def interrupt(monkeypatch, number, work):
    with monkeypatch.context() as patch, pytest.raises(StoppedEarly, match=f"step {number + 1} of"):
        patch.setattr(TrainingLoop, "advance", at_step(number, lambda: signal.raise_signal(signal.SIGTERM)))
        work()


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


# A damaged checkpoint -------------------------------------------------------------------------------------------


def cut(kept):
    last = kept / "last.ckpt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])


def flipped_bit(kept):
    flip(kept / "last.ckpt", (kept / "last.ckpt").stat().st_size // 2)


def emptied(kept):
    (kept / "last.ckpt").write_bytes(b"")


def killed_between_two_renames(kept):
    (kept / "last.ckpt").unlink()


def damaged_best(kept):
    """The weights that only the last checkpoint needs."""
    (best,) = kept.glob("best-000000010.*")
    flip(best, best.stat().st_size - 100)


@pytest.mark.parametrize("damage", [cut, flipped_bit, emptied, killed_between_two_renames, damaged_best])
def test_a_damaged_last_checkpoint(trained, tmp_path, monkeypatch, caplog, damage):
    out, kept = tmp_path / "b", tmp_path / "b.checkpoints"
    # checkpoints at steps 8 and 12, weights of step 10 the best so far
    interrupt(monkeypatch, 11, lambda: run(trained, out, "train.checkpoint_every=8"))
    assert sorted(p.name for p in kept.glob("*.ckpt")) == ["last.ckpt", "previous.ckpt"]
    damage(kept)
    caplog.set_level("INFO", "perturbdiff")
    run(trained, out, "train.checkpoint_every=8")
    assert "continuing at step 8 of 20" in caplog.text
    assert ("going on from the one before it, step 8" in caplog.text) == (
        damage != killed_between_two_renames
    )
    assert_same(out, trained / "bundle")


def test_the_good_checkpoint_outlives_the_damaged_one(trained, tmp_path, monkeypatch):
    out, kept = tmp_path / "b", tmp_path / "b.checkpoints"
    interrupt(monkeypatch, 7, lambda: run(trained, out))
    good = (kept / "previous.ckpt").read_bytes()
    flipped_bit(kept)
    interrupt(monkeypatch, 8, lambda: run(trained, out))
    assert (kept / "previous.ckpt").read_bytes() == good  # the damaged one has not taken its place
    folder = CheckpointFolder(kept, json.loads(torch.load(kept / "last.ckpt")["perturbdiff"]["fingerprint"]))
    assert folder.find("auto") == (kept / "last.ckpt", 9)
    for name in ("last.ckpt", "previous.ckpt"):
        flip(kept / name, (kept / name).stat().st_size // 3)
    with pytest.raises(UserError, match=r"last.ckpt: .* cannot be read .*previous.ckpt: .*--resume never"):
        run(trained, out)
    run(trained, out, resume="never")
    assert_same(out, trained / "bundle")


def test_the_weights_that_the_previous_checkpoint_needs_stay(tmp_path):
    folder, model = CheckpointFolder(tmp_path, {}), torch.nn.Identity()
    for step in (1, 2, 3, 4):
        former = folder.best(step - 1) if step > 1 else None
        folder.keep(folder.best(step), model, lambda _, path: path.write_bytes(b"weights"), instead_of=former)
        if step != 2:
            folder.save({"global_step": step})
    assert sorted(p.name for p in tmp_path.glob("best-*")) == [folder.best(3), folder.best(4)]
    cut(tmp_path)
    assert CheckpointFolder(tmp_path, {}).find("auto") == (folder.previous, 3)


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    folder = CheckpointFolder(tmp_path, {"a": 1})
    weights = {"w": torch.arange(3000.0), "b": torch.ones(7)}
    for step in (1, 2):
        folder.save({"global_step": step, "weights": weights})
    whole = folder.last.read_bytes()
    chance, harmless = random.Random(0), 0
    for _ in range(300):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        folder.last.write_bytes(data)
        path, step = CheckpointFolder(tmp_path, {"a": 1}).find("auto")
        if path == folder.previous:
            assert step == 1
            continue
        harmless += 1  # padding, time stamps
        kept = torch.load(folder.last, weights_only=True)
        assert kept["global_step"] == 2
        assert all(torch.equal(kept["weights"][name], weights[name]) for name in weights)
    assert harmless < 30


# A full disk ----------------------------------------------------------------------------------------------------


class Disk:
    """A small file system of its own, that can be filled up."""

    def __init__(self, path: Path, mib: int) -> None:
        self.path, self.filler = path, path / "filler"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")

    def fill(self) -> None:
        with self.filler.open("ab", buffering=0) as handle:
            for size in (1 << 16, 1 << 12):
                try:
                    while True:
                        handle.write(b"x" * size)
                except OSError:
                    continue

    def free(self) -> None:
        self.filler.unlink()


@pytest.fixture
def disk(tmp_path):
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    made = Disk(tmp_path / "disk", 16)
    yield made
    subprocess.run(["umount", "-l", str(made.path)], check=True)


def test_a_full_disk_in_the_middle(trained, tmp_path, monkeypatch, caplog, disk):
    step, kept = TrainingLoop.advance, disk.path / "kept"

    def disturbed(self, *sets):
        if self.step in (6, 13):
            disk.fill() if self.step == 6 else disk.free()
        if self.step == 12:  # the best weights of step 10 wait in memory
            assert sorted(p.name for p in kept.iterdir()) == [".lock", "last.ckpt"]
            assert CheckpointFolder(kept, {})._read(kept / "last.ckpt")["global_step"] == 5
        return step(self, *sets)

    monkeypatch.setattr(TrainingLoop, "advance", disturbed)
    out = run(trained, tmp_path / "b", checkpoints=kept)
    assert_same(out, trained / "bundle")
    for said in (
        r"step 10: NO CHECKPOINT, .*kept cannot be written \(no space left, 0 MiB free\): training goes on, "
        "but an interruption would continue from step 5; next try at step 15",
        r"best-000000010.safetensors cannot be written .*: kept in memory until there is room",
    ):
        assert len([m for m in caplog.messages if re.search(said, m)]) == 1, caplog.text
    assert (kept / "last.ckpt").exists()


@pytest.mark.parametrize("choose", ["validation", "first-epoch"])
def test_a_disk_that_stays_full_costs_no_result(trained, tmp_path, monkeypatch, caplog, disk, choose):
    changes = (f"train.choose={choose}", "train.keep_every=10", "train.ema_decay=0.5")
    expected = run(trained, tmp_path / "a", *changes)
    monkeypatch.setattr(TrainingLoop, "advance", at_step(2, disk.fill))
    out = run(trained, tmp_path / "b", *changes, checkpoints=disk.path / "kept")
    assert_same(out, expected)
    assert (out / "steps" / "0000010" / "model.safetensors").is_file()
    assert "the last checkpoint cannot be written" in caplog.text


def test_a_stop_on_a_full_disk_says_what_is_lost(trained, tmp_path, monkeypatch, disk):
    out, kept = tmp_path / "b", disk.path / "kept"

    def stop():
        disk.fill()
        signal.raise_signal(signal.SIGUSR2)

    monkeypatch.setattr(TrainingLoop, "advance", at_step(7, stop))
    with pytest.raises(
        StoppedEarly, match=r"step 8 of 20: signal SIGUSR2; .* since step 5 is NOT kept: .*no space left"
    ):
        run(trained, out, checkpoints=kept)
    # an attempt that keeps nothing is an error: a workflow must not submit it again and again
    monkeypatch.setattr(TrainingLoop, "advance", at_step(7, stop))
    with pytest.raises(UserError, match=r"nothing of this attempt, from step 5 on, is kept: .*no space left"):
        run(trained, out, checkpoints=kept)
    disk.free()
    run(trained, out, checkpoints=kept)
    assert_same(out, trained / "bundle")


def test_room_for_two_checkpoints_is_enough(trained, tmp_path, caplog, disk):
    caplog.set_level("INFO", "perturbdiff")
    run(trained, tmp_path / "a", checkpoints=tmp_path / "kept")
    size = (tmp_path / "kept" / "last.ckpt").stat().st_size
    disk.fill()
    with disk.filler.open("r+b") as handle:  # two and a half, and the weights
        handle.truncate(disk.filler.stat().st_size - int(2.5 * size) - (1 << 19))
    run(trained, tmp_path / "b", checkpoints=disk.path / "kept")
    assert "NO CHECKPOINT" not in caplog.text
    assert "no room for three checkpoints" in caplog.text
    assert_same(tmp_path / "b", trained / "bundle")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_logs_without_a_checkpoint_do_not_stay_when_a_training_fails(tmp_path, checkpoint):
    """A training that diverges before its first checkpoint left them behind."""
    folder = CheckpointFolder(tmp_path / "bundle.checkpoints", {})
    with folder.locked():
        (folder.path / LOGS).mkdir()
        (folder.path / FIRST_EPOCH).touch()
        if checkpoint:
            folder.save({"global_step": 5})
        folder.tidy()
        assert (folder.path / LOGS).exists() is checkpoint


def test_a_full_disk_at_the_start_is_one_line(trained, tmp_path, disk):
    disk.fill()
    with pytest.raises(UserError, match="disk full while writing"):
        run(trained, tmp_path / "b", checkpoints=disk.path / "kept")
    assert not (tmp_path / "b").exists()


def test_what_a_killed_trainer_left_half_written_makes_room_for_the_next(
    trained, tmp_path, monkeypatch, disk
):
    out, kept = tmp_path / "b", disk.path / "kept"
    interrupt(monkeypatch, 7, lambda: run(trained, out, checkpoints=kept))
    (kept / ".lock").write_bytes(b"")
    disk.filler = kept / ".last.ckpt.partial"
    disk.fill()
    run(trained, out, checkpoints=kept)
    assert_same(out, trained / "bundle")


# Two trainers ---------------------------------------------------------------------------------------------------


def child(folder, out, kept, pause):
    """Train in a process of its own, slowly."""
    step = TrainingLoop.advance

    def slow(self, *sets):
        time.sleep(pause)
        return step(self, *sets)

    TrainingLoop.advance = slow  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(1)
    run(folder, out, checkpoints=kept)


@pytest.fixture(scope="module")
def start():
    """Start `child`; the server has imported what takes long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["perturbdiff.training.training_stages"])
    begun = []

    def start(folder, out, kept, pause=0.0):
        begun.append(context.Process(target=child, args=(folder, out, kept, pause)))
        begun[-1].start()
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.join()


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def never(self, *sets):
    raise AssertionError("trained though another one had finished")


@pytest.mark.parametrize("same_output", [True, False])
def test_the_second_waits_and_takes_what_the_first_has_made(
    trained, tmp_path, monkeypatch, caplog, start, same_output
):
    caplog.set_level("INFO", "perturbdiff")
    kept, out = tmp_path / "kept", tmp_path / ("a" if same_output else "b")
    first = start(trained, tmp_path / "a", kept, 0.1)
    wait_for(kept / "last.ckpt", first)
    with pytest.raises(UserError, match="another training is using this folder"):
        run(trained, out, checkpoints=kept)
    monkeypatch.setenv("PD_WAIT", "300")
    monkeypatch.setattr(TrainingLoop, "advance", never)
    run(trained, out, checkpoints=kept)
    assert f"waiting for another training in {kept} to end: host " in caplog.text
    assert ("up to date" in caplog.text) == same_output
    assert ("continuing at step 20 of 20" in caplog.text) != same_output
    assert_same(out, trained / "bundle")
    first.join(60)
    assert first.exitcode == 0
    assert not list(tmp_path.glob(".*"))


def test_the_second_goes_on_when_the_first_is_killed(trained, tmp_path, monkeypatch, caplog, start):
    caplog.set_level("INFO", "perturbdiff")
    kept = tmp_path / "kept"
    first = start(trained, tmp_path / "a", kept, 0.3)
    wait_for(kept / "last.ckpt", first)
    monkeypatch.setenv("PD_WAIT", "300")
    threading.Timer(0.5, first.kill).start()
    run(trained, tmp_path / "b", checkpoints=kept)
    assert "its process is gone" in caplog.text
    assert "continuing at step 5 of 20" in caplog.text
    assert_same(tmp_path / "b", trained / "bundle")


def test_the_allocation_ends_while_waiting(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("PD_WAIT", "300")
    monkeypatch.setenv("PD_END_TIME", str(time.time() + 121))
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointFolder(tmp_path / "kept", {}).locked():
        with pytest.raises(StoppedEarly, match="the allocation ends in .*touched nothing"):
            run(trained, tmp_path / "b", checkpoints=tmp_path / "kept")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert [p.name for p in (tmp_path / "kept").iterdir()] == [".lock"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_was_taken_for_dead_does_not_write(trained, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    before = {}

    def taken_over():
        note = replace(locks.Note.own(flock=True), host="node9", kernel="another")
        (kept / locks.LOCK).write_bytes(note.to_bytes())
        before.update({p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in kept.iterdir()})

    with (
        monkeypatch.context() as patch,
        pytest.raises(StoppedEarly, match="step 10 .*taken over by host node9"),
    ):
        patch.setattr(TrainingLoop, "advance", at_step(7, taken_over))
        run(trained, tmp_path / "b", checkpoints=kept)
    assert before == {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in kept.iterdir()}
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(locks, "BEAT", 0.05)
    run(trained, tmp_path / "b", checkpoints=kept)
    assert_same(tmp_path / "b", trained / "bundle")


# Killed at any moment -------------------------------------------------------------------------------------------


def test_killed_again_and_again(trained, tmp_path, start):
    """SIGKILL at random moments, whatever the trainer is doing just then."""
    chance, kept, out, kills = random.Random(os.getpid()), tmp_path / "kept", tmp_path / "b", 0
    for _ in range(40):
        process = start(trained, out, kept, 0.2)  # 20 steps: the first kill comes before the last
        process.join(None if kills >= 8 else chance.uniform(0.5, 3.0))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
        assert process.exitcode == -signal.SIGKILL
        if out.exists():  # killed while it tidied up: the bundle is whole
            break
    assert kills
    assert_same(out, trained / "bundle")


def test_allocation_ends_twice_and_a_preemption(trained, tmp_path, monkeypatch):
    out = tmp_path / "b"
    for step in (1, 2):
        monkeypatch.setenv("PD_END_TIME", str(time.time() + 60))
        with pytest.raises(StoppedEarly, match=f"step {step} of 20 .*allocation ends"):
            run(trained, out)
    monkeypatch.delenv("PD_END_TIME")
    interrupt(monkeypatch, 12, lambda: run(trained, out))
    run(trained, out)
    assert_same(out, trained / "bundle")
    notes = json.loads((out / "run.json").read_text())
    assert notes["attempts"] == 4
    assert notes["first_step"] == 13
    assert notes["train_seconds_of_all_attempts"] > notes["train_seconds"] > 0
    assert notes["cells_per_second"] > 0
