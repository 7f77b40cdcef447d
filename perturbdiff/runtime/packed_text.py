"""Text files that may be packed: a small file that unpacks without end is refused while it is read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from perturbdiff.runtime.errors import UserError

UNPACKED_AT_LEAST, UNPACKED_TIMES = 64 << 20, 100
"""A packed file may hold this many bytes, or this many times its own size. Tables are packed to a twentieth or so."""

_PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked if its name ends with .gz, .bz2 or .xz.

    Raises
    ------
    UserError
        While it is read: if it unpacks to far more than it has bytes.
    """
    unpack = _PACKED.get(path.suffix.lower())
    if unpack is None:
        return path.open("rb")
    most = max(UNPACKED_AT_LEAST, UNPACKED_TIMES * path.stat().st_size)
    return io.BufferedReader(_Bounded(path, unpack(path, "rb"), most))  # type: ignore[return-value]


class _Bounded(io.RawIOBase):
    """The first ``most`` bytes of a stream; more are an error."""

    def __init__(self, path: Path, stream: IO[bytes], most: int) -> None:
        self._path, self._stream, self._left = path, stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise UserError(
                f"{self._path}: unpacks to more than {UNPACKED_TIMES} times its size, which no such table does; "
                "unpack it yourself and look at it"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
