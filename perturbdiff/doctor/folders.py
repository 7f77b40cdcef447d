"""A folder that a run will use: file system, room, whether it is shared between nodes, whether locks work there."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from perturbdiff.doctor import job
from perturbdiff.doctor.checks import GIB, Check, ask

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


def look(folder: Path, *, required: bool) -> list[Check]:
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
