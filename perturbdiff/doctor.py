"""What this machine offers: Python, memory, GPU, Slurm, Apptainer, Nextflow; what to do if something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from perturbdiff import __version__

Status = Literal["ok", "absent", "problem"]

_MIN_NEXTFLOW = (24, 10)
_GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes
    ----------
    name
        What was looked at.
    status
        ``ok``; ``absent``: not there and not needed for everything; ``problem``: will not work.
    found
        What is there.
    remedy
        What to do, empty if nothing.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def diagnose(folder: Path | None = None) -> list[Check]:
    """Look at this machine; ``folder`` (default: the current one) is where disk space is asked for."""
    here = folder or Path.cwd()
    return [
        _python(),
        Check("perturbdiff", "ok", __version__),
        _cpus(),
        _memory(),
        _disk(here),
        _torch(),
        _gpu(),
        _java(),
        _nextflow(here),
        _slurm(),
        _apptainer(),
    ]


def render(checks: Sequence[Check]) -> str:
    """Return the findings as lines of text, remedies indented below."""
    sign = {"ok": "ok     ", "absent": "-      ", "problem": "PROBLEM"}
    width = max(len(c.name) for c in checks)
    lines = []
    for check in checks:
        lines.append(f"{sign[check.status]}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<{width + 11}}→ {check.remedy}")
    return "\n".join(lines)


def _python() -> Check:
    return Check("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _cpus() -> Check:
    usable = len(os.sched_getaffinity(0))
    return Check("CPU", "ok", f"{usable} of {os.cpu_count()} cores usable by this process")


def _memory() -> Check:
    memory = psutil.virtual_memory()
    limit = _cgroup_limit()
    total = min(memory.total, limit or memory.total)
    found = f"{total / _GIB:.1f} GiB, {min(memory.available, total) / _GIB:.1f} GiB free"
    found += " (limited by the job or container)" if total < memory.total else ""
    if total < 4 * _GIB:
        return Check(
            "memory", "problem", found, "4 GiB are needed for the demo; ask for a larger machine or job"
        )
    return Check("memory", "ok", found)


def _cgroup_limit() -> int | None:
    """Return the memory limit in bytes that the kernel sets for this process, if any."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < 2 * _GIB:
        return Check("disk", "problem", found, "free some space or work in another folder")
    return Check("disk", "ok", found)


def _torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "problem", "missing", "install the package with its dependencies: make demo")
    return Check("torch", "ok", version)


def _gpu() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("GPU", "problem", f"torch does not load: {error}", "reinstall torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found = ", ".join(f"{p.name} ({p.total_memory / _GIB:.0f} GiB)" for p in names)
        return Check("GPU", "ok", f"{found}, CUDA {torch.version.cuda}")
    driver = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if driver:
        remedy = f"torch {torch.__version__} cannot use it: the driver may be too old for CUDA {torch.version.cuda}"
        return Check("GPU", "problem", driver.splitlines()[0], remedy)
    return Check(
        "GPU",
        "absent",
        "none",
        "small models train on the CPU; for large ones use a machine or partition with GPUs",
    )


def _java() -> Check:
    home = os.environ.get("JAVA_HOME")
    text = _run(f"{home}/bin/java" if home else "java", "-version")
    match = re.search(r'version "(\d+)([^"]*)"', text or "")
    if not match:
        return Check(
            "Java", "absent", "none", "only the workflow needs it: install Java 17 (openjdk-17-jre-headless)"
        )
    if int(match[1]) < 17:
        return Check(
            "Java", "problem", match[1] + match[2], "Nextflow needs Java 17 or newer; set JAVA_HOME to one"
        )
    return Check("Java", "ok", match[1] + match[2])


def _nextflow(folder: Path) -> Check:
    own = sorted((folder / ".cache" / "nextflow").glob("*/nextflow"))
    for program in ["nextflow", *map(str, reversed(own))]:
        match = re.search(r"version (\d+)\.(\d+)\.(\d+)", _run(program, "-version", timeout=60) or "")
        if match and (int(match[1]), int(match[2])) >= _MIN_NEXTFLOW:
            return Check("Nextflow", "ok", f"{match[1]}.{match[2]}.{match[3]} ({shutil.which(program)})")
        if match:
            found = f"{match[1]}.{match[2]}.{match[3]} is too old"
            return Check("Nextflow", "problem", found, "bin/get-nextflow installs one under .cache/")
    return Check(
        "Nextflow", "absent", "none", "only the workflow needs it: bin/get-nextflow installs it under .cache/"
    )


def _slurm() -> Check:
    version = _run("sbatch", "--version")
    if not version:
        return Check(
            "Slurm", "absent", "none", "-profile slurm needs sbatch; without it tasks run on this machine"
        )
    partitions = _run("sinfo", "--noheader", "--format=%P %a %D nodes %G")
    if not partitions:
        return Check("Slurm", "problem", version, "sinfo does not answer: is the controller up?")
    return Check("Slurm", "ok", f"{version}: {'; '.join(partitions.splitlines()[:6])}")


def _apptainer() -> Check:
    for program in ("apptainer", "singularity"):
        version = _run(program, "--version")
        if version:
            return Check("Apptainer", "ok", version)
    return Check(
        "Apptainer", "absent", "none", "-profile apptainer needs it; without it tasks use this environment"
    )


def _run(program: str, *arguments: str, timeout: float = 20) -> str | None:
    """Return what a program prints, or None if it is not there, fails or does not answer in ``timeout`` seconds."""
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout + done.stderr).strip()
