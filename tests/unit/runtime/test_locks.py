"""Who may use a folder: on one machine, across nodes, after every kind of end."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from perturbdiff.runtime import files, locks
from perturbdiff.runtime.errors import StoppedEarly, UserError


@pytest.fixture(autouse=True)
def quick(monkeypatch, caplog):
    monkeypatch.setattr(locks, "BEAT", 0.05)
    monkeypatch.setattr(locks, "_POLL", 0.02)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PD_WAIT"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level("INFO", "perturbdiff")


def hold(folder, **options):
    return locks.locked(folder, "another run", **options)


def sign(folder, **changes):
    """Leave the note of a process on another node."""
    note = replace(locks.Note.own(flock=True), host="node9", kernel="another", **changes)
    folder.mkdir(exist_ok=True)
    (folder / locks.LOCK).write_bytes(note.to_bytes())
    return note


class Alive(threading.Thread):
    """A process on another node: its note's time stamp moves."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.path, self.ended = folder / locks.LOCK, threading.Event()

    def run(self):
        while not self.ended.wait(locks.BEAT):
            os.utime(self.path)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()


def test_one_process_at_a_time(tmp_path):
    with hold(tmp_path / "x") as lock:
        assert not lock.waited
        assert lock.taken_by() is None
        with pytest.raises(
            UserError, match=r"x: another run is using this folder \(host .*process \d+, since "
        ):
            with hold(tmp_path / "x"):
                pass
        assert lock.taken_by() is None
    assert not (tmp_path / "x" / ".lock").read_text().strip()
    with hold(tmp_path / "x") as lock:
        assert not lock.waited


def test_a_killed_process_on_this_machine_gives_its_folder_back_at_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 60.0)
    code = "import sys, time; from pathlib import Path; from perturbdiff.runtime import locks\n"
    code += "with locks.locked(Path(sys.argv[1]), 'x'): print('held', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {child.pid}"), hold(tmp_path):
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    began = time.monotonic()
    with hold(tmp_path):
        assert time.monotonic() - began < 5
    assert re.search(rf"taken over from host .*, process {child.pid}, .*its process is gone", caplog.text)


def test_a_dead_process_on_another_node_is_waited_out(tmp_path, caplog):
    sign(tmp_path, job="17")
    began = time.monotonic()
    with hold(tmp_path) as lock:  # without PD_WAIT: it must not fail for a note of the dead
        assert time.monotonic() - began >= locks.MISSED * locks.BEAT
        assert lock.taken_by() is None
    assert re.search(
        "waiting for another run in .* to end, if it still lives: host node9.*Slurm job 17", caplog.text
    )
    assert re.search("taken over from host node9.*: no sign of life for", caplog.text)


def test_clocks_of_other_nodes_do_not_matter(tmp_path):
    for ahead in (-7200, 7200):
        sign(tmp_path)
        os.utime(tmp_path / locks.LOCK, (time.time() + ahead,) * 2)
        began = time.monotonic()
        with hold(tmp_path):
            assert time.monotonic() - began >= locks.MISSED * locks.BEAT


def test_a_living_process_on_another_node_keeps_its_folder_though_the_kernel_grants_the_lock(tmp_path):
    note = sign(tmp_path)
    with Alive(tmp_path), pytest.raises(UserError, match="host node9"), hold(tmp_path):
        pass
    assert locks.Note.parse((tmp_path / locks.LOCK).read_bytes()) == note


def test_waiting_for_a_living_process(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PD_WAIT", "60")
    monkeypatch.setattr(locks, "_SPEAK", 0.1)
    sign(tmp_path)
    other = Alive(tmp_path)
    with other:
        threading.Timer(0.6, other.ended.set).start()  # it dies without a word
        began = time.monotonic()
        with hold(tmp_path) as lock:
            assert time.monotonic() - began >= 0.6 + (locks.MISSED - 1) * locks.BEAT
            assert lock.waited
    assert caplog.text.count("waiting for another run in") >= 3


def test_waiting_ends_as_soon_as_the_holder_does(tmp_path, monkeypatch):
    monkeypatch.setenv("PD_WAIT", "60")
    first = hold(tmp_path / "x")
    lock = first.__enter__()
    threading.Timer(0.3, lambda: (files.remove(tmp_path / "x"), first.__exit__(None, None, None))).start()
    with hold(tmp_path / "x") as second:  # the first one removed its folder
        assert second.waited
        assert second.taken_by() is None
    assert lock.taken_by()


def test_waiting_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setenv("PD_WAIT", "0.2")
    with (
        hold(tmp_path),
        pytest.raises(UserError, match="is using this folder after 0 s of waiting"),
        hold(tmp_path),
    ):
        pass


def test_the_end_of_the_allocation_counts_while_waiting(tmp_path, monkeypatch):
    monkeypatch.setenv("PD_WAIT", "60")
    asked = []

    def stop():
        asked.append(1)
        return "the allocation ends in 3 s" if len(asked) > 3 else None

    note = sign(tmp_path)
    with Alive(tmp_path), pytest.raises(StoppedEarly, match="ends in 3 s; .*node9.* touched nothing"):
        with hold(tmp_path, stop=stop):
            pass
    assert locks.Note.parse((tmp_path / locks.LOCK).read_bytes()) == note


def test_a_time_to_wait_that_is_none_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PD_WAIT", "long")
    with hold(tmp_path):
        assert "PD_WAIT is not a number of seconds: 'long'" in caplog.text


@pytest.mark.parametrize(("restarts", "at_once"), [("1", True), ("", False)])
def test_a_requeued_job_takes_its_own_folder_at_once(tmp_path, monkeypatch, caplog, restarts, at_once):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    sign(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    with hold(tmp_path):
        assert ("this job was requeued" in caplog.text) == at_once


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_storage_without_locks_goes_by_signs_of_life(tmp_path, monkeypatch, number):
    def none(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    with hold(tmp_path):
        time.sleep(locks.MISSED * locks.BEAT)
        with pytest.raises(UserError, match="another run is using this folder"), hold(tmp_path):
            pass
    with hold(tmp_path) as lock:  # it was given back: no waiting
        assert not lock.waited
    sign(tmp_path)
    with hold(tmp_path) as lock:
        assert lock.waited


def test_a_lock_that_the_kernel_never_gives_back_is_taken_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "REFUSED", 10)
    sign(tmp_path)
    with (tmp_path / locks.LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="node9"), hold(tmp_path):
            pass
        monkeypatch.setenv("PD_WAIT", "60")
        began = time.monotonic()
        with hold(tmp_path) as lock:
            assert time.monotonic() - began >= 10 * locks.BEAT
            assert lock.taken_by() is None


def test_who_stalled_learns_that_its_folder_is_anothers(tmp_path, caplog):
    with hold(tmp_path) as lock:
        note = sign(tmp_path)
        assert "host node9" in str(lock.taken_by())
        time.sleep(3 * locks.BEAT)
    assert "taken over by host node9" in caplog.text
    # neither its heart nor its end touch the other's note
    assert locks.Note.parse((tmp_path / locks.LOCK).read_bytes()) == note


def test_storage_that_does_not_answer_is_no_loss(tmp_path, monkeypatch):
    with hold(tmp_path) as lock:
        with monkeypatch.context() as patch:
            patch.setattr(
                "pathlib.Path.read_bytes", lambda _: (_ for _ in ()).throw(OSError(errno.ESTALE, "stale"))
            )
            assert lock.taken_by() is None
        (tmp_path / locks.LOCK).unlink()
        assert "removed its lock file" in str(lock.taken_by())


def test_a_note_that_is_no_note(tmp_path):
    (tmp_path / locks.LOCK).write_text("host a, process 3\n")
    with hold(tmp_path) as lock:
        assert not lock.waited
