"""Sums of files. One that is published is compared; where none is, the first look records it for all later ones.

The record ``FILE.sum.json`` lies beside a file. It also has the size and time of change, so that a file of hundreds of
gigabytes is not read again while neither has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from perturbdiff.datasets.registry import Part
from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

_BLOCK = 1 << 22
_SHOWN = 100_000_000  # bytes
_BEGINS = {".h5ad": b"\x89HDF\r\n\x1a\n", ".parquet": b"PAR1"}
"""First bytes of files by their ending."""


def record_of(path: Path) -> Path:
    """Return where the record of a file lies."""
    return path.with_name(f"{path.name}.sum.json")


def check(path: Path, part: Part, *, place: Path | None = None) -> None:
    """Compare a file with its published sum, else with its record.

    Parameters
    ----------
    path
        The file.
    part
        What the registry says of it.
    place
        Where it will lie, and its record lies; by default where it is.

    Raises
    ------
    UserError
        If it is another file.
    """
    place = place or path
    if part.bytes is not None and path.stat().st_size != part.bytes:
        raise _other(path, part, f"it has {path.stat().st_size:,} bytes instead of {part.bytes:,}")
    record = _read(place)
    algorithm, wanted = part.algorithm, part.digest
    if not algorithm:
        if record is None:
            _look_at_begin(path, part)
            return
        algorithm, wanted = record["algorithm"], record["digest"]
    elif record and record["digest"] != wanted:
        record = None
    if record and [path.stat().st_size, path.stat().st_mtime_ns] == record["signature"]:
        return
    found = digest(path, algorithm)
    if found != wanted:
        since = f", as recorded in {record_of(place).name}" if record and not part.digest else ""
        raise _other(path, part, f"its {algorithm.upper()} is {found} instead of {wanted}{since}")


def keep(path: Path, part: Part, version: str = "") -> None:
    """Record the sum of a checked file, unless that is done. ``version`` is what the server called it.

    Without a published sum, this is the first look, which all later ones trust. In a folder that others keep, nothing
    is recorded.
    """
    if not os.access(path.parent, os.W_OK):
        return
    signature = [path.stat().st_size, path.stat().st_mtime_ns]
    known = _read(path)
    if known and known["signature"] == signature:
        return
    algorithm = part.algorithm or "sha256"
    found = part.digest or digest(path, algorithm)
    record: dict[str, Any] = {
        "file": part.file,
        "algorithm": algorithm,
        "digest": found,
        "signature": signature,
    }
    record |= {"published": bool(part.digest), "url": part.url, "version": version}
    files.write_text(record_of(path), json.dumps(record, indent=2) + "\n")
    if not part.digest:
        logger.warning(
            "%s: nobody publishes its sum, so that this first look had to be trusted; its SHA-256 %s is in %s, and "
            "later looks compare with it",
            path,
            found,
            record_of(path).name,
        )


def digest(path: Path, algorithm: str) -> str:
    """Return a file's sum in hexadecimal digits, and show the progress of a file that takes seconds."""
    state = hashlib.new(algorithm, usedforsecurity=False)
    size = path.stat().st_size
    if size < _SHOWN:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, lambda: state).hexdigest()
    with path.open("rb") as handle, track(f"checking {path.name}", size // 1000, "kB") as work:
        while block := handle.read(_BLOCK):
            state.update(block)
            work.advance(len(block) // 1000)
    return state.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """Return the record of a file, or None if there is none that can be read."""
    place = record_of(path)
    if not place.is_file():
        return None
    record = untrusted.read(place, "JSON")
    if not isinstance(record, dict) or not {"algorithm", "digest", "signature"} <= record.keys():
        raise UserError(f"{place}: is not a record of a sum; move it away")
    if record["algorithm"] not in ("sha256", "md5"):
        raise UserError(f"{place}: names a sum that is not known here; move it away")
    return record


def _look_at_begin(path: Path, part: Part) -> None:
    """Raise a `UserError` if a file of which no sum is known is of another kind, such as a page of a website."""
    wanted = _BEGINS.get(Path(part.file).suffix, b"")
    with path.open("rb") as handle:
        found = handle.read(len(wanted))
    if found != wanted:
        raise _other(path, part, "it does not begin as such a file does, and may be a page of a website")


def _other(path: Path, part: Part, why: str) -> UserError:
    return UserError(
        f"{path}: is not the file {part.file} of the registry ({why}); move it away and fetch it again, or set another "
        "folder"
    )
