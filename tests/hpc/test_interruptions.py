"""Trainings that are interrupted on the cluster: each ends with the bytes of one that nobody disturbed."""

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from hpc.bed import wait_until
from hpc.faults import PATIENCE, STEPS, Case, continued_at, cut_power, frozen


@pytest.fixture
def case(workflow) -> Case:
    return Case.of(workflow)


@pytest.mark.slow
def test_a_head_is_killed_and_resumed_while_its_job_still_trains(case):
    first = case.start()
    orphan = case.workflow.job("PRETRAIN")
    case.checkpoint()
    with frozen(orphan):
        first.kill()
        second = case.start()
        case.wait_for_waiting(orphan)
    ran = second.wait(PATIENCE)
    case.check_equal(ran)
    assert (orphan.folder / ".exitcode").read_text() == "0"
    assert continued_at(ran, case.attempts(ran)[0]) == STEPS, "the orphan's work is lost"


@pytest.mark.slow
def test_a_time_limit_is_hit_twice(case):
    # Slurm's own warning comes up to 90 s before the end. The third job gets longer, so that a slow machine ends too.
    case.attempts_get(first=2, time=("3.min", "20.min"))
    ran = case.start(recipe="train.stop_margin=175").wait(PATIENCE)
    case.check_equal(ran)
    attempts = case.attempts(ran)
    assert [task["exit"] for task in attempts] == ["75", "75", "0"]
    steps = [continued_at(ran, task) for task in attempts]
    assert 0 == steps[0] < steps[1] < steps[2] < STEPS
    assert "the allocation ends in" in ran.said(attempts[0])


@pytest.mark.slow
def test_a_training_that_does_not_stop_is_killed_at_the_limit(case):
    head = case.start()
    job = case.workflow.job("PRETRAIN")
    case.checkpoint()
    with frozen(job):
        case.user("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
        case.wait_for_end(job.id)
    ran = head.wait(PATIENCE)
    case.check_equal(ran)
    attempts = case.attempts(ran)
    assert [task["exit"] for task in attempts] in (["140", "0"], ["143", "0"])
    assert continued_at(ran, attempts[1]) >= 10


@pytest.mark.slow
def test_a_job_is_preempted(case):
    head = case.start("--gpu_queue", "preempt", "--gpu_options=--exclusive")
    job = case.workflow.job("PRETRAIN")
    case.checkpoint()
    where = ("--partition=urgent", f"--nodelist={job.node}", "--exclusive")
    with frozen(job):
        case.wait_for_end(case.workflow.bed.sbatch("true", case.workflow.folder, *where))
    ran = head.wait(PATIENCE)
    case.check_equal(ran)
    attempts = case.attempts(ran)
    assert [task["exit"] for task in attempts] == ["143", "0"]
    assert continued_at(ran, attempts[1]) >= 10


@pytest.mark.slow
def test_jobs_are_cancelled_waiting_and_running(case):
    head = case.start("--gpu_options=--hold")
    waiting = case.workflow.job("PRETRAIN", "PENDING")
    case.user("scancel", waiting.id)
    second = case.next_job(waiting.id)
    case.user("scontrol", "release", second.id)
    case.workflow.job("PRETRAIN")
    case.checkpoint()
    case.user("scancel", second.id)
    third = case.next_job(waiting.id, second.id)
    case.user("scontrol", "release", third.id)
    ran = head.wait(PATIENCE)
    case.check_equal(ran)
    attempts = case.attempts(ran)
    assert [task["exit"] for task in attempts] == ["-", "143", "0"]
    assert continued_at(ran, attempts[2]) >= 10


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take a node away")
def test_a_node_is_lost(case):
    case.attempts_get(queue=("'urgent'", "'cpu'"), clusterOptions=("'--exclusive'", "''"))
    head = case.start()
    job = case.workflow.job("PRETRAIN")
    case.checkpoint()

    def node(*states: str) -> None:
        for state in states:
            line = ("scontrol", "update", f"NodeName={job.node}", f"State={state}", "Reason=test")
            subprocess.run(line, check=True)

    cut_power(job)
    node("DOWN", "DRAIN")  # Slurm would take a node that is merely down back as soon as it says something
    try:
        other = case.next_job(job.id, state="RUNNING")
        assert other.node != job.node
    finally:
        node("RESUME")
    ran = head.wait(PATIENCE)
    case.check_equal(ran)
    attempts = case.attempts(ran)
    assert [task["exit"] for task in attempts] == ["-", "0"]
    assert continued_at(ran, attempts[1]) >= 10


@pytest.mark.slow
def test_two_heads_share_folders(case):
    head = case.start()
    job = case.workflow.job("PRETRAIN")
    case.checkpoint()
    with contextlib.closing(case.workflow.bed.workflow("second_head")) as elsewhere:
        with frozen(job):
            same_place = case.start(outdir="second").wait(PATIENCE)
            assert same_place.code != 0
            assert "Unable to acquire lock on session" in same_place.output
            shared = ("-work-dir", case.workflow.folder / "work", "--ckpt_dir", case.checkpoints)
            other = Case.of(elsewhere).start(*shared)
            case.wait_for_waiting(job)
        ran = head.wait(PATIENCE)
        case.check_equal(ran)
        case.check_equal(other.wait(PATIENCE))
    assert len(case.attempts(ran)) == 1, "the first never noticed"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_the_disk_of_the_checkpoints_is_full(case):
    disk = case.checkpoints
    disk.mkdir()
    owner = case.workflow.bed.account
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size=20m,uid={owner.uid},gid={owner.gid}", "tmpfs", disk], check=True
    )
    try:
        head = case.start()
        first = case.workflow.job("PRETRAIN")
        case.checkpoint()
        with frozen(first):
            filler = disk / "filler"
            fill(filler)
        log = first.folder / ".command.err"
        wait_until(lambda: "NO CHECKPOINT" in log.read_text(), PATIENCE, log.read_text)
        owner.run("scancel", first.id)
        wait_until(
            lambda: len(case.workflow.heads[0].output().split("Re-submitted")) > 1, PATIENCE, head.output
        )
        second = case.workflow.job("PRETRAIN")
        log = second.folder / ".command.err"
        wait_until(lambda: log.exists() and "NO CHECKPOINT" in log.read_text(), PATIENCE, head.output)
        with frozen(second):
            filler.unlink()
            before = time.time_ns()
        case.checkpoint(since=before)
        ran = head.wait(PATIENCE)
        case.check_equal(ran)
        attempts = case.attempts(ran)
        kept = re.search(r"would continue from step (\d+)", ran.said(attempts[0]))
        assert continued_at(ran, attempts[1]) == int(kept[1]) > 0
    finally:
        case.workflow.close()
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(path: Path) -> None:
    """Leave no room on the disk of a path."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as handle:
        while True:
            handle.write(bytes(4096))
