"""The Slurm job that this process is in: what was asked for against what is there."""

from __future__ import annotations

import os
import re
import time

import psutil

from perturbdiff.doctor.findings import GIB, Check, ask, span


def is_inside() -> bool:
    """Whether this process belongs to a Slurm job."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def describe() -> Check:
    """Number, partition and node of the job."""
    job = os.environ["SLURM_JOB_ID"]
    # a container started by the workflow is told little of the job
    partition = os.environ.get("SLURM_JOB_PARTITION")
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    found = f"{job}" + (f" in partition {partition}" if partition else "") + f" on {node}"
    return Check("job", "ok", found + (f", one of {nodes} nodes" if nodes != "1" else ""))


def time_left() -> Check:
    """Time until the allocation ends, as the trainer will know it."""
    for name in ("PD_END_TIME", "SLURM_JOB_END_TIME"):
        if end := os.environ.get(name):
            if not end.isdigit():
                return Check("time left", "problem", f"{name}={end}", "it must be seconds since 1970")
            left = int(end) - time.time()
            if left < 300:
                return Check(
                    "time left", "note", f"{span(left)} ({name})", "too short to train: give more --time"
                )
            return Check("time left", "ok", f"{span(left)} ({name})")
    left = ask("squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%L", alone=True)
    remedy = (
        "a training started by hand would not stop in time: export PD_END_TIME=$(( $(date +%s) + SECONDS_LEFT )); "
        "the workflow sets it"
    )
    found = f"{left.splitlines()[0]} (squeue)" if left else "unknown in here"
    return Check("time left", "note", f"{found}; neither PD_END_TIME nor SLURM_JOB_END_TIME is set", remedy)


def resources() -> list[Check]:
    """CPUs and memory of the allocation against what this process can use and what the node has."""
    return [check for check in (_cpus(), _memory()) if check]


def gpus_given() -> int | None:
    """Return the number of GPUs that the job has on this node; None outside a job."""
    if not is_inside():
        return None
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        if devices := os.environ.get(name):
            return sum(part.strip() not in ("", "-1", "NoDevFiles") for part in devices.split(","))
    return 0


def _cpus() -> Check | None:
    given = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE") or ""
    if not given.isdigit():
        return None
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{given} given by the job, {usable} usable by this process, {there} in the node"
    if int(given) > usable:
        remedy = (
            "the job runs on fewer cores than it pays for: with srun give --cpus-per-task again"
            if usable < there
            else "the node has fewer cores than Slurm believes: tell the site"
        )
        return Check("job CPUs", "note", found, remedy)
    return Check("job CPUs", "ok", found)


def _memory() -> Check | None:
    node, each = (os.environ.get(name, "") for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"))
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "1")
    if match := re.fullmatch(r"(\d+)", node):
        given = int(match[1])
    elif re.fullmatch(r"\d+", each) and cores.isdigit():
        given = int(each) * int(cores)
    else:
        return None
    total = psutil.virtual_memory().total
    found = f"{given / 1024:.1f} GiB given by the job, {total / GIB:.1f} GiB in the node"
    return Check("job memory", "ok", found)
