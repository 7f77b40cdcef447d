"""Programs that the workflow needs beside Python: Java, Nextflow, Apptainer and Slurm."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from perturbdiff.doctor import job
from perturbdiff.doctor.checks import Check, ask, user_name

_MIN_NEXTFLOW = (24, 10)
_MIN_APPTAINER = (1, 2)
_ETC = Path("/etc")
_FUSE = Path("/dev/fuse")
_MANY = 25


def java() -> Check:
    """Version of Java that Nextflow would use."""
    home = os.environ.get("JAVA_HOME")
    text = ask(f"{home}/bin/java" if home else "java", "-version", timeout=30)
    match = re.search(r'version "(\d+)([^"]*)"', text or "")
    if not match:
        remedy = "only the workflow needs it: install Java 17 (openjdk-17-jre-headless)"
        return Check("Java", "absent", "none", remedy)
    if int(match[1]) < 17:
        remedy = "Nextflow needs Java 17 or newer; set JAVA_HOME to one"
        return Check("Java", "problem", match[1] + match[2], remedy)
    return Check("Java", "ok", match[1] + match[2])


def nextflow(folders: Sequence[Path]) -> Check:
    """Version of Nextflow on PATH, or of one that bin/get-nextflow installed in one of the folders."""
    installed = [
        str(path)
        for folder in folders
        for path in sorted((folder / ".cache" / "nextflow").glob("*/nextflow"), reverse=True)
    ]
    for program in ["nextflow", *installed]:
        match = re.search(r"version (\d+)\.(\d+)\.(\d+)", ask(program, "-version", timeout=60) or "")
        if match and (int(match[1]), int(match[2])) >= _MIN_NEXTFLOW:
            return Check("Nextflow", "ok", f"{match[1]}.{match[2]}.{match[3]} ({shutil.which(program)})")
        if match:
            found = f"{match[1]}.{match[2]}.{match[3]} is too old"
            return Check("Nextflow", "problem", found, "bin/get-nextflow installs one under .cache/")
    remedy = "only the workflow needs it: bin/get-nextflow installs it under .cache/"
    return Check("Nextflow", "absent", "none", remedy)


def apptainer() -> list[Check]:
    """Version of Apptainer, whether images run without being unpacked, whether they can be built."""
    version = ask("apptainer", "--version")
    if not version:
        other = ask("singularity", "--version")
        remedy = (
            "-profile apptainer and slurm with --container call it; without it tasks use this environment"
        )
        return [Check("Apptainer", "absent", f"none (but {other})" if other else "none", remedy)]
    match = re.search(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < _MIN_APPTAINER:
        remedy = "1.2 or newer is needed; ask the site, or module avail"
        return [Check("Apptainer", "problem", version, remedy)]
    return [Check("Apptainer", "ok", version), _mounting(), _building()]


def _mounting() -> Check:
    """Say how an image is opened: mounted by the kernel (setuid) or by squashfuse, or unpacked for each task."""
    name = "running images"
    configured = re.search(r"^LIBEXECDIR=(.*)$", ask("apptainer", "buildcfg") or "", re.MULTILINE)
    libexec = Path(configured[1] if configured else "/usr/libexec") / "apptainer" / "bin"
    starter = libexec / "starter-suid"
    if starter.exists() and starter.stat().st_mode & 0o4000:
        return Check(name, "ok", "mounted by the kernel (setuid installation)")
    path = f"{libexec}:{os.environ.get('PATH', '')}"
    fuse = next((p for p in ("squashfuse_ll", "squashfuse") if shutil.which(p, path=path)), None)
    missing = [] if fuse else ["squashfuse"]
    missing += [] if os.access(_FUSE, os.R_OK | os.W_OK) else [f"{_FUSE} for ordinary users"]
    missing += [] if _namespaces() else ["user namespaces"]
    if missing:
        remedy = "each task may unpack the image first (minutes, gigabytes), or not start: ask the site"
        return Check(name, "note", f"not seen: {', '.join(missing)}", remedy)
    return Check(name, "ok", f"mounted by {fuse}, in a user namespace: no unpacking")


def _namespaces() -> bool:
    return ask("unshare", "--user", "true") is not None


def _building() -> Check:
    """Say whether an image can be built here as this user."""
    name, user = "building images", user_name()
    if os.geteuid() == 0:
        return Check(name, "ok", "as root")
    starts = (f"{user}:", f"{os.getuid()}:")
    missing = [
        str(file)
        for file in (_ETC / "subuid", _ETC / "subgid")
        if not any(line.startswith(starts) for line in _lines(file))
    ]
    if not missing:
        return Check(name, "ok", f"--fakeroot: {user} has subordinate ids")
    if shutil.which("fakeroot") and _namespaces():
        found = f"--fakeroot by the fakeroot command (no entry in {' and '.join(missing)})"
        return Check(name, "note", found, "not tried: if the build fails, build elsewhere and copy the .sif")
    found = f"--fakeroot is not possible: {user} is not in {' and '.join(missing)}"
    remedy = "build the image on another machine and copy the .sif, or ask the site"
    return Check(name, "absent", found, remedy)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def slurm() -> list[Check]:
    """Version and, outside jobs, each partition with its time limit, nodes and GPUs."""
    version = ask("sbatch", "--version")
    if not version:
        remedy = "-profile slurm needs sbatch; without it tasks run on this machine"
        return [Check("Slurm", "absent", "none", remedy)]
    table = ask("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c|%m|%G")
    if table is None:
        return [Check("Slurm", "problem", version, "sinfo does not answer: is the controller up?")]
    if job.in_job():
        return [Check("Slurm", "ok", version)]
    kinds = list(dict.fromkeys(line.strip() for line in table.splitlines() if line.count("|") == 6))
    rows = [_partition(kind.split("|")) for kind in kinds]
    if len(rows) > _MANY:
        rows[_MANY:] = [Check("partition", "ok", f"and {len(rows) - _MANY} more kinds of nodes: sinfo")]
    return [Check("Slurm", "ok", version), *rows]


def _partition(fields: list[str]) -> Check:
    name, state, limit, nodes, cores, megabytes, gpus = (field.strip() for field in fields)
    time = "no time limit" if limit in ("infinite", "n/a") else f"jobs up to {limit}"
    memory = megabytes.rstrip("+")
    size = f"{int(memory) / 1024:.0f} GiB" if memory.isdigit() else "? GiB"
    gres = "no GPU" if gpus in ("(null)", "") else gpus
    found = f"{name}: {time}; {nodes} nodes with {cores} CPUs, {size}, {gres}"
    return (
        Check("partition", "ok", found) if state == "up" else Check("partition", "note", f"{found}; {state}")
    )


def accounts() -> Check:
    """Accounts that may be charged, where the site keeps accounts."""
    fields = "format=account%60,partition%60,qos%120"
    user = f"user={user_name()}"
    table = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", user, fields, alone=True)
    if table is None:
        found = "sacctmgr tells none; the site says whether --slurm_account is needed"
        return Check("accounts", "absent", found)
    rows = [line.split("|") for line in table.splitlines() if line.count("|") >= 2]
    if not rows:
        return Check("accounts", "note", "none in your name", "ask the site: jobs may need --slurm_account")
    names = [
        account + (f" (partition {partition})" if partition else "") + (f" (qos {qos})" if qos else "")
        for account, partition, qos, *_ in rows
    ]
    return Check("accounts", "ok", "; ".join(dict.fromkeys(names)))
