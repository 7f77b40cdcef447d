"""The machine: Python, CPUs, memory, GPUs, room for temporary files, and the folders that a run will use."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
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


_MOUNTS = Path("/proc/self/mounts")
_SHARED = re.compile(
    r"nfs4?|lustre|gpfs|beegfs\w*|ceph|panfs|wekafs|afs|cifs|smb3|9p|orangefs|pvfs2|daos"
    r"|fuse\.(sshfs|glusterfs|ceph.*|daos)"
)
_MEMORY = ("tmpfs", "ramfs")
# Commands that show a quota, which most file systems do not count in the free space they report.
_QUOTA = {
    "lustre": "lfs quota -hu $USER",
    "gpfs": "mmlsquota",
    "beegfs": "beegfs-ctl --getquota",
    "nfs": "quota -s",
}
_NODE_ONLY = re.compile(r"\b(localflock|nolock|local_lock=(flock|all))\b")
# A second process tries the lock while this one holds it, because two handles of one process may share it on NFS.
_TRY = """
import fcntl, sys
with open(sys.argv[1], "a") as handle:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(0)
sys.exit(3)
"""


def look_at_folder(folder: Path, *, required: bool) -> list[Check]:
    """Look at one folder; if it does not exist yet, at the one in which it would be made.

    A folder that cannot be written is a problem if it is ``required``, else a note.
    """
    place = next(p for p in (folder, *folder.parents) if p.exists())
    if not place.is_dir():
        return [Check("folder", "problem", f"{folder}: {place} is a file", "name a folder")]
    kind, options = mount_of(place)
    room = _room(folder, place, kind)
    if os.access(place, os.W_OK | os.X_OK):
        return [room, _sharing(folder, kind), _locks(folder, place, kind, options)]
    found = f"{folder}: not allowed in {place}"
    if required:
        return [room, Check("writing", "problem", found, "a run cannot write there: choose another folder")]
    return [room, Check("writing", "note", found, "name the folders of your run: --folder")]


def mount_of(folder: Path) -> tuple[str, str]:
    """Return type and options of the file system that holds a folder."""
    deepest, mount = -1, ("unknown", "")
    target = folder.resolve()
    for line in _MOUNTS.read_text().splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[1]))
        # The last of several mounts on one folder hides the others.
        if target.is_relative_to(point) and len(point.parts) >= deepest:
            deepest, mount = len(point.parts), (fields[2], fields[3])
    return mount


def _room(folder: Path, place: Path, kind: str) -> Check:
    free, system = shutil.disk_usage(place).free, os.statvfs(place)
    found = f"{folder}: {free / GIB:.1f} GiB free, {kind}"
    found += "" if folder == place else f" (not there yet; {place})"
    if free < 2 * GIB:
        return Check("folder", "problem", found, "free some space or work in another folder")
    if system.f_files and system.f_favail < 10_000:
        found += f", room for {system.f_favail} more files"
        return Check("folder", "problem", found, "delete files or work in another folder")
    quota = next((command for start, command in _QUOTA.items() if kind.startswith(start)), None)
    return Check("folder", "ok", found + (f"; a quota may allow less: {quota}" if quota else ""))


def _sharing(folder: Path, kind: str) -> Check:
    """Say whether other nodes see the folder, which matters if jobs run on them."""
    if _SHARED.fullmatch(kind):
        return Check("sharing", "ok", f"{folder}: {kind}, a network file system")
    where = "memory of this node" if kind in _MEMORY else "looks like this node's own"
    found = f"{folder}: {kind}, {where}"
    if not (job.in_job() or job.in_container() or ask("sbatch", "--version")):
        return Check("sharing", "ok", f"{found}; no cluster here")
    remedy = "all nodes must see -work-dir, --outdir, --ckpt_dir, inputs and image"
    return Check("sharing", "note", found, remedy)


def _locks(folder: Path, place: Path, kind: str, options: str) -> Check:
    """Hold a lock, as a training does on its checkpoints, and let a second process try to take it."""
    # Without the kernel's lock, perturbdiff.runtime.locks sees from a file's time stamp that its holder still runs.
    remedy = "trainings on one checkpoint folder know each other by a sign of life every 15 s instead"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".perturbdiff-doctor-") as held:
            if not _renews(Path(held.name)):
                found = f"{folder}: neither time stamps nor locks can be relied on"
                return Check("locks", "problem", found, "keep --ckpt_dir on another file system")
            fault = _fault(held.fileno(), held.name)
    except OSError as error:
        found = f"{folder}: no file can be made ({error.strerror})"
        return Check("locks", "problem", found, "choose another folder")
    if fault is None and _NODE_ONLY.search(options):
        fault = f"works within one node only ({kind} mounted with {options})"
    if fault:
        return Check("locks", "note", f"{folder}: flock {fault}", remedy)
    return Check("locks", "ok", f"{folder}: work")


def _fault(handle: int, name: str) -> str | None:
    """Return what is wrong with the kernel's lock on a file, None if a second process respects it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tried = subprocess.run(
            [sys.executable, "-c", _TRY, name], timeout=20, check=False, capture_output=True
        )
    except OSError as error:
        return f"does not work ({error.strerror})"
    except subprocess.TimeoutExpired:
        return "makes a second process wait for ever"
    return "is given to a second process too" if tried.returncode else None


def _renews(path: Path) -> bool:
    """Whether a file's time stamp can be set, by which the holder of a lock shows that it still runs."""
    before = path.stat().st_mtime
    os.utime(path, (before + 100, before + 100))
    return path.stat().st_mtime != before
