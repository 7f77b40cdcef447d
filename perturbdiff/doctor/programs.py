"""Programs that the workflow needs beside Python: Java, Nextflow, Apptainer and what it mounts images with."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from perturbdiff.doctor.findings import Check, ask, user_name

_MIN_NEXTFLOW = (24, 10)
_MIN_APPTAINER = (1, 2)
_ETC = Path("/etc")
_FUSE = Path("/dev/fuse")


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
    own = [
        str(path)
        for folder in folders
        for path in sorted((folder / ".cache" / "nextflow").glob("*/nextflow"), reverse=True)
    ]
    for program in ["nextflow", *own]:
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
        return [
            Check("Apptainer", "problem", version, "1.2 or newer is needed; ask the site, or module avail")
        ]
    return [Check("Apptainer", "ok", version), _mounting(), _building()]


def _settings() -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", ask("apptainer", "buildcfg") or "", re.MULTILINE))


def _mounting() -> Check:
    """Say how an image gets mounted: by the kernel (setuid), by squashfuse, or unpacked for each task."""
    name, settings = "running images", _settings()
    libexec = Path(settings.get("LIBEXECDIR", "/usr/libexec")) / "apptainer" / "bin"
    suid = libexec / "starter-suid"
    if suid.exists() and suid.stat().st_mode & 0o4000:
        return Check(name, "ok", "mounted by the kernel (setuid installation)")
    path = f"{libexec}:{os.environ.get('PATH', '')}"
    fuse = next((p for p in ("squashfuse_ll", "squashfuse") if shutil.which(p, path=path)), None)
    lacks = [] if fuse else ["squashfuse"]
    lacks += [] if os.access(_FUSE, os.R_OK | os.W_OK) else [f"{_FUSE} for ordinary users"]
    lacks += [] if _namespaces() else ["user namespaces"]
    if lacks:
        remedy = "each task may unpack the image first (minutes, gigabytes), or not start: ask the site"
        return Check(name, "note", f"not seen: {', '.join(lacks)}", remedy)
    return Check(name, "ok", f"mounted by {fuse}, in a user namespace: no unpacking")


def _namespaces() -> bool:
    return ask("unshare", "--user", "true") is not None


def _building() -> Check:
    """Say whether an image can be built here as this user."""
    name, user = "building images", user_name()
    if os.geteuid() == 0:
        return Check(name, "ok", "as root")
    marks = (f"{user}:", f"{os.getuid()}:")
    missing = [
        str(file)
        for file in (_ETC / "subuid", _ETC / "subgid")
        if not any(line.startswith(marks) for line in _lines(file))
    ]
    if not missing:
        return Check(name, "ok", f"--fakeroot: {user} has subordinate ids")
    if shutil.which("fakeroot") and _namespaces():
        found = f"--fakeroot by the fakeroot command (no entry in {' and '.join(missing)})"
        return Check(name, "note", found, "not tried: if the build fails, build elsewhere and copy the .sif")
    found = f"--fakeroot is not possible: {user} is not in {' and '.join(missing)}"
    return Check(
        name, "absent", found, "build the image on another machine and copy the .sif, or ask the site"
    )


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
