"""The Slurm job and the container that this process is in: what was requested against what is there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil

from perturbdiff.doctor.checks import GIB, Check, ask, in_words

_MARK = Path("/.singularity.d")
_CACHES = {"MPLCONFIGDIR": "Matplotlib", "NUMBA_CACHE_DIR": "Numba"}


def in_job() -> bool:
    """Whether this process belongs to a Slurm job."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def in_container() -> bool:
    """Whether this process runs in an Apptainer container."""
    return bool(os.environ.get("APPTAINER_CONTAINER")) or _MARK.is_dir()


def describe() -> Check:
    """Number, partition and node of the job."""
    # A container that the workflow started knows few of the job's variables.
    partition = os.environ.get("SLURM_JOB_PARTITION")
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    found = os.environ["SLURM_JOB_ID"] + (f" in partition {partition}" if partition else "") + f" on {node}"
    return Check("job", "ok", found + (f", one of {nodes} nodes" if nodes != "1" else ""))


def time_left() -> Check:
    """Time until the allocation ends, as the trainer will know it."""
    for name in ("PD_END_TIME", "SLURM_JOB_END_TIME"):
        if end := os.environ.get(name):
            if not end.isdigit():
                return Check("time left", "problem", f"{name}={end}", "it must be seconds since 1970")
            seconds = int(end) - time.time()
            found = f"{in_words(seconds)} ({name})"
            if seconds < 300:
                return Check("time left", "note", found, "too short to train: give more --time")
            return Check("time left", "ok", found)
    left = ask("squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%L", alone=True)
    found = f"{left.splitlines()[0]} (squeue)" if left else "unknown in here"
    remedy = (
        "a training started by hand would not stop in time: export PD_END_TIME=$(( $(date +%s) + SECONDS_LEFT )); "
        "the workflow sets it"
    )
    return Check("time left", "note", f"{found}; neither PD_END_TIME nor SLURM_JOB_END_TIME is set", remedy)


def resources() -> list[Check]:
    """CPUs and memory of the allocation against what this process can use and what the node has."""
    checks = []
    cores = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE") or ""
    if cores.isdigit():
        usable, in_node = len(os.sched_getaffinity(0)), os.cpu_count() or 1
        found = f"{cores} given by the job, {usable} usable by this process, {in_node} in the node"
        remedy = (
            "the job runs on fewer cores than it pays for: with srun give --cpus-per-task again"
            if usable < in_node
            else "the node has fewer cores than Slurm believes: tell the site"
        )
        too_few = int(cores) > usable
        checks.append(Check("job CPUs", "note" if too_few else "ok", found, remedy if too_few else ""))
    megabytes = os.environ.get("SLURM_MEM_PER_NODE", "")
    if not megabytes.isdigit():
        per_core = os.environ.get("SLURM_MEM_PER_CPU", "")
        on_node = os.environ.get("SLURM_CPUS_ON_NODE", "1")
        megabytes = str(int(per_core) * int(on_node)) if per_core.isdigit() and on_node.isdigit() else ""
    if megabytes:
        total = psutil.virtual_memory().total / GIB
        found = f"{int(megabytes) / 1024:.1f} GiB given by the job, {total:.1f} GiB in the node"
        checks.append(Check("job memory", "ok", found))
    return checks


def gpus_given() -> int | None:
    """Return the number of GPUs that the job has on this node; None outside a job."""
    if not in_job():
        return None
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        if devices := os.environ.get(name):
            return sum(part.strip() not in ("", "-1", "NoDevFiles") for part in devices.split(","))
    return 0


def image() -> Check:
    """File, version, commit and digest of the container's image."""
    try:
        labels = json.loads((_MARK / "labels.json").read_text())
    except (OSError, ValueError):
        labels = {}
    of_image = {name.rsplit(".", 1)[-1]: value for name, value in labels.items() if "opencontainers" in name}
    found = [os.environ.get("APPTAINER_CONTAINER") or "unknown file"]
    found += [f"{name} {of_image[name]}" for name in ("version", "revision") if of_image.get(name)]
    found += [os.environ["PD_IMAGE_ID"]] if os.environ.get("PD_IMAGE_ID") else []
    if of_image.get("title") == "perturbdiff":
        return Check("image", "ok", ", ".join(found))
    remedy = (
        "this is not an image of bin/build-image; the versions of requirements.lock are not certain in it"
    )
    return Check("image", "note", ", ".join(found), remedy)


def home() -> Check:
    """Whether caches are written outside the home folder, which the workflow does not mount."""
    folder = Path(os.environ.get("HOME", "/nonexistent"))
    visible = "visible" if folder.is_dir() else "not visible"
    inside = [
        name for name in _CACHES if not os.environ.get(name) or Path(os.environ[name]).is_relative_to(folder)
    ]
    if inside:
        libraries = " and ".join(_CACHES[name] for name in inside)
        remedy = f"set {', '.join(inside)} to a folder outside it"
        return Check("home", "note", f"{visible}; {libraries} would write caches there", remedy)
    caches = " and ".join(os.environ[name] for name in _CACHES)
    return Check("home", "ok", f"{visible}, not needed: caches go to {caches}")
