"""Tasks in this process, in worker processes and on a given scheduler."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.task_runner import TaskRunner


def double(number: int) -> tuple[int, int]:
    if number < 0:
        raise UserError("a number below 0; give another")
    return 2 * number, os.getpid()


def die_once(path: Path) -> str:
    if not path.exists():
        path.write_text("was here")
        os.kill(os.getpid(), signal.SIGKILL)
    return path.read_text()


def test_one_job_is_done_here():
    with TaskRunner(1) as crew:
        assert crew.run(double, [3, 1, 2]) == [(6, os.getpid()), (2, os.getpid()), (4, os.getpid())]


def test_workers_give_results_in_order_errors_in_one_piece_and_repeat_what_a_dead_one_left(tmp_path):
    with TaskRunner(2) as crew:
        results = crew.run(double, range(8))
        assert [doubled for doubled, _ in results] == [0, 2, 4, 6, 8, 10, 12, 14]
        assert os.getpid() not in {process for _, process in results}
        with pytest.raises(UserError, match="below 0"):
            crew.run(double, [1, -1])
        assert crew.run(die_once, [tmp_path / "a", tmp_path / "b"]) == ["was here"] * 2


def test_a_given_scheduler_is_used():
    options: Any = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    cluster: Any = LocalCluster(**options)
    with cluster:
        with TaskRunner(scheduler=cluster.scheduler_address) as crew:
            assert [doubled for doubled, _ in crew.run(double, [1, 2])] == [2, 4]


def test_a_scheduler_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("perturbdiff.runtime.task_runner._SECONDS_TO_CONNECT", 1)
    with (
        TaskRunner(scheduler="tcp://127.0.0.1:9") as crew,
        pytest.raises(UserError, match="no scheduler answers"),
    ):
        crew.run(double, [1, 2])
