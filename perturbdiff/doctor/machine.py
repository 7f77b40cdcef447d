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
from perturbdiff.doctor import container, slurm_job
from perturbdiff.doctor.findings import GIB, Check, ask
from perturbdiff.runtime.resources import cgroup_limit

_DEVICES = Path("/dev")
_PATIENCE = 60.0
# in a process of its own: a driver that hangs inside a call would hold this one
_PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    able = torch.cuda.is_available()
    seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if able else []
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "names": [f"{p.name} ({p.total_memory / 2**30:.0f} GiB)" for p in seen],
    "said": " ".join(str(w.message) for w in said if "CUDA" in str(w.message)),
}))
"""


def python() -> Check:
    """Version of Python and the system."""
    return Check("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def version() -> Check:
    """Version of this package."""
    return Check("perturbdiff", "ok", __version__)


def cpus() -> Check:
    """Cores that this process may use."""
    usable = len(os.sched_getaffinity(0))
    return Check("CPU", "ok", f"{usable} of {os.cpu_count()} cores usable by this process")


def memory() -> Check:
    """Memory, and whether the job or container limits it."""
    machine = psutil.virtual_memory()
    limit = cgroup_limit()
    total = min(machine.total, limit or machine.total)
    found = f"{total / GIB:.1f} GiB, {min(machine.available, total) / GIB:.1f} GiB free"
    found += (
        f" (limited by the job or container; the machine has {machine.total / GIB:.1f})"
        if total < machine.total
        else ""
    )
    # the smallest tasks of the workflow run in less; inside a job its own request is judged by the site
    if total < 4 * GIB and not slurm_job.is_inside():
        return Check(
            "memory", "problem", found, "4 GiB are needed for the demo; ask for a larger machine or job"
        )
    return Check("memory", "ok", found)


def temporary_files() -> Check:
    """Where temporary files go: must be there, writable, and hold more than a container's default."""
    name = "temporary files"
    wanted = os.environ.get("TMPDIR")
    if wanted and not Path(wanted).is_dir():
        remedy = (
            f"let the container see it: --bind {wanted}, or unset TMPDIR"
            if container.is_inside()
            else "make it, or unset TMPDIR"
        )
        return Check(name, "problem", f"TMPDIR={wanted} is not there", remedy)
    try:
        folder = tempfile.gettempdir()  # tries to write
    except FileNotFoundError:
        return Check(name, "problem", "no folder can be written", "set TMPDIR to one that can")
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    if wanted and folder != wanted:
        return Check(
            name, "note", f"{found}, because TMPDIR={wanted} cannot be written", "set another TMPDIR"
        )
    if free < GIB // 4:
        return Check(
            name, "problem", found, "set TMPDIR to a larger folder (and --bind it into the container)"
        )
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
    said = ask(sys.executable, "-c", _PROBE, timeout=_PATIENCE, alone=True)
    if said is None and time.monotonic() - start >= _PATIENCE:
        remedy = (
            "look again: where storage is slow the second start is quicker; if it is not, the driver hangs"
        )
        return Check("GPU", "note", f"PyTorch did not answer within {_PATIENCE:.0f} s", remedy)
    if said is None:
        return Check("GPU", "problem", "torch does not load", 'python -c "import torch" says why')
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    given = slurm_job.gpus_given()
    if given is not None and given > len(seen["names"]):
        found = f"{given} given by the job, {len(seen['names'])} seen by PyTorch {seen['version']}"
        return Check("GPU", "problem", found, _why_unseen(seen))
    if seen["names"]:
        found = f"{', '.join(seen['names'])}, CUDA {seen['cuda']}"
        if given is not None and given < len(seen["names"]):
            remedy = "the site does not confine jobs: CUDA_VISIBLE_DEVICES is not set; use only your own"
            return Check("GPU", "note", f"{found}; {given} given by the job", remedy)
        return Check("GPU", "ok", found)
    driver = _driver()
    if driver and given is None:
        found = f"{driver[0]}, not usable by PyTorch {seen['version']}"
        return Check("GPU", "problem", found, _why_unseen(seen))
    if given is not None:
        remedy = "a training on GPUs has to ask for them: docs/cluster.md"
        return Check("GPU", "absent", "none given by the job", remedy)
    remedy = "small models train on the CPU; for large ones use a machine or partition with GPUs"
    return Check("GPU", "absent", "none", remedy)


def _why_unseen(seen: dict[str, Any]) -> str:
    """Return the likeliest reason why PyTorch sees fewer GPUs than there are, with its remedy."""
    if seen["cuda"] is None:
        return f"PyTorch {seen['version']} is built without CUDA: install the locked one (requirements.lock)"
    devices = sorted(p.name for p in _DEVICES.glob("nvidia[0-9]*"))
    driver = _driver()
    if not devices:
        return (
            "this node shows no NVIDIA device (/dev/nvidia0): another partition or request, or tell the site"
        )
    if driver is None and container.is_inside():
        return "the container was started without the driver: apptainer exec --nv (-profile slurm gives it)"
    if driver is None:
        return "the driver does not answer (nvidia-smi): tell the site which node this is"
    if driver[1] and _as_tuple(driver[1]) < _as_tuple(seen["cuda"])[:1]:
        return (
            f"the driver is for CUDA {driver[1]}, PyTorch {seen['version']} for CUDA {seen['cuda']}: nodes with a "
            "newer driver, or an image with an older PyTorch"
        )
    if seen["said"]:
        return f"PyTorch says: {seen['said'][:200]}"
    return "CUDA_VISIBLE_DEVICES may name devices that are not there: tell the site which node this is"


def _driver() -> tuple[str, str] | None:
    """Return what nvidia-smi says of driver and GPUs, and the newest CUDA that the driver runs."""
    found = ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not found:
        return None
    newest = re.search(r"CUDA Version:\s*([\d.]+)", ask("nvidia-smi") or "")
    return f"{found.splitlines()[0]} (driver)", newest[1] if newest else ""


def _as_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
