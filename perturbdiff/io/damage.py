"""Turns what a damaged or hostile file raises into one line for a person, without importing a library of files."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from perturbdiff.runtime.errors import UserError

_DAMAGE = (
    OSError, RuntimeError, KeyError, ValueError, EOFError, TypeError, AttributeError, IndexError, ArithmeticError,
)  # fmt: skip
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_NAME = 200  # bytes; a file system takes 255, and an ending or two are added


@contextlib.contextmanager
def explain_damage(path: Path, remedy: str = "copy or make the file again") -> Iterator[None]:
    """Turn what h5py and zarr raise for an incomplete or damaged file into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(
            f"{path}: asks for more memory than there is; it is damaged, or needs a larger machine"
        ) from error
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path}: cannot be read, it is damaged or incomplete ({reason}); {remedy}"
        ) from error


def plain_name(name: str, what: str) -> str:
    """Return a name that becomes the name of a file.

    Raises
    ------
    UserError
        If it would lead to another folder, or no file can have it.
    """
    problem = ""
    if not name or name in (".", ".."):
        problem = "is no name of a file"
    elif "/" in name or "\0" in name:
        problem = "has a '/' or a zero byte"
    elif len(name.encode(errors="surrogateescape")) > _LONGEST_NAME:
        problem = f"is longer than {_LONGEST_NAME} bytes"
    if problem:
        raise UserError(f"{what} {name[:_LONGEST_NAME]!r} {problem}; rename it")
    return name
