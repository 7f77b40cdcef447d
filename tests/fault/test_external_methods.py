"""External methods that fail: what is said, what is left, and that nothing goes on running."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_adapters import COPY, READ, WRITE, adapter
from refusals import refused
from small_store import small_store

OVERRIDES = ["split.valid_fraction=0", "split.train_fraction=0.34"]
HANG = (
    READ
    + """
away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
Path({pids!r}).write_text(f"{{os.getpid()}} {{away.pid}} end")
print("thinking", flush=True)
time.sleep(1000)
"""
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("faults"), OVERRIDES)


@pytest.fixture
def command(small, tmp_path):
    (tmp_path / "out").mkdir()

    def make(body, *options):
        script = adapter(tmp_path, body)
        return ["baseline", "script", str(small.store), "--split", str(small.split), "--out",
                str(tmp_path / "out" / "p.h5ad"), "--script", str(script), "--name", "mine", "--device", "cpu",
                *options]  # fmt: skip

    return make


def left(folder):
    return sorted(p.name for p in (folder / "out").iterdir())


FAILURES = {
    "crash": (
        READ + "print('working')\nraise ValueError('no good')",
        ["mine failed with exit code 1: ValueError: no good"],
    ),
    "refused": (
        READ + "print('refused: mine: needs doses', file=sys.stderr)\nprint('late', flush=True)\nsys.exit(3)",
        ["mine refused: needs doses;"],
    ),
    "crashed below": (READ + "os.kill(os.getpid(), 11)", ["mine was ended by SIGSEGV"]),
    "nothing written": (READ, ["mine ended well but wrote no predictions.h5ad"]),
    "NaN": (
        COPY + "values[3] = np.nan" + WRITE,
        ["mine: its predictions are not finite", "line 5 of queries.csv"],
    ),
    "diverged": (COPY + "values *= 1e6" + WRITE, ["mine has diverged: it predicts values up to"]),
    "wrong shape": (
        COPY + "values = values[1:]" + WRITE,
        ["mine: its predictions are", "a row for each line"],
    ),
    "contract": (
        READ + "sys.exit(f\"this adapter knows contract 0, the task is of {task['contract']}\")",
        ["knows contract 0, the task is of 1"],
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_one_line_and_the_log_stays(run_cli, command, tmp_path, case):
    body, words = FAILURES[case]
    done = run_cli(*command(body))
    assert "\nTraceback" not in done.err  # of ours; the method's own is shown with its name before it
    refused(replace(done, err=done.err.replace("mine | Traceback", "")), *words)
    assert done.err.splitlines()[-1].startswith("error: ")
    assert left(tmp_path) == ["p.h5ad.log"]
    if case in ("crash", "refused", "crashed below"):
        assert str(tmp_path / "out" / "p.h5ad.log") in done.err
    if case == "crash":
        assert "working" in (tmp_path / "out" / "p.h5ad.log").read_text()
        assert "raise ValueError('no good')" in (tmp_path / "out" / "p.h5ad.log").read_text()


def test_an_earlier_output_survives_a_failure(run_cli, command, tmp_path):
    assert run_cli(*command(COPY + WRITE)).code == 0
    before = (tmp_path / "out" / "p.h5ad").read_bytes()
    assert run_cli(*command(READ + "1 / 0")).code == 2
    assert (tmp_path / "out" / "p.h5ad").read_bytes() == before


def test_the_runs_log_has_what_the_method_said(run_cli, command, tmp_path, monkeypatch):
    monkeypatch.setenv("PD_LOG", str(tmp_path / "run.log"))
    assert run_cli(*command(READ + "print('working')\nraise ValueError('no good')")).code == 2
    text = (tmp_path / "run.log").read_text()
    assert "mine | working" in text
    assert "mine | ValueError: no good" in text
    assert "exit code 2 after" in text
    assert left(tmp_path) == []


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "sys.exit(137)", "raise MemoryError"])
def test_out_of_memory_is_exit_137(run_cli, command, tmp_path, how):
    done = run_cli(*command(READ + f"x = bytearray(50 << 20)\n{how}"))
    assert done.code == 137
    assert "error: mine was killed, probably out of memory (peak " in done.err.splitlines()[-1]
    assert left(tmp_path) == ["p.h5ad.log"]


def pids_of(tmp_path):
    path, end = tmp_path / "pids", time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("end")):
        assert time.monotonic() < end
        time.sleep(0.05)
    return list(map(int, path.read_text().split()[:2]))


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_time_out(run_cli, command, tmp_path):
    body = HANG.format(pids=str(tmp_path / "pids"))
    done = run_cli(*command(body, "--set", "baseline.timeout_hours=0.0005"))
    refused(done, "mine had not finished after", "baseline.timeout_hours", "p.h5ad.log")
    assert not any(map(running, pids_of(tmp_path)))
    assert left(tmp_path) == ["p.h5ad.log"]


def test_the_end_of_the_job_is_a_time_out_too(run_cli, command, tmp_path, monkeypatch):
    monkeypatch.setenv("PD_END_TIME", str(int(time.time()) + 121))
    done = run_cli(*command(HANG.format(pids=str(tmp_path / "pids"))))
    refused(done, "mine had not finished after", "the job's time limit: give the job more time")


@pytest.fixture
def ctrl_c():
    """Tests started in the background by a shell ignore Ctrl-C, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_runs_on_when_we_are_ended(command, tmp_path, number):
    words = command(HANG.format(pids=str(tmp_path / "pids")))
    ours = subprocess.Popen([sys.executable, "-m", "perturbdiff.cli.main", *words], start_new_session=True)
    try:
        pids = pids_of(tmp_path)
        assert all(map(running, pids))
        os.kill(ours.pid, number)
        code = ours.wait(30)
    finally:
        ours.kill()
    end = time.monotonic() + 20
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(running, pids))
    if number == signal.SIGTERM:
        assert code == 143
    if number != signal.SIGKILL:
        assert left(tmp_path) == ["p.h5ad.log"]
    else:
        assert "p.h5ad" not in left(tmp_path)


def test_what_a_killed_run_left_is_cleared_by_the_next(run_cli, command, tmp_path):
    leftover = tmp_path / "out" / ".p.h5ad.partial"
    (leftover / "task").mkdir(parents=True)
    (leftover / ".lock").touch()
    (leftover / "task" / "train.h5ad").write_text("half")
    assert run_cli(*command(COPY + WRITE)).code == 0
    assert not leftover.exists()
