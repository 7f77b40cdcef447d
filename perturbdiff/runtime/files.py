"""Write files so that they appear complete or not at all: write under a temporary name, then rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from perturbdiff.runtime.errors import UserError, nearest

FULL = (errno.ENOSPC, errno.EDQUOT)
"""System errors for lack of space: a full disk or a used-up quota."""


def is_full(error: OSError) -> bool:
    """Return whether an error means lack of space. Libraries may hide the system's error number."""
    return error.errno in FULL or "No space left" in str(error)


@contextlib.contextmanager
def explain_os_errors(path: Path, *, kept_at: Path | None = None) -> Iterator[None]:
    """Turn a full disk, a missing permission or a read-only file system below ``path`` into a `UserError`.

    ``kept_at`` is the folder in which the next run finds the work done so far.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            rest = (
                f"free some space and run again, which goes on where it stopped (what is done is in {kept_at})"
                if kept_at
                else "free some space or choose another output folder; nothing was left behind"
            )
            raise UserError(f"disk full while writing {path}: {rest}") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"cannot write {path}: permission denied; choose another output folder"
            ) from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
            reason = (error.strerror or "").lower()
            raise UserError(
                f"cannot write {path}: its folder cannot be made ({reason}); choose another output"
            ) from error
        raise


def temporary_name(path: Path) -> Path:
    """Return the name under which ``path`` is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def writing(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path that is renamed to ``path`` when the block ends without an error.

    Use it for files in a folder that this process has locked. For outputs, use `perturbdiff.runtime.provenance.stage`.

    Parameters
    ----------
    path
        The final name. An existing file is replaced only at the end.
    folder
        Whether to write a folder, which is then created empty.

    Raises
    ------
    UserError
        If the path is not writable or the disk is full.
    """
    partial = temporary_name(path)
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        if folder:
            partial.mkdir()
        elif not os.access(path.parent, os.W_OK):
            raise UserError(f"cannot write {path}: permission denied; choose another output folder")
        try:
            yield partial
            replace(partial, path)
        except BaseException:
            remove(partial)
            raise


def replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target`` durably, replacing an existing file or folder."""
    if source.is_file():
        with source.open("rb") as handle:
            os.fsync(handle.fileno())
    if target.is_dir() and not target.is_symlink():
        old = target.with_name(f".{target.name}.old")
        remove(old)
        target.rename(old)
        source.rename(target)
        remove(old)
    else:
        source.replace(target)


def sync(folder: Path) -> None:
    """Force the names in a folder from the system's memory to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists.

    After an interruption, a library's thread may still write into the folder: then it is tried again for a second.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for pause in (0.02, 0.1, 0.3, 0.6):
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            time.sleep(pause)
        else:
            return
    shutil.rmtree(path)


def discard(folder: Path) -> None:
    """Delete a folder into which others may be writing. It is renamed first."""
    aside = folder.with_name(f".{folder.name}.old")
    remove(aside)
    folder.rename(aside)
    remove(aside)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    with writing(path) as partial:
        partial.write_text(text)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, or of a folder's files in name order.

    For a folder that one of our stages wrote, only its ``manifest.json`` is hashed, which determines the rest.
    """
    digest = hashlib.sha256()
    if path.is_dir():
        manifest = path / "manifest.json"
        if manifest.is_file():
            return sha256(manifest)
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path)}\0{sha256(file)}\0".encode())
        return digest.hexdigest()
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def signature(path: Path) -> tuple[int, int]:
    """Return size and time of change (ns) of a file, or the sum and the latest over a folder's files.

    Code that reads a file for a long time compares the signature before and after.
    """
    stats = [p.stat() for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()]
    return sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)


def is_there(path: Path) -> bool:
    """Return whether a path leads to something. One that is too long for a name does not."""
    try:
        return path.exists()
    except OSError:
        return False


def existing(path: Path, what: str) -> Path:
    """Return ``path`` if it is a file or a folder, else raise a `UserError` that calls it ``what``."""
    if not is_there(path):
        raise UserError(f"{what} not found: {path}{_instead(path)}")
    if not path.is_file() and not path.is_dir():  # reading from a pipe could block for ever
        raise UserError(f"{what} is neither a file nor a folder: {path}")
    return path


def _instead(path: Path) -> str:
    """Return what a path that leads nowhere may have been, with the punctuation before it."""
    if path.is_symlink():
        return f"; it is a link to {path.readlink()}, which is not there"
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    try:
        names = [one.name for one in folder.iterdir() if not one.name.startswith(".")]
    except OSError:
        return ""
    return nearest(path.name, names) or f"; the working folder is {Path.cwd()}" * (not path.is_absolute())
