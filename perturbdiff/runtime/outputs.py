"""What may be written where: an output replaces only what an earlier run of the same stage made.

A finished output is known by its manifest, which names the stage and lists every file. Whatever else lies at an
output's place belongs to somebody: it is named and nothing is touched.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.errors import UserError, listing

logger = logging.getLogger(__name__)

RECORDS = ("manifest", "run")
"""What is recorded with an output: what determines it, and how the run went."""
UNFINISHED = "unfinished"
"""Entry of the manifest of a file that is about to be replaced."""

_SEAL = "sha256"
_DEAR_STAGES = ("pretrain", "train", "finetune")
_DEAR_SECONDS = 60.0
_LONGEST_NAME = 200  # bytes; a file system takes 255, and records and companions add an ending


def beside(out: Path, kind: str) -> Path:
    """Return where the ``kind`` (``manifest`` or ``run``) record of output ``out`` lies."""
    return out / f"{kind}.json" if out.is_dir() else out.with_name(f"{out.name}.{kind}.json")


def read_record(out: Path, kind: str) -> dict[str, Any] | None:
    """Return a record of an output, or None if it has none that can be read."""
    try:
        found = json.loads(beside(out, kind).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_manifest(out: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished output, or None if it has none that can be read."""
    found = read_record(out, "manifest")
    return None if found is None or UNFINISHED in found else found


def entries(path: Path, name: str = "", known: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return size (bytes) and SHA-256 of a file, or of every file of a folder, by its path below ``path``.

    Parameters
    ----------
    path
        A file or a folder.
    name
        What ``path`` is called; begins the names of its files.
    known
        SHA-256 of files that need not be read again, by path below ``path``.
    """
    known = known or {}
    return {
        _joined(name, below): {"size": file.stat().st_size, "sha256": known.get(below) or files.sha256(file)}
        for below, file in _files(path)
    }


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield all that is no folder at or below ``path``, with its path below it; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        if path.is_symlink() or path.exists():
            yield ".", path
        return
    for folder, _, names in os.walk(path):
        # a link to a folder is among the folders' names, and is something that lies there
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
    """The place of an output, and of what is written beside it.

    Attributes
    ----------
    stage
        Name of the command.
    out
        The output, a file or (``folder``) a folder.
    companions
        Files and folders that belong to the output and lie beside it, by the name that the manifest has for them.
    """

    stage: str
    out: Path
    folder: bool
    companions: Mapping[str, Path] = field(default_factory=dict)

    @property
    def partial(self) -> Path:
        """The folder in which the output is made, held by one process."""
        return files.temporary_name(self.out)

    @property
    def previous(self) -> Path:
        """Where an output that took long to make goes when another takes its place."""
        return self.out.with_name(f"{self.out.name}.previous")

    def check_place(self, inputs: Mapping[str, Path]) -> None:
        """Refuse a place that nothing may be written to, whatever lies there.

        Parameters
        ----------
        inputs
            Files and folders that are read, by role.

        Raises
        ------
        UserError
            If it is an input, holds one or lies in one, or is a place like the home folder, a device or a link.
        """
        for path in (self.out, *self.companions.values()):
            check_place(path)
            for role, given in inputs.items():
                _check_apart(path, role, given)

    def check(self, base: Mapping[str, Any], *, force: bool) -> None:
        """Refuse to replace what is not ours, and what took long to make.

        Parameters
        ----------
        base
            What determines the new output.
        force
            Whether an output that took long to make may be moved aside.

        Raises
        ------
        UserError
            If something lies there that an earlier run of this stage did not make, or, without ``force``, that
            took long to make with other settings.
        """
        if (foreign := self.foreign()) and (self.out.exists() or self._lies_beside()):
            raise UserError(
                f"{self.out}: {foreign}; nothing was touched: choose another output, or move that away first"
            )
        if self.out.exists() and self._is_dear():
            former = read_manifest(self.out) or {}
            different = differences({key: former.get(key) for key in base}, base)
            if different and not force:
                raise UserError(
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
        """Say what lies at the output's places that an earlier run of this stage did not make; empty if nothing."""
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
        """Return what is recorded of each file, by name; of files that chance shapes ``run.json`` tells."""
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
        """Return the names of files that the manifest lists and that are not there with the size it tells."""
        listed = self._listed(read_manifest(self.out) or {})
        there = {name: file.stat().st_size for name, file in self._there() if file.is_file()}
        return sorted(name for name, entry in listed.items() if there.get(name) != entry.get("size"))

    def is_whole(self) -> bool:
        """Return whether the manifest lists files and all are there with the sizes it tells."""
        manifest = read_manifest(self.out)
        return manifest is not None and bool(self._listed(manifest)) and not self.missing()

    def _is_dear(self) -> bool:
        """Return whether what lies there took long to make."""
        seconds = (read_record(self.out, "run") or {}).get("wall_seconds")
        long = isinstance(seconds, int | float) and seconds > _DEAR_SECONDS
        return read_manifest(self.out) is not None and (self.stage in _DEAR_STAGES or long)

    def put(self, made: Path, made_beside: Mapping[str, Path], records: Mapping[str, str]) -> None:
        """Put a finished output in its place, with its records.

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
            # From here to the end the place is known as ours, and as unfinished.
            mark = json.dumps({"stage": self.stage, UNFINISHED: True}) + "\n"
            files.write_text(beside(self.out, "manifest"), mark)
        for name, path in made_beside.items():
            _swap(path, self.companions[name], self.partial)
        _swap(made, self.out, self.partial)
        if not self.folder:
            for kind in reversed(RECORDS):
                files.write_text(self.out.with_name(f"{self.out.name}.{kind}.json"), records[kind])

    def _brought_near(self, made: Path) -> Path:
        """Return ``made``, or a copy of it in the partial folder if it lies on another file system."""
        if made.stat().st_dev == self.partial.stat().st_dev:
            return made
        copy = self.partial / self.out.name
        files.remove(copy)
        shutil.copytree(made, copy) if made.is_dir() else shutil.copy2(made, copy)
        return copy

    def _move_aside(self) -> None:
        """Keep what is there if it took long to make, or if somebody put something into it while we worked."""
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
    """Refuse a place that no output may have: the home or the working folder, one that holds it, a link, a device.

    Raises
    ------
    UserError
        If it is one.
    """
    if not out.name or out.name == "..":
        raise UserError(f"{out}: is a folder that is there already; name a new place in it")
    if len(os.fsencode(out.name)) > _LONGEST_NAME:
        raise UserError(f"{out}: its name is longer than {_LONGEST_NAME} bytes; choose a shorter one")
    if out.is_symlink():
        raise UserError(f"{out}: is a link to {out.readlink()}; name the place itself")
    if out.exists() and not (out.is_file() or out.is_dir()):
        # A rename would put the result in its place.
        raise UserError(f"{out}: a device or pipe, not a file; name a file to write")
    place = _real(out)
    for protected, what in ((Path.cwd(), "the working folder"), (_home(), "your home folder")):
        if protected is not None and (place == protected or place in protected.parents):
            raise UserError(
                f"{out}: {'is' if place == protected else 'holds'} {what}; name a new place in it"
            )


def _check_apart(out: Path, role: str, given: Path) -> None:
    place = _real(out)
    # the link that was named counts as well as what it leads to
    for source in (_real(given.parent) / given.name, _real(given)):
        if source == place or place in source.parents or source in place.parents:
            how = "is" if source == place else "holds" if place in source.parents else "lies in"
            raise UserError(
                f"{out}: {how} the input '{role}' ({given}); what is written must be apart from what is read: "
                "choose another output"
            )


def _real(path: Path) -> Path:
    """Return where a path leads; itself if it leads in a circle, which is told where it is read."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def _swap(made: Path, target: Path, partial: Path) -> None:
    """Rename ``made`` to ``target``, durably; what is there was found to be ours."""
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
    """Return a record with its own SHA-256, by which `check_record` sees that it was changed."""
    return {**record, _SEAL: _digest(record)}


def _digest(record: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in record.items() if key != _SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def check_record(path: Path) -> dict[str, Any] | None:
    """Return a manifest or run record that is as it was written; None if it is not there, or of an earlier version.

    Raises
    ------
    UserError
        If it cannot be read or was changed.
    """
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise UserError(f"{path}: is no file, or a link to nowhere; copy it again or make it again")
    found = untrusted.read(path, "JSON")
    if not isinstance(found, dict) or UNFINISHED in found:
        raise UserError(f"{path}: tells of nothing finished; copy it again or make it again")
    if _SEAL not in found and "files" not in found:
        return None
    if found.get(_SEAL) != _digest(found):
        raise UserError(f"{path}: was changed since it was made; copy it again or make it again")
    return found


def verify(out: Path, *, below: str = "", leave: Collection[str] = ()) -> set[str] | None:
    """Compare an output that is read with its manifest, file by file.

    What an earlier version made lists no files: it is taken, and a folder of that kind is warned of. A file mostly
    travels without its manifest, so that nothing is said of one that has none.

    Parameters
    ----------
    out
        A file or folder that a stage wrote, or a link to one.
    below
        Folder of ``out`` that alone is read; all of it by default.
    leave
        Files and folders directly in ``out`` that are not read.

    Returns
    -------
    set of str or None
        The files that are as they were made, by path below ``out`` and ``below``; None if it cannot be told.

    Raises
    ------
    UserError
        If a file is missing or not what it was, or the manifest cannot be read or was changed.
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
    found = set()
    for name, entry in listed.items():
        if (out.is_file() and name != ".") or not name.startswith(prefix) or name.split("/")[0] in leave:
            continue  # companions of a file are looked at by who wrote them
        path = place if name == "." else place / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not isinstance(entry, dict):
            raise UserError(f"{beside(out, 'manifest')}: '{name}' is no name of a file in it")
        if not path.is_file():
            raise UserError(f"{out / name}: is missing; copy {out.name} again or make it again")
        if path.stat().st_size != entry.get("size") or files.sha256(path) != entry.get("sha256"):
            shown = out if name == "." else out / name
            raise UserError(f"{shown}: was changed since it was made; copy {out.name} again or make it again")
        found.add(name.removeprefix(prefix))
    return found


@functools.cache
def _warn_unlisted(place: Path, out: Path) -> None:
    """Say once of each place that nothing tells whether it is as it was made."""
    logger.warning(
        "%s: its manifest lists no files (it was made by an earlier version, or copied without it), so it cannot be "
        "told whether it was changed", out,
    )  # fmt: skip


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Return what differs between two records that determine a result, in words."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: list[str] = []
        for key in sorted({*old, *new}):
            found += differences(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
        return found
    if old == new:
        return []
    if prefix.endswith("sha256"):
        return [f"{prefix.removesuffix('.sha256')} (contents)"]
    return [f"{prefix} ({old} then, {new} now)"]


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):  # no entry in the system's list of users
        return None
