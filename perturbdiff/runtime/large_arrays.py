"""Large arrays: one block of memory for all processes of a node, and arrays that are held for a while.

The first process of a node creates an anonymous file in memory, fills it and passes it to the others through a socket.
The file has no name, so nothing is left when processes are killed. It also does not need a large ``/dev/shm``.

Of the arrays that are held for a while, the first ones are in memory, the others in temporary files that are mapped
into it. The system writes a mapped file to the disk when memory is short, so such arrays slow a process down instead of
ending it. The files have no name, and end with their arrays.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from perturbdiff.runtime.errors import UserError

WAIT = 1800.0
"""Seconds to wait for the other processes to start."""

_PAUSE = 0.05
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Node:
    """The processes of one run on one node.

    Attributes
    ----------
    run
        Name of the run on this node. All its processes have the same name, and no others have it.
    rank, size
        Index of this process on the node, and the number of processes.
    """

    run: str
    rank: int
    size: int
    _asked: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    @staticmethod
    def supported() -> bool:
        """Return whether this system supports it (Linux)."""
        return hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")

    def share(self, key: str, size: int, fill: Callable[[np.ndarray], None]) -> np.ndarray:
        """Return a block that all processes share, uint8 [size]. The first process fills it, the others wait.

        Parameters
        ----------
        key
            Name of the block. All processes ask for the same blocks in the same order. A name may come again, as that
            of a store that is given twice, and is another block then.
        size
            Size in bytes.
        fill
            Called in the first process with the block.

        Raises
        ------
        UserError
            If a process does not start, or ends.
        """
        self._asked[key] += 1
        address = self._address(f"{key} {self._asked[key]}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            if self.rank:
                self._connect(link, address)
                file = self._receive(link)
                try:
                    return _mapped(file, size)
                finally:
                    os.close(file)
            link.bind(address)
            link.listen(self.size)
            file = os.memfd_create(f"perturbdiff-{key}")
            try:
                os.ftruncate(file, max(size, 1))
                block = _mapped(file, size)
                fill(block)
                self._hand_out(link, file)
            finally:
                os.close(file)
            return block

    def agree(self, key: str, answer: bool) -> bool:  # noqa: FBT001
        """Return the answer of the first process in all processes."""

        def write(block: np.ndarray) -> None:
            block[0] = answer

        return bool(self.share(key, 1, write)[0])

    def _address(self, key: str) -> str:
        name = hashlib.sha256(f"{self.run} {os.getuid()} {key}".encode()).hexdigest()
        return f"\0perturbdiff-{name}"  # an abstract address, which creates no file

    def _connect(self, link: socket.socket, address: str) -> None:
        end = time.monotonic() + WAIT
        while True:
            try:
                link.connect(address)
                break
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() > end:
                    raise UserError("the first process of this node did not start; see its output") from None
                time.sleep(_PAUSE)
        if not _is_own(link):
            raise UserError("another user answers in place of this run's first process; start the run again")

    def _receive(self, link: socket.socket) -> int:
        """Return the open file, which the first process sends after filling it."""
        try:
            message, files, _, _ = socket.recv_fds(link, 1, 1)
        except ConnectionError:
            message, files = b"", []
        if not message or not files:
            raise UserError("the first process of this node ended while it read the cells; see its output")
        return files[0]

    def _hand_out(self, link: socket.socket, file: int) -> None:
        link.settimeout(WAIT)
        served = 0
        while served < self.size - 1:
            try:
                other, _ = link.accept()
            except TimeoutError:
                raise UserError(
                    f"{self.size - 1 - served} processes of this node did not start; see their output"
                ) from None
            with other:
                if _is_own(other):
                    socket.send_fds(other, [b"1"], [file])
                    served += 1


def _mapped(file: int, size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, max(size, 1)), np.uint8)[:size]


def _is_own(link: socket.socket) -> bool:
    """Return whether the other end belongs to the same user."""
    _, user, _ = _CREDENTIALS.unpack(
        link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user == os.getuid()


HELD_BYTES = 16 << 20
"""Of the arrays that are in memory."""
LONG_BYTES = 4 << 20
"""A single array with more bytes than this is in a file."""
_SEGMENT = 64 << 20  # bytes of a file that small arrays share
_ALIGNED = 64

Key = TypeVar("Key", bound=Hashable)


class ScratchArrays:
    """Makes arrays. Threads may share it."""

    def __init__(self) -> None:
        self._segment: np.ndarray = np.empty(HELD_BYTES, np.uint8)  # pages that nobody writes take no memory
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, length: int, dtype: np.dtype) -> np.ndarray:
        """Return an array [length] whose values are undefined.

        If there is no room on the disk, it is in memory.
        """
        size = -(-length * dtype.itemsize // _ALIGNED) * _ALIGNED
        with self._lock:
            if size > len(self._segment) - self._used:
                if size > _SEGMENT // 4:
                    return _temporary(size)[: length * dtype.itemsize].view(dtype)
                self._segment, self._used = _temporary(_SEGMENT), 0
            found = self._segment[self._used : self._used + length * dtype.itemsize]
            self._used += size
        return found.view(dtype)


def long_array(length: int, dtype: np.dtype) -> np.ndarray:
    """Return an array [length] of undefined values: in memory if it is short, else in a temporary file.

    If there is no room on the disk, it is in memory.
    """
    size = length * dtype.itemsize
    return np.empty(length, dtype) if size <= LONG_BYTES else _temporary(size).view(dtype)


class PackedRows(Mapping[Key, np.ndarray]):
    """Row numbers (int64) by key, one after the other in a single `long_array`.

    Parameters
    ----------
    most
        Number of rows of all keys together, at most.
    rows
        The rows of each key.
    """

    def __init__(self, most: int, rows: Iterable[tuple[Key, np.ndarray]]) -> None:
        self._every, self._ends, end = long_array(most, np.dtype(np.int64)), {}, 0
        for key, some in rows:
            start, end = end, end + len(some)
            self._every[start:end] = some
            self._ends[key] = start, end

    def __getitem__(self, key: Key) -> np.ndarray:
        start, end = self._ends[key]
        return self._every[start:end]

    def __contains__(self, key: object) -> bool:
        return key in self._ends

    def __iter__(self) -> Iterator[Key]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)


def _temporary(size: int) -> np.ndarray:
    """Return ``size`` bytes of a new temporary file."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            # reserved at once: writing to a mapped file on a full disk ends the process
            os.posix_fallocate(file.fileno(), 0, size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError:
        return np.empty(size, np.uint8)
