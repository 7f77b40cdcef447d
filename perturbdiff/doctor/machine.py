"""The machine: Python, CPUs, memory, GPUs, room for temporary files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from perturbdiff import __version__
from perturbdiff.doctor import job
from perturbdiff.doctor.checks import GIB, Check, ask
from perturbdiff.runtime.resources import cgroup_limit

_DEVICES = Path("/dev")
_PATIENCE = 60.0
# PyTorch is asked in a process of its own, because a driver that hangs inside a call would block this one.
_PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    able = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if able else []
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "names": [f"{p.name} ({p.total_memory / 2**30:.0f} GiB)" for p in gpus],
    "warnings": " ".join(str(w.message) for w in caught if "CUDA" in str(w.message)),
}))
"""


def python_and_cpus() -> list[Check]:
    """Versions of Python, the system and this package, and the cores that this process may use."""
    usable = len(os.sched_getaffinity(0))
    return [
        Check("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}"),
        Check("perturbdiff", "ok", __version__),
        Check("CPU", "ok", f"{usable} of {os.cpu_count()} cores usable by this process"),
    ]


def memory() -> Check:
    """Memory, and whether the job or container limits it."""
    machine = psutil.virtual_memory()
    limit = cgroup_limit()
    total = min(machine.total, limit or machine.total)
    found = f"{total / GIB:.1f} GiB, {min(machine.available, total) / GIB:.1f} GiB free"
    if total < machine.total:
        found += f" (limited by the job or container; the machine has {machine.total / GIB:.1f})"
    # The smallest tasks of the workflow need less, and a job has what was requested for it.
    if total < 4 * GIB and not job.in_job():
        remedy = "4 GiB are needed for the demo; ask for a larger machine or job"
        return Check("memory", "problem", found, remedy)
    return Check("memory", "ok", found)


def temporary_files() -> Check:
    """Where temporary files go: a folder that exists, is writable, and has more room than a container's default."""
    name = "temporary files"
    wanted = os.environ.get("TMPDIR")
    if wanted and not Path(wanted).is_dir():
        remedy = f"let the container see it: --bind {wanted}" if job.in_container() else "make it"
        return Check(name, "problem", f"TMPDIR={wanted} is not there", f"{remedy}, or unset TMPDIR")
    try:
        folder = tempfile.gettempdir()  # tries to write
    except FileNotFoundError:
        return Check(name, "problem", "no folder can be written", "set TMPDIR to one that can")
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    if wanted and folder != wanted:
        found += f", because TMPDIR={wanted} cannot be written"
        return Check(name, "note", found, "set another TMPDIR")
    if free < GIB // 4:
        remedy = "set TMPDIR to a larger folder (and --bind it into the container)"
        return Check(name, "problem", found, remedy)
    return Check(name, "ok", found)


def torch_version() -> Check:
    """Version of PyTorch, without loading it."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "problem", "missing", "install the package with its dependencies: make demo")
    return Check("torch", "ok", found)


def gpus() -> Check:
    """GPUs that PyTorch sees against those that the job was given."""
    start = time.monotonic()
    output = ask(sys.executable, "-c", _PROBE, timeout=_PATIENCE, alone=True)
    if output is None and time.monotonic() - start >= _PATIENCE:
        remedy = (
            "look again: where storage is slow the second start is quicker; if it is not, the driver hangs"
        )
        return Check("GPU", "note", f"PyTorch did not answer within {_PATIENCE:.0f} s", remedy)
    if output is None:
        return Check("GPU", "problem", "torch does not load", 'python -c "import torch" says why')
    torch: dict[str, Any] = json.loads(output.splitlines()[-1])
    names, of_job = torch["names"], job.gpus_given()
    if of_job is not None and of_job > len(names):
        found = f"{of_job} given by the job, {len(names)} seen by PyTorch {torch['version']}"
        return Check("GPU", "problem", found, _why_unseen(torch))
    if names:
        found = f"{', '.join(names)}, CUDA {torch['cuda']}"
        if of_job is not None and of_job < len(names):
            remedy = "the site does not confine jobs: CUDA_VISIBLE_DEVICES is not set; use only your own"
            return Check("GPU", "note", f"{found}; {of_job} given by the job", remedy)
        return Check("GPU", "ok", found)
    driver = _driver()
    if driver and of_job is None:
        found = f"{driver[0]}, not usable by PyTorch {torch['version']}"
        return Check("GPU", "problem", found, _why_unseen(torch))
    if of_job is not None:
        remedy = "a training on GPUs has to ask for them: docs/cluster.md"
        return Check("GPU", "absent", "none given by the job", remedy)
    remedy = "small models train on the CPU; for large ones use a machine or partition with GPUs"
    return Check("GPU", "absent", "none", remedy)


def _why_unseen(torch: dict[str, Any]) -> str:
    """Return the likeliest reason why PyTorch sees fewer GPUs than there are, with its remedy."""
    if torch["cuda"] is None:
        return f"PyTorch {torch['version']} is built without CUDA: install the locked one (requirements.lock)"
    driver = _driver()
    if not any(_DEVICES.glob("nvidia[0-9]*")):
        return (
            "this node shows no NVIDIA device (/dev/nvidia0): another partition or request, or tell the site"
        )
    if driver is None and job.in_container():
        return "the container was started without the driver: apptainer exec --nv (-profile slurm gives it)"
    if driver is None:
        return "the driver does not answer (nvidia-smi): tell the site which node this is"
    if driver[1] and _as_tuple(driver[1]) < _as_tuple(torch["cuda"])[:1]:
        return (
            f"the driver is for CUDA {driver[1]}, PyTorch {torch['version']} for CUDA {torch['cuda']}: nodes with a "
            "newer driver, or an image with an older PyTorch"
        )
    if torch["warnings"]:
        return f"PyTorch says: {torch['warnings'][:200]}"
    return "CUDA_VISIBLE_DEVICES may name devices that are not there: tell the site which node this is"


def _driver() -> tuple[str, str] | None:
    """Return what nvidia-smi says of driver and GPUs, and the newest CUDA that the driver runs."""
    gpus_and_driver = ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not gpus_and_driver:
        return None
    newest = re.search(r"CUDA Version:\s*([\d.]+)", ask("nvidia-smi") or "")
    return f"{gpus_and_driver.splitlines()[0]} (driver)", newest[1] if newest else ""


def _as_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
