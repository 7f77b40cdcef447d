"""Records of how an output was made: ``manifest.json`` determines the result, ``run.json`` describes the run.

A folder contains both files. A file ``x.h5ad`` has ``x.h5ad.manifest.json`` and ``x.h5ad.run.json`` next to it.
Equal runs have byte-equal manifests, because these contain no times, hosts or paths. If a finished output with the same
manifest is already there, a stage has nothing to do.
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
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbdiff import __version__
from perturbdiff.runtime import files, locks, outputs
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.outputs import beside, read_manifest, verify

__all__ = [
    "Stage",
    "as_json",
    "beside",
    "code",
    "determinants",
    "image",
    "read_manifest",
    "stage",
    "up_to_date",
    "verify",
    "versions",
]

logger = logging.getLogger(__name__)

_PURPOSE = ".purpose.json"
"""File that records what an unfinished output will become."""

_BUILD = "_build.json"
"""File that identifies the code; it is written into the package when an image is built."""

_LIBRARIES = ("anndata", "numpy", "pandas", "scipy", "torch", "zarr")


def versions() -> dict[str, str]:
    """Return the versions that can change a result: of this package, Python and the numerical libraries."""
    result = {"perturbdiff": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result


def as_json(record: Mapping[str, Any]) -> str:
    """Serialise a record with sorted keys, so that equal records have equal bytes."""
    return json.dumps(record, indent=2, sort_keys=True, default=str) + "\n"


def _sealed(record: Mapping[str, Any]) -> str:
    return as_json(outputs.sealed(json.loads(as_json(record))))


@dataclass
class Stage:
    """One run of a stage, for use in the body of a `stage` block.

    Attributes
    ----------
    out
        Final name of the output.
    path
        Path to which the body writes; it becomes ``out`` when the block ends.
    skip
        True if an equal, finished output exists. The body must then return at once.
    scratch
        Folder for temporary files; it is removed at the end.
    companions
        Paths to which the body writes the files and folders next to the output, by name.
    results
        Facts that the inputs determine (counts, thresholds). They are written to the manifest.
    notes
        Facts of this run (throughput, retries). They are written to ``run.json``.
    checksums
        SHA-256 of output files that need not be read again, by their path in the output.
    chance
        Files of the output, and folders with files, that may differ between runs (logs) or that people may change (a
        model card). ``run.json`` lists them.
    """

    out: Path
    path: Path
    skip: bool = False
    scratch: Path = field(default_factory=Path)
    companions: dict[str, Path] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    chance: tuple[str, ...] = ()

    def files(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return size and SHA-256 of the files that the inputs determine, and of those that vary between runs."""
        entries = outputs.entries(self.path, known=self.checksums)
        for name, path in self.companions.items():
            entries |= outputs.entries(path, name)
        shaped = {name: entry for name, entry in entries.items() if name.split("/")[0] in self.chance}
        return {name: entry for name, entry in entries.items() if name not in shaped}, shaped


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
    companions: Mapping[str, Path] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Iterator[Stage]:
    """Run a stage: hash the inputs, skip if done, write under a temporary name, record and rename.

    Only one process at a time makes an output. An existing output is replaced only if this stage made it.

    Parameters
    ----------
    name
        The command's name.
    out
        Final output, a file or (``folder``) a folder.
    config
        Everything except the inputs that changes the result.
    inputs
        Input files and folders by role.
    seed
        The run's seed, if it draws random numbers.
    force
        Run even if an equal output exists. An output that took long to make may be moved aside.
    keep
        For a folder: keep the unfinished output of an interrupted run, for stages that can continue it. Leftovers
        of a run with other settings, inputs or versions are deleted.
    unfinished
        Folder in which to keep it, under a unique name; by default it is kept next to ``out``.
    companions
        Files and folders next to the output that belong to it, by name.
    base
        What determines the result (stage, config, inputs, seed, versions), if it is already known. It replaces
        ``config``, ``seed`` and the contents of ``inputs``.

    Raises
    ------
    UserError
        If an input is missing, if something at the output's path is not ours, if another process makes the same
        output, or if it cannot be written.
    """
    started, cpu = time.time(), _cpu_seconds()
    code()  # read now, because the checkout may change during a long run
    out = Path(out)
    place = outputs.Output(name, out, folder, dict(companions or {}))
    place.check_place(inputs)
    base = determinants(name, config, inputs, seed) if base is None else dict(base)
    if not force and up_to_date(out, base, companions):
        yield Stage(out, out, skip=True)
        return
    place.check(base, force=force)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(_held(place))
        if lock.waited and not force and up_to_date(out, base, companions):
            files.discard(place.partial)
            yield Stage(out, out, skip=True)
            return
        made = place.partial / out.name
        if keep and unfinished is not None:
            unique = f"{out.name}-{hashlib.sha256(as_json(base).encode()).hexdigest()[:16]}"
            made = unfinished / unique / out.name
            stack.enter_context(locks.locked(made.parent, "another run"))
        stack.enter_context(_cleaned(place, made, keep=keep))
        _continue_or_begin(made.parent, as_json(base), keep=keep)
        if folder:
            made.mkdir(exist_ok=keep)
        run = Stage(out, made, scratch=made.parent)
        run.companions = {key: place.partial / f".beside-{key}" for key in place.companions}
        yield run
        fixed, shaped = run.files()
        record = {**run.notes, **_circumstances(name, started, cpu)} | ({"files": shaped} if shaped else {})
        records = {
            "manifest": _sealed({**base, "results": run.results, "files": fixed}),
            "run": _sealed(record),
        }
        if other := lock.taken_by():
            raise UserError(
                f"{out}: another run went on in place of this one, which had stood still ({other})"
            )
        place.put(made, run.companions, records)


@contextlib.contextmanager
def _held(place: outputs.Output) -> Iterator[locks.Lock]:
    """Lock an output's path for this process. Folders created for it are removed if they stay empty."""
    absent = [folder for folder in place.out.absolute().parents if not folder.exists()]
    try:
        with files.explain_os_errors(place.out):
            place.out.parent.mkdir(parents=True, exist_ok=True)
        if place.partial.is_symlink():
            raise UserError(f"{place.partial}: is a link, which nobody of ours made; remove it first")
        with locks.locked(place.partial, f"another run that writes {place.out.name}") as lock:
            yield lock
    finally:
        for folder in absent:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def _cleaned(place: outputs.Output, made: Path, *, keep: bool) -> Iterator[None]:
    """Explain system errors, and remove temporary files unless a later run can continue from them."""
    kept = False
    with files.explain_os_errors(place.out, kept_at=made.parent if keep else None):
        try:
            yield
        except BaseException as error:
            kept = keep and not isinstance(error, UserError)  # after a user error it is of no use
            raise
        finally:
            for folder in {place.partial, made.parent}:
                if folder.exists() and not (kept and folder == made.parent):
                    files.discard(folder)


def _continue_or_begin(partial: Path, purpose: str, *, keep: bool) -> None:
    """Empty the folder of an interrupted run, unless that run had the same purpose and can be continued."""
    note = partial / _PURPOSE
    if keep and note.is_file() and note.read_text() == purpose:
        logger.info("going on with what an interrupted run left in %s", partial)
        return
    for path in list(partial.iterdir()):
        if path.name != locks.LOCK:
            files.remove(path)
    if keep:
        files.write_text(note, purpose)


def up_to_date(out: Path, base: Mapping[str, Any], companions: Mapping[str, Path] | None = None) -> bool:
    """Return whether ``out`` is complete and has the same `determinants`, and log it."""
    manifest = read_manifest(out) if out.exists() else None
    if manifest is None or {key: manifest.get(key) for key in base} != dict(base):
        return False
    place = outputs.Output(str(base["stage"]), out, out.is_dir(), dict(companions or {}))
    if not place.is_whole():
        logger.warning(
            "%s: not whole (%s); it is made again", out, listing(place.missing()) or "no list of its files"
        )
        return False
    logger.info("%s: %s is up to date, nothing to do (--force runs it again)", base["stage"], out)
    return True


def determinants(
    name: str, config: Mapping[str, Any], inputs: Mapping[str, Path], seed: int | None
) -> dict[str, Any]:
    """Return what determines a stage's result, in the form that JSON reads back.

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
    return {"name": path.name, "sha256": files.sha256(files.existing(path, outputs.called(role)))}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished child processes."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _circumstances(name: str, started: float, cpu: float) -> dict[str, Any]:
    """Return the facts of this run. They name no host, job, user or folder, because outputs are shared."""
    return {
        "stage": name,
        "command": " ".join(map(_without_folders, sys.argv)),
        "cpus": len(os.sched_getaffinity(0)),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "wall_seconds": round(time.time() - started, 3),
        "cpu_seconds": round(_cpu_seconds() - cpu, 3),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "code": code(),
        "image": image(),
    }


def _without_folders(argument: str) -> str:
    """Return an argument in which paths are reduced to file names."""
    return re.sub(r"[^\s=,:'\"\[\]{}]*/(?=[^/\s])", "", argument).rstrip("/")


@functools.cache
def code() -> dict[str, Any]:
    """Return the code version: ``commit`` and whether it was changed since (``dirty``); None where unknown.

    An image contains this record, with the SHA-256 of the package's source and of the locked requirements. Otherwise
    git is asked, if the package is part of a checkout.
    """
    package = Path(__file__).parents[1]
    with contextlib.suppress(OSError, ValueError):
        return json.loads((package / _BUILD).read_text())
    # an environment may be inside another project's checkout, where git does not know the package
    known = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(package, "rev-parse", "HEAD") if known else None
    changed = _git(package, "status", "--porcelain", "--", ".") if commit else None
    return {"commit": commit, "dirty": None if changed is None else changed != ""}


def image() -> dict[str, str | None] | None:
    """Return the container image of this process: its name and, if the workflow set it, its digest; else None."""
    path, digest = (os.environ.get(name) or None for name in ("APPTAINER_CONTAINER", "PD_IMAGE_ID"))
    return {"name": Path(path).name, "id": digest} if path else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git for a folder, or None if git is missing or fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
