"""Rules for writing outputs: an output replaces only what an earlier run of the same stage made.

A finished output is recognised by its manifest, which names the stage and lists every file. Anything else at an
output's path may belong to someone. It is named in an error, and nothing is touched.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.errors import NeedsForce, UserError, listing

logger = logging.getLogger(__name__)

RECORDS = ("manifest", "run")
"""Records of an output: what determines it (manifest), and how the run went (run)."""
UNFINISHED = "unfinished"
"""Key in the manifest of a file that is about to be replaced."""

_SEAL = "sha256"
_DEAR_STAGES = ("pretrain", "train", "finetune")
_DEAR_SECONDS = 60.0
_LONGEST_NAME = 200  # bytes; a file system allows 255, and records and companions add a suffix


def beside(out: Path, kind: str) -> Path:
    """Return the path of the ``kind`` (``manifest`` or ``run``) record of output ``out``."""
    return out / f"{kind}.json" if out.is_dir() else out.with_name(f"{out.name}.{kind}.json")


def read_record(out: Path, kind: str) -> dict[str, Any] | None:
    """Return a record of an output, or None if there is no readable one."""
    place = beside(out, kind)
    try:
        # what is no file, such as a pipe, would be waited for
        record = json.loads(place.read_text()) if place.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_manifest(out: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished output, or None if there is no readable one."""
    record = read_record(out, "manifest")
    return None if record is None or UNFINISHED in record else record


def entries(path: Path, name: str = "", known: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return size (bytes) and SHA-256 of a file, or of every file of a folder, by its path below ``path``.

    Parameters
    ----------
    path
        A file or a folder.
    name
        Name of ``path``, which becomes a prefix of the names of its files.
    known
        SHA-256 of files that need not be read again, by path below ``path``.
    """
    known = known or {}
    return {
        _joined(name, below): {"size": file.stat().st_size, "sha256": known.get(below) or files.sha256(file)}
        for below, file in _files(path)
    }


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield everything except folders at or below ``path``, with its relative path. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        if path.is_symlink() or path.exists():
            yield ".", path
        return
    for folder, _, names in os.walk(path):
        # os.walk lists links to folders as folders, but here they count as entries
        links = [n for n in os.listdir(folder) if n not in names and (Path(folder) / n).is_symlink()]  # noqa: PTH208
        for name in sorted([*names, *links]):
            file = Path(folder) / name
            yield file.relative_to(path).as_posix(), file


def _joined(name: str, below: str) -> str:
    if below == ".":
        return name or "."
    return f"{name}/{below}" if name else below


@dataclass
class Output:
    """The path of an output and of the files written next to it.

    Attributes
    ----------
    stage
        Name of the command.
    out
        The output, a file or (``folder``) a folder.
    companions
        Files and folders next to the output that belong to it, by their name in the manifest.
    """

    stage: str
    out: Path
    folder: bool
    companions: Mapping[str, Path] = field(default_factory=dict)

    @property
    def partial(self) -> Path:
        """The folder in which the output is made, locked by one process."""
        return files.temporary_name(self.out)

    @property
    def previous(self) -> Path:
        """The path to which an output that took long to make is moved when it is replaced."""
        return self.out.with_name(f"{self.out.name}.previous")

    def check_place(self, inputs: Mapping[str, Path]) -> None:
        """Raise an error if no output may be written to this path, whatever is there.

        Parameters
        ----------
        inputs
            Input files and folders, by role.

        Raises
        ------
        UserError
            If it is an input, contains one or lies in one, or is e.g. the home folder, a device or a link.
        """
        for path in (self.out, *self.companions.values()):
            check_place(path)
            for role, input_path in inputs.items():
                _check_apart(path, role, input_path)

    def check(self, base: Mapping[str, Any], *, force: bool) -> None:
        """Raise an error if this would replace something that is not ours or took long to make.

        Parameters
        ----------
        base
            What determines the new output.
        force
            Whether an output that took long to make may be moved aside.

        Raises
        ------
        UserError
            If an earlier run of this stage did not make what is there, or, without ``force``, if it took long to
            make with other settings.
        """
        if (foreign := self.foreign()) and (self.out.exists() or self._lies_beside()):
            raise UserError(
                f"{self.out}: {foreign}; nothing was touched: choose another output, or move that away first"
            )
        if self.out.exists() and self._is_dear():
            former = read_manifest(self.out) or {}
            different = differences({key: former.get(key) for key in base}, base)
            if different and not force:
                raise NeedsForce(
                    f"{self.out}: holds a finished result of {self.stage} with other settings, versions or inputs "
                    f"({listing(different)}); choose another output, or add --force, which keeps it as "
                    f"{self.previous.name}"
                )
            if problem := Output(self.stage, self.previous, self.folder).foreign():
                raise UserError(f"{self.previous}: {problem}; it would be replaced: move it away first")

    def _lies_beside(self) -> bool:
        return any(p.exists() or p.is_symlink() for p in self._own_places() if p != self.out)

    def _own_places(self) -> list[Path]:
        records = (
            [] if self.folder else [self.out.with_name(f"{self.out.name}.{kind}.json") for kind in RECORDS]
        )
        return [self.out, *records, *self.companions.values()]

    def foreign(self) -> str:
        """Describe what is at the output's paths but was not made by this stage; empty if there is nothing."""
        if not any(p.exists() or p.is_symlink() for p in self._own_places()):
            return ""
        if self.out.exists() and self.out.is_dir() != self.folder:
            return (
                "is a file, and a folder is to be written"
                if self.folder
                else "is a folder, and a file is to be written"
            )
        if self.folder and self.out.is_dir() and not any(self.out.iterdir()) and not self._lies_beside():
            return ""
        manifest = read_record(self.out, "manifest")
        if manifest is None or manifest.get("stage") != self.stage:
            made = "" if manifest is None else f"'{manifest.get('stage')}', not by "
            there = sorted(p.name for p in self._own_places() if p.exists() or p.is_symlink())
            return f"{listing(there)} is there and was not made by {made}'{self.stage}'"
        if UNFINISHED in manifest:
            return ""
        listed = self._listed(manifest)
        if not listed:
            return "was made by an earlier version, which did not list its files"
        extra = [name for name, _ in self._there() if name not in listed]
        return f"{listing(sorted(extra))} in it was not made by '{self.stage}'" if extra else ""

    def _listed(self, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the record of each file by name. Files that vary between runs are recorded in ``run.json``."""
        run = read_record(self.out, "run") or {}
        found: dict[str, dict[str, Any]] = {}
        for record in (manifest, run):
            part = record.get("files")
            if isinstance(part, dict):
                found |= {name: entry for name, entry in part.items() if isinstance(entry, dict)}
        return found

    def _there(self) -> Iterator[tuple[str, Path]]:
        for name, path in {"": self.out, **self.companions}.items():
            for below, file in _files(path):
                if not (self.folder and not name and below in {f"{kind}.json" for kind in RECORDS}):
                    yield _joined(name, below), file

    def missing(self) -> list[str]:
        """Return the names of files that are missing, or differ in size from the manifest."""
        manifest = read_manifest(self.out) or {}
        there = {name: file.stat().st_size for name, file in self._there() if file.is_file()}
        fixed = manifest.get("files", {})
        return sorted(
            name for name, entry in self._listed(manifest).items()
            if name not in there or (name in fixed and there[name] != entry.get("size"))
        )  # fmt: skip

    def is_whole(self) -> bool:
        """Return whether the manifest lists files, and all exist with the recorded sizes."""
        manifest = read_manifest(self.out)
        return manifest is not None and bool(self._listed(manifest)) and not self.missing()

    def _is_dear(self) -> bool:
        """Return whether the existing output took long to make."""
        seconds = (read_record(self.out, "run") or {}).get("wall_seconds")
        long = isinstance(seconds, int | float) and seconds > _DEAR_SECONDS
        return read_manifest(self.out) is not None and (self.stage in _DEAR_STAGES or long)

    def put(self, made: Path, made_beside: Mapping[str, Path], records: Mapping[str, str]) -> None:
        """Move a finished output and its records to their final paths.

        Parameters
        ----------
        made
            The finished file or folder, on the same file system or another.
        made_beside
            The finished companions.
        records
            Text of each record.
        """
        made = self._brought_near(made)
        if self.folder:
            for kind, text in records.items():
                (made / f"{kind}.json").write_text(text)
        self._move_aside()
        if not self.folder:
            # From here to the end, the path is marked as ours and unfinished.
            mark = json.dumps({"stage": self.stage, UNFINISHED: True}) + "\n"
            files.write_text(beside(self.out, "manifest"), mark)
        for name, path in made_beside.items():
            _swap(path, self.companions[name], self.partial)
        _swap(made, self.out, self.partial)
        if not self.folder:
            for kind in reversed(RECORDS):
                files.write_text(self.out.with_name(f"{self.out.name}.{kind}.json"), records[kind])

    def _brought_near(self, made: Path) -> Path:
        """Return ``made``, or a copy of it in the partial folder if it is on another file system."""
        if made.stat().st_dev == self.partial.stat().st_dev:
            return made
        copy = self.partial / self.out.name
        files.remove(copy)
        shutil.copytree(made, copy) if made.is_dir() else shutil.copy2(made, copy)
        return copy

    def _move_aside(self) -> None:
        """Keep the existing output if it took long to make, or if someone added files to it while we worked."""
        if not self.out.exists():
            return
        foreign = self.foreign()
        if not foreign and not self._is_dear():
            return
        target, number = self.previous, 1
        while Output(self.stage, target, self.folder).foreign() or (foreign and target.exists()):
            number += 1
            target = self.out.with_name(f"{self.out.name}.previous-{number}")
        logger.warning("%s: kept as %s%s", self.out, target.name, f" ({foreign})" if foreign else "")
        records = [] if self.folder else [(beside(self.out, k), f"{target.name}.{k}.json") for k in RECORDS]
        _swap(self.out, target, self.partial)
        for record, name in records:
            if record.exists():
                record.replace(target.with_name(name))


def check_place(out: Path) -> None:
    """Raise an error for paths that cannot be an output.

    Raises
    ------
    UserError
        If it is the home or working folder, contains one of these, or is a link or a device.
    """
    if not out.name or out.name == "..":
        raise UserError(f"{out}: is a folder that is there already; name a new place in it")
    if len(os.fsencode(out.name)) > _LONGEST_NAME:
        raise UserError(f"{out}: its name is longer than {_LONGEST_NAME} bytes; choose a shorter one")
    if out.is_symlink():
        raise UserError(f"{out}: is a link to {out.readlink()}; name the place itself")
    if out.exists() and not (out.is_file() or out.is_dir()):
        # A rename would replace it by the result.
        raise UserError(f"{out}: a device or pipe, not a file; name a file to write")
    place = _real(out)
    for protected, what in ((Path.cwd(), "the working folder"), (_home(), "your home folder")):
        if protected is not None and (place == protected or place in protected.parents):
            raise UserError(
                f"{out}: {'is' if place == protected else 'holds'} {what}; name a new place in it"
            )


def called(role: str) -> str:
    """Return what a message calls an input; one of several of a kind has a number as its role."""
    return "input" if re.fullmatch(r"input \d+", role) else f"input '{role}'"


def _check_apart(out: Path, role: str, given: Path) -> None:
    place = _real(out)
    # both the given link and its target count
    for source in (_real(given.parent) / given.name, _real(given)):
        if source == place or place in source.parents or source in place.parents:
            how = "is" if source == place else "holds" if place in source.parents else "lies in"
            raise UserError(
                f"{out}: {how} the {called(role)} ({given}); what is written must be apart from what is read: "
                "choose another output"
            )


def _real(path: Path) -> Path:
    """Return the resolved path, or the path itself for circular links, which fail later when read."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def _swap(made: Path, target: Path, partial: Path) -> None:
    """Rename ``made`` to ``target`` durably. An existing target was already checked to be ours."""
    if made.is_file():
        with made.open("rb") as handle:
            os.fsync(handle.fileno())
    if target.is_dir() and not target.is_symlink():
        aside = partial / ".replaced"
        files.remove(aside)
        target.rename(aside)
        made.rename(target)
        files.remove(aside)
        return
    try:
        made.replace(target)
    except OSError as error:
        if error.errno != errno.EISDIR:
            raise
        raise UserError(
            f"{target}: became a folder while the output was made; choose another output"
        ) from None


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with its own SHA-256, so that `check_record` can detect changes."""
    return {**record, _SEAL: _digest(record)}


def _digest(record: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in record.items() if key != _SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def check_record(path: Path) -> dict[str, Any] | None:
    """Return an unchanged manifest or run record, or None if it is missing or from an earlier version.

    Raises
    ------
    UserError
        If the record cannot be read or was changed.
    """
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise UserError(f"{path}: is no file, or a link to nowhere; copy it again or make it again")
    record = untrusted.read(path, "JSON")
    if not isinstance(record, dict) or UNFINISHED in record:
        raise UserError(f"{path}: tells of nothing finished; copy it again or make it again")
    if _SEAL not in record and "files" not in record:
        return None
    if record.get(_SEAL) != _digest(record):
        raise UserError(f"{path}: was changed since it was made; copy it again or make it again")
    return record


def verify(out: Path, *, below: str = "", leave: Collection[str] = ()) -> set[str] | None:
    """Compare an output with its manifest, file by file, before it is read.

    Manifests of earlier versions list no files. Such outputs are accepted, with a warning for folders. A file without a
    manifest gives no warning, because files are often copied without it.

    Parameters
    ----------
    out
        A file or folder that a stage wrote, or a link to one.
    below
        Subfolder of ``out`` to check; by default everything is checked.
    leave
        Files and folders directly in ``out`` that are not checked.

    Returns
    -------
    set of str or None
        The unchanged files, by path below ``out`` and ``below``; None if there is nothing to compare with.

    Raises
    ------
    UserError
        If a file is missing or was changed, or if the manifest cannot be read or was changed.
    """
    manifest = check_record(beside(out, "manifest"))
    if manifest is not None:
        check_record(beside(out, "run"))
    listed = (manifest or {}).get("files")
    if not isinstance(listed, dict) or not listed:
        if out.is_dir():
            _warn_unlisted(out.resolve(), out)
        return None
    place, prefix = out.resolve(), f"{below}/" if below else ""
    unchanged = set()
    for name, entry in listed.items():
        if (out.is_file() and name != ".") or not name.startswith(prefix) or name.split("/")[0] in leave:
            continue  # the stage that wrote the companions of a file checks them
        path = place if name == "." else place / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not isinstance(entry, dict):
            raise UserError(f"{beside(out, 'manifest')}: '{name}' is no name of a file in it")
        if not path.is_file():
            raise UserError(f"{out / name}: is missing; copy {out.name} again or make it again")
        if path.stat().st_size != entry.get("size") or files.sha256(path) != entry.get("sha256"):
            shown = out if name == "." else out / name
            raise UserError(f"{shown}: was changed since it was made; copy {out.name} again or make it again")
        unchanged.add(name.removeprefix(prefix))
    return unchanged


@functools.cache
def _warn_unlisted(place: Path, out: Path) -> None:
    """Warn once per path that changes cannot be detected."""
    logger.warning(
        "%s: its manifest lists no files (it was made by an earlier version, or copied without it), so it cannot be "
        "told whether it was changed", out,
    )  # fmt: skip


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Describe the differences between two records that determine a result."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines: list[str] = []
        for key in sorted({*old, *new}):
            lines += differences(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
        return lines
    if old == new:
        return []
    if prefix.endswith("sha256"):
        return [f"{prefix.removesuffix('.sha256')} (contents)"]
    return [f"{prefix} ({old} then, {new} now)"]


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):  # the user is not in the system's user list
        return None
