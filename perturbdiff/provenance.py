"""What made an output: ``manifest.json`` determines the result, ``run.json`` tells how the run went.

A folder carries both inside it; beside a file ``x.h5ad`` lie ``x.h5ad.manifest.json`` and ``x.h5ad.run.json``.
Two equal runs have byte-equal manifests: no times, no hosts, no paths. A stage whose manifest already lies
beside a finished output has nothing to do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbdiff import __version__, files, locks
from perturbdiff.errors import UserError

logger = logging.getLogger(__name__)

_PURPOSE = ".purpose.json"
"""What an unfinished output is to become."""

_BUILD = "_build.json"
"""Which code this is, written beside the package when an image is built."""

_LIBRARIES = ("anndata", "lightning", "numpy", "pandas", "scanpy", "scipy", "torch", "zarr")


def versions() -> dict[str, str]:
    """Return the versions that can change a result: ours, Python's and those of the numerical libraries."""
    found = {"perturbdiff": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def beside(out: Path, kind: str) -> Path:
    """Return where the ``kind`` (``manifest`` or ``run``) record of output ``out`` lies."""
    return out / f"{kind}.json" if out.is_dir() else out.with_name(f"{out.name}.{kind}.json")


def read_manifest(out: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished output, or None if it has none that can be read."""
    try:
        return json.loads(beside(out, "manifest").read_text())
    except (OSError, ValueError):
        return None


def as_json(record: Mapping[str, Any]) -> str:
    """Serialise a record with sorted keys, so that equal records have equal bytes."""
    return json.dumps(record, indent=2, sort_keys=True, default=str) + "\n"


@dataclass
class Stage:
    """One run of one stage, as the body of a `stage` block sees it.

    Attributes
    ----------
    out
        Final name of the output.
    path
        Where the body writes; becomes ``out`` when the block ends.
    skip
        True if an equal, finished output is there: the body must return at once.
    results
        Facts that the inputs determine (counts, thresholds); written to the manifest.
    notes
        Facts of this run (throughput, retries); written to ``run.json``.
    """

    out: Path
    path: Path
    skip: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def stage(
    name: str,
    out: Path,
    *,
    config: Mapping[str, Any],
    inputs: Mapping[str, Path],
    seed: int | None = None,
    folder: bool = False,
    force: bool = False,
    keep: bool = False,
    unfinished: Path | None = None,
    base: Mapping[str, Any] | None = None,
) -> Iterator[Stage]:
    """Run a stage file → file: hash the inputs, skip if done, write under a temporary name, record, rename.

    Parameters
    ----------
    name
        The command's name.
    out
        Final output, a file or (``folder``) a folder.
    config
        Everything beside the inputs that changes the result.
    inputs
        Input files and folders by role.
    seed
        The run's seed, if it draws random numbers.
    force
        Run even if an equal output is there.
    keep
        For a folder: keep what an interrupted run left, for a stage that goes on there. What a run with other
        settings, inputs or versions left is deleted.
    unfinished
        Folder in which to keep it, under a name of its own; by default it is kept beside ``out``.
    base
        What determines the result (stage, config, inputs, seed, versions) where it is known from the manifests of
        its parts; in place of ``config``, ``inputs`` and ``seed``.

    Raises
    ------
    UserError
        If an input is missing or the output cannot be written.
    """
    started, cpu = time.time(), _cpu_seconds()
    code()  # now: while a long run goes on, the checkout may move on
    if out.exists() and not (out.is_file() or out.is_dir()):
        # A rename would put the result in its place.
        raise UserError(f"{out}: a device or pipe, not a file; name a file to write")
    base = determinants(name, config, inputs, seed) if base is None else dict(base)
    if not force and up_to_date(out, base):
        yield Stage(out, out, skip=True)
        return
    purpose = as_json(base)
    keep_at = None
    if keep:
        unique = f"{out.name}-{hashlib.sha256(purpose.encode()).hexdigest()[:16]}"
        keep_at = files.temporary_name(out) if unfinished is None else unfinished / unique
    with contextlib.ExitStack() as stack:
        if keep_at is not None:
            lock = stack.enter_context(locks.locked(keep_at, "another run"))
            if lock.waited and not force and up_to_date(out, base):
                files.remove(keep_at)
                yield Stage(out, out, skip=True)
                return
        partial = stack.enter_context(files.writing(out, folder=folder, keep_at=keep_at))
        run = Stage(out, partial)
        if keep_at is not None:
            _continue_or_begin(partial, purpose)
        yield run
        if keep_at is not None:
            for note in (_PURPOSE, locks.LOCK):
                files.remove(partial / note)
        manifest = as_json({**base, "results": run.results})
        record = as_json({**run.notes, **_circumstances(name, started, cpu)})
        notes = {"manifest": manifest, "run": record}
        for kind, text in notes.items():
            if folder:
                (partial / f"{kind}.json").write_text(text)
            else:
                # A manifest never stands beside a file that it does not tell of: the former one goes before the
                # former file does, the new one comes after the new file.
                files.remove(beside(out, kind))
    if not folder:
        for kind, text in notes.items():
            files.write_text(beside(out, kind), text)


def _continue_or_begin(partial: Path, purpose: str) -> None:
    """Empty the folder of an interrupted run, unless that run was to make the very same."""
    note = partial / _PURPOSE
    if note.is_file() and note.read_text() == purpose:
        logger.info("going on with what an interrupted run left in %s", partial)
        return
    for path in list(partial.iterdir()):
        if path.name != locks.LOCK:
            files.remove(path)
    files.write_text(note, purpose)


def up_to_date(out: Path, base: Mapping[str, Any]) -> bool:
    """Return whether ``out`` is finished and was made of the very same `determinants`, and say so."""
    found = read_manifest(out) if out.exists() else None
    if found is None or {key: found.get(key) for key in base} != dict(base):
        return False
    logger.info("%s: %s is up to date, nothing to do (--force runs it again)", base["stage"], out)
    return True


def determinants(
    name: str, config: Mapping[str, Any], inputs: Mapping[str, Path], seed: int | None
) -> dict[str, Any]:
    """Return what determines a stage's result, as JSON would read it back.

    Raises
    ------
    UserError
        If an input is missing.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing releases the interpreter lock
        hashes = dict(zip(inputs, pool.map(_input, inputs, map(Path, inputs.values())), strict=True))
    base = {"stage": name, "config": config, "inputs": hashes, "seed": seed, "versions": versions()}
    return json.loads(as_json(base))


def _input(role: str, path: Path) -> dict[str, str]:
    return {"name": path.name, "sha256": files.sha256(files.existing(path, f"input '{role}'"))}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _circumstances(name: str, started: float, cpu: float) -> dict[str, Any]:
    return {
        "stage": name,
        "command": " ".join(sys.argv),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "wall_seconds": round(time.time() - started, 3),
        "cpu_seconds": round(_cpu_seconds() - cpu, 3),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "code": code(),
        "image": image(),
    }


@functools.cache
def code() -> dict[str, Any]:
    """Return which code runs: ``commit`` and whether it was changed since (``dirty``); None where unknown.

    An image holds the answer, with SHA-256 of the package's source and of the locked requirements. Elsewhere git
    tells, if the package is part of a checkout.
    """
    package = Path(__file__).parent
    with contextlib.suppress(OSError, ValueError):
        return json.loads((package / _BUILD).read_text())
    # an environment may lie in a checkout of something else: then git does not know the package
    known = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(package, "rev-parse", "HEAD") if known else None
    changed = _git(package, "status", "--porcelain", "--", ".") if commit else None
    return {"commit": commit, "dirty": None if changed is None else changed != ""}


def image() -> dict[str, str | None] | None:
    """Return the container image that this runs in: its file and, if the workflow told, its digest; else None."""
    path, digest = (os.environ.get(name) or None for name in ("APPTAINER_CONTAINER", "PD_IMAGE_ID"))
    return {"path": path, "id": digest} if path else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says about a folder, or None if it is missing or knows nothing of it."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
