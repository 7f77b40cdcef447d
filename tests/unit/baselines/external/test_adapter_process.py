"""The sub-process: its variables, output, progress and end."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from perturbdiff.baselines.external import adapter_process
from perturbdiff.baselines.external.adapter_process import OutputLog
from perturbdiff.baselines.external.task_folder import ADAPTERS, environment

FORK_AND_SLEEP = """
import os, subprocess, sys, time
away = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # not of our process group
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
near = subprocess.Popen([sys.executable, "-S", "-c", deaf])
open("pids", "w").write(f"{os.getpid()} {away.pid} {near.pid}")
print("started")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "perturbdiff.baselines.external.guard.GRACE", 1.0
    )  # of this process; the guard has its own

    def go(code, seconds=60.0, **variables):
        log = OutputLog(tmp_path / "out.h5ad", "m")
        with log:
            ended = adapter_process.run([sys.executable, "-S", "-c", code], tmp_path, log, name="m",
                                environment={**os.environ, **variables}, seconds=seconds)  # fmt: skip
        return ended, log

    return go


def gone(pid, patience=10.0):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def started_pids(folder, patience=10.0):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if (folder / "pids").exists() and len((folder / "pids").read_text().split()) == 3:
            return list(map(int, (folder / "pids").read_text().split()))
        time.sleep(0.05)
    raise AssertionError("the adapter did not start")


def test_both_streams_go_to_the_log_line_by_line(run, tmp_path):
    code = "import sys; print('one'); print('a\\rb\\rc'); sys.stdout.flush(); sys.stderr.write('zwei ü\\nlast'); "
    ended, log = run(code)
    assert (ended.code, ended.timed_out) == (0, False)
    assert (tmp_path / "out.h5ad.log").read_text().splitlines() == ["one", "c", "zwei ü", "last"]
    assert log.last(2) == ["zwei ü", "last"]


def test_the_runs_log_is_appended_to_if_there_is_one(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PD_LOG", str(tmp_path / "run.log"))
    (tmp_path / "run.log").write_text("before\n")
    run("print('one')")
    assert (tmp_path / "run.log").read_text() == "before\nm | one\n"
    assert not (tmp_path / "out.h5ad.log").exists()


def test_time_and_memory_are_measured(run):
    ended, _ = run(
        "x = bytearray(80 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nsum(range(3_000_000))"
    )
    assert 80 <= ended.peak_memory_mib < 300
    assert 0.01 < ended.cpu_seconds < 30
    assert ended.seconds > 0.02


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.abort()", -6)]
)
def test_exit_codes_are_the_methods_own(run, code, expected):
    assert run(code)[0].code == expected


def test_the_line_that_tells_why_it_failed_is_found(run):
    assert run("1 / 0")[1].error() == "ZeroDivisionError: division by zero"
    caught = "import traceback\ntry: raise ValueError('no')\nexcept ValueError: traceback.print_exc()\nprint('bye')"
    assert run(caught)[1].error() == "ValueError: no"
    assert run("print('only this')")[1].error() == "only this"
    assert run("pass")[1].error() == "it said nothing"


def test_a_program_that_is_not_there(tmp_path):
    with OutputLog(tmp_path / "o.h5ad", "m") as log:
        ended = adapter_process.run(
            ["/no/such/python", "x"], tmp_path, log, name="m", environment={}, seconds=9
        )
    assert ended.code == 127
    assert log.last(1) == ["/no/such/python: No such file or directory"]


def test_progress_lines_become_lines_of_the_log_at_times(run, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "perturbdiff")
    monkeypatch.setattr(adapter_process, "LOG_EVERY_SECONDS", 0.0)
    run("import time\nfor i in range(3): print(f'progress {i}/4 training', flush=True); time.sleep(0.05)")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "m: training: 0/4"
    assert said[2].startswith("m: training: 2/4, ")
    assert said[2].endswith("s left")
    monkeypatch.setattr(adapter_process, "LOG_EVERY_SECONDS", 1000.0)
    run("print('progress 1/4')\nprint('progress is slow')")
    assert (tmp_path / "out.h5ad.log").read_text() == "progress is slow\n"


def test_what_it_leaves_running_ends_with_it(run, tmp_path):
    started = time.monotonic()
    ended, _ = run(FORK_AND_SLEEP)
    assert ended.code == 0
    assert all(gone(pid, 0.5) for pid in started_pids(tmp_path))
    assert time.monotonic() - started < 30


def test_time_out_ends_all_descendants(run, tmp_path):
    ended, log = run(FORK_AND_SLEEP + "sys.stdout.flush(); time.sleep(1000)", seconds=2.0)
    assert ended.timed_out
    assert ended.code == -signal.SIGTERM
    assert all(gone(pid, 0.5) for pid in started_pids(tmp_path))
    assert log.last(1) == ["started"]


def test_an_error_of_ours_ends_it(run, tmp_path, monkeypatch):
    def fail(self, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OutputLog, "write", fail)
    with pytest.raises(OSError, match="No space"):
        run(FORK_AND_SLEEP + "sys.stdout.flush(); time.sleep(1000)")
    assert all(gone(pid, 0.5) for pid in started_pids(tmp_path))


def test_a_killed_method_and_a_killed_guard(run):
    assert run("import os; os.kill(os.getpid(), 9)")[0].code == -signal.SIGKILL
    assert run("import os, time; os.kill(os.getppid(), 9); time.sleep(1000)")[0].code == -signal.SIGKILL


def test_variables_of_our_own_packages_and_of_the_job_stay_here(run, tmp_path):
    given = {
        "PATH": "/bin", "HOME": "/h", "VIRTUAL_ENV": "/v", "PYTHONHOME": "/p", "PYTHONPATH": "/q", "SLURM_NTASKS": "4",
        "WORLD_SIZE": "4", "OMP_NUM_THREADS": "64", "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONSTARTUP": "x",
    }  # fmt: skip
    found = environment(given, tmp_path, threads=3, device="cpu")
    assert not {"VIRTUAL_ENV", "PYTHONHOME", "SLURM_NTASKS", "WORLD_SIZE", "PYTHONSTARTUP"} & set(found)
    assert (found["PATH"], found["HOME"]) == ("/bin", "/h")
    assert found["PYTHONPATH"] == str(ADAPTERS)
    assert found["PYTHONNOUSERSITE"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert {found[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")} == {"3"}
    assert environment(given, tmp_path, threads=3, device="cuda")["CUDA_VISIBLE_DEVICES"] == "0,1"
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    with OutputLog(tmp_path / "o.h5ad", "m") as log:
        adapter_process.run(
            [sys.executable, "-S", "-c", code], tmp_path, log, name="m", environment=found, seconds=60
        )
    assert {k: v for k, v in json.loads(log.last(1)[0]).items() if k in found} == found
