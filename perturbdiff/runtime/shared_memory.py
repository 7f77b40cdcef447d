"""One copy of a block of memory for all processes of a node.

The first process makes an anonymous file in memory, fills it and hands it to the others through a socket. The file has
no name anywhere, so that nothing is left when processes are killed, and it does not need a large ``/dev/shm``.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

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
        What names the run on this node; the same in all its processes, and in no other.
    rank, size
        Number of this process on the node, and how many there are.
    """

    run: str
    rank: int
    size: int

    @staticmethod
    def supported() -> bool:
        """Return whether this system has what is needed (Linux)."""
        return hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")

    def share(self, key: str, size: int, fill: Callable[[np.ndarray], None]) -> np.ndarray:
        """Return a block that all processes see, uint8 [size]; the first one fills it, the others wait for that.

        Parameters
        ----------
        key
            What names the block; all processes ask for the same blocks.
        size
            Bytes.
        fill
            Called in the first process with the block.

        Raises
        ------
        UserError
            If a process does not come or ends.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            if self.rank:
                self._connect(link, key)
                file = self._receive(link)
                try:
                    return _mapped(file, size)
                finally:
                    os.close(file)
            link.bind(self._address(key))
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
        """Return the first process's answer."""

        def write(block: np.ndarray) -> None:
            block[0] = answer

        return bool(self.share(key, 1, write)[0])

    def _address(self, key: str) -> str:
        name = hashlib.sha256(f"{self.run} {os.getuid()} {key}".encode()).hexdigest()
        return f"\0perturbdiff-{name}"  # an abstract address: it is no file

    def _connect(self, link: socket.socket, key: str) -> None:
        end = time.monotonic() + WAIT
        while True:
            try:
                link.connect(self._address(key))
                break
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() > end:
                    raise UserError("the first process of this node did not start; see its output") from None
                time.sleep(_PAUSE)
        if not _is_own(link):
            raise UserError("another user answers in place of this run's first process; start the run again")

    def _receive(self, link: socket.socket) -> int:
        """Return the open file that the first process sends when it is filled."""
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
    """Return whether the same user is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(
        link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user == os.getuid()
