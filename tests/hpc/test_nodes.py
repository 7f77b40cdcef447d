"""Training by several processes, on one node and on two: stopped, killed, and still what one process learns."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hpc.bed import Bed, Job, locked, wait_until
from hpc.faults import FIXED, PATIENCE, RECIPE, ROW, STEPS, Case, continued_at, processes, sheet
from safetensors.numpy import load_file

# what rounding makes of the order of summation grows with the rate; a margin that ends the first job at its start
SLOWLY = "train.learning_rate=2e-5;train.stop_margin=175"
TOLERANCE = 1e-5


@pytest.fixture
def case(workflow) -> Case:
    return Case.of(workflow)


def by_one_process(bed: Bed) -> Path:
    """Bundle of the same training by one process; the first test of a session that asks runs it."""
    with locked(bed.folder / "one_process.lock"):
        folder = bed.folder / "one_process"
        if not folder.exists():
            workflow = bed.workflow("training_by_one_process")
            try:
                ran = Case.of(workflow).start(recipe=SLOWLY).wait(PATIENCE)
            finally:
                workflow.close()
            assert ran.code == 0, ran.output
            folder.symlink_to(ran.outdir / "models" / "base")
        return folder


def rank_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
    return None


def kill_rank(job: Job, rank: int) -> None:
    (pid,) = [pid for pid in processes(job) if rank_of(pid) == rank]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "given", "killed"),
    [("slurm,site", ("--num_gpus", "2"), 0), ("slurm,multinode,site", ("--num_nodes", "2"), 1)],
    ids=["one node", "two nodes"],
)
def test_several_processes_learn_what_one_does(case, profile, given, killed):
    """Stopped by the end of its allocation, then robbed of a process, then left alone."""
    reference, workflow = by_one_process(case.workflow.bed), case.workflow
    case.attempts_get(first=1, time=("3.min", "20.min"))
    rows = sheet(workflow, ROW + f"{RECIPE};{SLOWLY}")
    head = workflow.start("--input", rows, *FIXED, *given, profile=profile)
    first = workflow.job("PRETRAIN")
    second = case.next_job(first.id, state="RUNNING")
    case.checkpoint(since=time.time_ns())
    kill_rank(second, killed)
    begin = time.monotonic()
    wait_until(lambda: (second.folder / ".exitcode").exists(), 90, "the others wait for the killed process")
    print(f"the job ended {time.monotonic() - begin:.0f} s after one of its processes")
    ran = head.wait(PATIENCE)
    assert ran.code == 0, ran.output
    attempts = case.attempts(ran)
    assert [task["exit"] for task in attempts] == ["75", "137", "0"]
    steps = [continued_at(ran, task) for task in attempts]
    assert 0 == steps[0] < steps[1] < steps[2] < STEPS
    told = ran.said(attempts[1])
    assert re.search(rf"error: process {killed} on .* was killed \(SIGKILL\)", told)
    assert "Traceback" not in told
    check_close(ran.outdir / "models" / "base", reference)
    logs = {path.name for path in (ran.outdir / "logs").iterdir()}
    assert {"PRETRAIN.base.log", "PRETRAIN.base.rank1.log"} <= logs


def check_close(ours: Path, theirs: Path) -> None:
    curves = [pd.read_csv(bundle / "training.csv") for bundle in (ours, theirs)]
    pd.testing.assert_frame_equal(*curves, rtol=TOLERANCE, atol=TOLERANCE)
    weights = [load_file(bundle / "model.safetensors") for bundle in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        np.testing.assert_allclose(weights[0][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
