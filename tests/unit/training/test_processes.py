"""Several processes: who they are, what they agree on, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from perturbdiff.runtime.errors import UserError
from perturbdiff.training.distributed import launcher as launch
from perturbdiff.training.distributed import processes
from perturbdiff.training.distributed.launcher import exit_code
from perturbdiff.training.distributed.nodes import Place
from perturbdiff.training.distributed.processes import Processes, lost

SHELL = ["bash", "-c"]


def test_nodes_that_share_a_kernel_have_names_of_their_own():
    env = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    names = {Processes.from_environment({**env, "GROUP_RANK": node}).run for node in "01"}
    srun = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "0",
        "SLURM_JOB_ID": "7",
    }
    names |= {Processes.from_environment({**srun, "SLURM_NODEID": node}).run for node in "01"}
    assert len(names) == 4


def test_threads_are_shared_out(monkeypatch):
    assert launch.threads({"OMP_NUM_THREADS": "8"}, 3) == 2
    assert launch.threads({"OMP_NUM_THREADS": "1"}, 4) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    assert launch.threads({}, 2) == 3
    given = launch.environment(
        Place(2, 2, 1, "host", 5), 1, "run", {"OMP_NUM_THREADS": "8", "NUMBA_NUM_THREADS": "8"}
    )
    assert {given[name] for name in launch.THREADS} == {"4"}
    assert Processes.from_environment(given) == Processes(3, 4, 2, "torchrun")
    assert "GLOO_SOCKET_IFNAME" not in given


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({0: 0, 1: 0}, (0, None)),
        ({0: 75, 1: 75}, (75, 0)),
        ({0: 1, 1: -9}, (137, 1)),  # that the first one lost it is why it failed
        ({0: 2, 1: -15}, (143, 1)),
        ({0: 1, 1: 2}, (2, 1)),
        ({0: 1, 1: 75}, (75, 1)),
        ({0: 1, 1: 3}, (3, 1)),
        ({0: 1, 1: 1}, (1, 0)),
    ],
)
def test_which_code_is_the_runs(codes, code):
    assert exit_code(codes) == code


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("exit 0", 0, ""),
        ("echo step; exit 75", 75, "step\n"),
        ("echo 'error: bad split' >&2; exit 2", 2, "error: bad split\n"),
        ("[ $RANK = 1 ] || sleep 99; echo noise; echo error: no gene; exit 2", 2, "error: no gene (process 1 on"),
        ("[ $RANK = 1 ] || sleep 99; kill -9 $$", 137, "process 1 on "),
        ("[ $RANK = 1 ] || exit 1; echo Traceback; exit 3", 3, "Traceback\n"),
    ],
)  # fmt: skip
def test_the_launcher_ends_as_its_processes(capfd, monkeypatch, tmp_path, script, code, said):
    monkeypatch.setenv("PD_LOG", str(tmp_path / "TRAIN.log"))
    begin = time.monotonic()
    assert launch.run(Place(2), [*SHELL, script]) == code
    assert time.monotonic() - begin < 10
    found = capfd.readouterr()
    text = found.out + found.err
    assert said in text
    assert "noise" not in text
    assert len(text.splitlines()) == len(said.splitlines()) + (code == 3)
    kept = (tmp_path / "TRAIN.rank1.log").read_text()  # quiet, but not lost
    assert ("step" in kept) == (code == 75)


def test_without_a_log_nothing_is_left_of_a_good_run(monkeypatch, tmp_path):
    monkeypatch.delenv("PD_LOG", raising=False)
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    assert launch.run(Place(2), [*SHELL, "echo fine"]) == 0
    assert not list(tmp_path.iterdir())
    assert launch.run(Place(2), [*SHELL, "exit 3"]) == 3
    assert [p.name for p in tmp_path.glob("*/*")] == ["rank1.log"]


def test_a_signal_reaches_all_and_leaves_them_time(tmp_path):
    script = f"cd {tmp_path}; trap 'sleep 1; touch $RANK; exit 75' TERM; touch up$RANK; while :; do sleep 0.1; done"

    def end():
        while len(list(tmp_path.glob("up*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=end).start()
    assert launch.run(Place(2), [*SHELL, script]) == 75
    assert {p.name for p in tmp_path.glob("?")} == {"0", "1"}
    assert signal.getsignal(signal.SIGTERM) is before


def test_processes_that_do_not_end_are_killed(monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.5)
    begin = time.monotonic()
    script = "trap '' TERM; [ $RANK = 0 ] || exit 3; while :; do sleep 0.1; done"
    assert launch.run(Place(2), [*SHELL, script]) == 3
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("sleep $RANK; exit 75", 75),
        ("[ $RANK = 1 ] || sleep 99; kill -9 $$", 137),
        ("[ $RANK = 0 ] || sleep 99; exit 2", 2),
    ],
)
def test_nodes_end_alike(script, code):
    """Two launchers, one process each; a port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "perturbdiff.training.distributed.launcher",
        "--processes",
        "1",
        "--nodes",
        "2",
    ]
    other = subprocess.Popen([*command, "--node", "1", "--first", first, *SHELL, script])
    port = int(first.rpartition(":")[2])
    begin = time.monotonic()
    assert launch.run(Place(1, 2, 0, "127.0.0.1", port), [*SHELL, script]) == code
    assert other.wait(60) == code
    assert time.monotonic() - begin < 60


AGREE = """
import sys
from perturbdiff.runtime.errors import StoppedEarly, UserError
from perturbdiff.training.distributed.processes import Processes
own = Processes.from_environment()
own.meet("cpu")
calls = []
def work():
    calls.append(1)
    return {"step": 7}
assert own.first("begin", work) == {"step": 7}
assert own.first("begin", lambda: None) is None
assert len(calls) == (own.rank == 0)
for kind in (UserError, StoppedEarly):
    def fails():
        raise kind("in use")
    try:
        own.first("begin", fails)
    except kind as error:
        assert str(error) == "in use"
    else:
        sys.exit(9)
def bug():
    raise KeyError("a bug")
try:
    own.first("begin", bug)
except KeyError:
    assert own.rank == 0
except SystemExit as end:
    assert end.code == 1 and own.rank == 1
else:
    sys.exit(9)
"""


def test_what_the_first_process_finds_all_are_told():
    """Both compute on a CPU, so they start."""
    assert launch.run(Place(2), [sys.executable, "-c", AGREE]) == 0


def test_processes_on_different_devices_do_not_start(capfd):
    script = """
import sys
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.distributed import processes
processes._check_gpus = lambda *_: None
try:
    processes.Processes.from_environment().meet(sys.argv[1] if processes.Processes.from_environment().rank else "cpu")
except UserError as error:
    print("error:", error)
    sys.exit(2)
"""
    assert launch.run(Place(2), [sys.executable, "-c", script, "cuda"]) == 2
    assert "computes on cpu, process 1 on" in capfd.readouterr().out


def test_too_few_gpus_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"2 processes on .* sees 1 GPU"):
        Processes(0, 2, 2, "torchrun").meet("cuda")


def test_processes_do_not_outlive_their_launcher(tmp_path):
    script = f"""
import os, time
from perturbdiff.training.distributed.processes import Processes
Processes.from_environment().meet("cpu")
open(r"{tmp_path}/" + str(os.getpid()), "w").close()
time.sleep(600)
"""
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "perturbdiff.training.distributed.launcher",
            "--processes",
            "2",
            sys.executable,
            "-c",
            script,
        ]
    )
    deadline = time.monotonic() + 120
    while len(pids := [int(p.name) for p in tmp_path.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == 2
    assert not left


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as handle:  # noqa: PTH123
            return handle.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_lost_peer_is_told_from_a_bug():
    assert lost(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"))
    assert lost(torch.distributed.DistBackendError("NCCL error: remote process exited"))
    assert not lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost(ValueError("Connection closed by peer"))


def test_one_process_needs_nobody(monkeypatch):
    monkeypatch.setattr(Processes, "_store", None)
    alone = Processes()
    alone.meet("cpu")
    assert alone.first("begin", lambda: 3) == 3
    assert processes.Processes.from_environment({}).node() is None
