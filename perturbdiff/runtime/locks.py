"""One process at a time in a folder, on one machine and across the nodes of a cluster.

The lock is a file, ``.lock``, that its holder both locks in the kernel (``flock``) and signs with a note: host,
process, Slurm job. The kernel gives its lock back when the holder dies, however it dies; but on some network file
systems that lock does not reach other nodes, or there is none. So the holder also shows that it lives: every `BEAT`
seconds a thread of it renews the file's time stamp. Who finds a note in the file goes by these rules, in this order:

1. The holder ran on this very machine (same boot of the same kernel) and had the kernel's lock: the kernel decides.
2. The holder is an earlier run of our own requeued Slurm job: it is gone, the folder is ours.
3. Otherwise the time stamp decides, by whether it *changes* while we watch; clocks of different machines are never
   compared. If it changes, the folder is in use. If it does not for `MISSED` beats (`REFUSED` beats if the kernel
   still says that it is locked), the holder is gone or stalled, and the folder is taken over.

A holder that only stalled (a suspended node, storage that hung) finds another's note in the file when it goes on; it
has to ask (`Lock.taken_by`) before it writes anything that the other may be writing too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from perturbdiff.runtime import files
from perturbdiff.runtime.errors import StoppedEarly, UserError

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""File of a folder by which one process holds it."""
BEAT = 15.0
"""Seconds between two signs of life of a holder."""
MISSED = 5
"""Beats without a sign of life after which a holder counts as gone."""
REFUSED = 40
"""The same where the kernel still says that the holder on another node has its lock."""
WAIT = "PD_WAIT"
"""Environment variable: seconds to wait for a folder that is in use."""

_POLL, _SPEAK = 2.0, 60.0
_SIZE = 1024  # a note is written over the former one in one go, and so needs no room on a full disk


@dataclass(frozen=True)
class Note:
    """Who holds a folder."""

    token: str
    host: str
    kernel: str
    process: int
    job: str | None
    restarts: int
    since: str
    flock: bool

    @classmethod
    def own(cls, *, flock: bool) -> Note:
        """Return the note of this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        job, restarts = os.environ.get("SLURM_JOB_ID"), _restarts()
        return cls(uuid.uuid4().hex, platform.node(), _kernel(), os.getpid(), job, restarts, since, flock)

    @classmethod
    def parse(cls, data: bytes) -> Note | None:
        """Return the note in a lock file, None if there is none."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """Return the note as it stands in the file."""
        return json.dumps(asdict(self)).encode().ljust(_SIZE - 1) + b"\n"

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"host {self.host}, process {self.process}{job}, since {self.since}"


class Lock:
    """A folder that is held.

    Attributes
    ----------
    waited
        Whether another process had it first.
    other
        Who has taken it over, empty while nothing is known of that.
    """

    def __init__(self, path: Path, handle: int, note: Note) -> None:
        self.path, self.waited = path, False
        self.other = ""
        self._handle, self._note = handle, note
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)
        self._thread.start()

    def taken_by(self) -> str | None:
        """Return who has taken the folder over; None while it is ours, or while the storage does not answer."""
        if self.other:
            return self.other
        try:
            note = Note.parse(self.path.read_bytes())
        except FileNotFoundError:
            self.other = "someone who removed its lock file"
            return self.other
        except OSError:
            return None
        if note is None or note.token != self._note.token:
            self.other = str(note or "someone who did not sign")
        return self.other or None

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            if other := self.taken_by():
                if self.path.exists():  # else a finished stage removed it
                    logger.warning("%s: taken over by %s", self.path.parent, other)
                return
            with contextlib.suppress(OSError):  # storage that does not answer may do so at the next beat
                os.utime(self._handle)

    def release(self) -> None:
        """Give the folder back."""
        self._ended.set()
        self._thread.join(1)  # not for ever: storage may hang
        with contextlib.suppress(OSError):
            if self.taken_by() is None:
                os.pwrite(self._handle, b" " * (_SIZE - 1) + b"\n", 0)
        os.close(self._handle)


@contextlib.contextmanager
def locked(folder: Path, what: str, *, stop: Callable[[], str | None] = lambda: None) -> Iterator[Lock]:
    """Hold ``folder``, which is made, for this process alone; the module's description has the rules.

    Parameters
    ----------
    folder
        The folder.
    what
        Who else may hold it, e.g. 'another training'.
    stop
        Says why waiting has to end now, or None.

    Raises
    ------
    UserError
        If another process holds it (after waiting, if ``PD_WAIT`` is set), or it cannot be written.
    StoppedEarly
        If ``stop`` ended the waiting.
    """
    lock = _enter(_Door(folder), what, stop)
    try:
        yield lock
    finally:
        lock.release()


def _enter(door: _Door, what: str, stop: Callable[[], str | None]) -> Lock:
    """Wait for the folder as long as it may be free or ``PD_WAIT`` says."""
    patience, began, spoken = _patience(), time.monotonic(), None
    while (lock := door.knock()) is None:
        waited = time.monotonic() - began
        if not door.in_doubt and waited >= patience:
            after = f" after {waited:.0f} s of waiting" if patience else ""
            raise UserError(
                f"{door.folder}: {what} is using this folder{after} ({door.holder}); wait for it or cancel it"
            )
        if reason := stop():
            raise StoppedEarly(
                f"{reason}; was still waiting for {what} ({door.holder}) to leave {door.folder} and has touched "
                "nothing; run the same command again"
            )
        if spoken is None or time.monotonic() - spoken >= _SPEAK:
            spoken = time.monotonic()
            doubt = ", if it still lives" if door.in_doubt else ""
            logger.info("waiting for %s in %s to end%s: %s", what, door.folder, doubt, door.holder)
        time.sleep(min(_POLL, BEAT))
    lock.waited = spoken is not None
    return lock


class _Door:
    """Tries to take a folder, and remembers between tries what it saw there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self.holder = "it has not signed yet"
        self._seen: tuple[str, int] | None = None  # the note's token and the file's time stamp
        self._changed, self._lives = 0.0, False

    @property
    def in_doubt(self) -> bool:
        """Whether the holder may be gone: only watching will tell."""
        return self._seen is not None and not self._lives

    def knock(self) -> Lock | None:
        """Return the lock if the folder is free, or has become so; None if it is in use or may be."""
        with files.explain_os_errors(self.folder, kept_at=self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = self._open()
        lock = None
        try:
            granted = _flock(handle)
            former = Note.parse(os.pread(handle, _SIZE, 0))
            if self._free(former, granted, os.fstat(handle).st_mtime_ns) and _is_at(handle, self.path):
                note = Note.own(flock=bool(granted))
                with files.explain_os_errors(self.folder, kept_at=self.folder):
                    self._sign(handle, note)
                lock = Lock(self.path, handle, note)
        finally:
            if lock is None:
                os.close(handle)
        return lock

    def _open(self) -> int:
        """Open the lock file, which is made only in a folder that is empty: what others keep is none of ours."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if not self.path.is_symlink() and not self.path.exists() and any(self.folder.iterdir()):
                raise UserError(
                    f"{self.folder}: is there and was not made by perturbdiff; name a new folder, or move that away"
                )
            return os.open(self.path, flags | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise UserError(f"{self.path}: is not a lock file of ours; move it away first") from None
            raise

    def _free(self, note: Note | None, granted: bool | None, stamp: int) -> bool:  # noqa: FBT001
        """Return whether the folder is ours by the rules; ``granted`` is None if the kernel cannot tell."""
        if note is None:
            self._seen = None
            return granted is not False
        self.holder = str(note)
        if note.flock and note.kernel == _kernel() and granted is not None:
            self._seen = None
            return granted and self._taken_over("its process is gone")
        job = os.environ.get("SLURM_JOB_ID")
        if job and note.job == job and note.restarts < _restarts():
            return self._taken_over("this job was requeued")
        now = time.monotonic()
        if self._seen != (note.token, stamp):
            self._lives = self._seen is not None or granted is False
            self._seen, self._changed = (note.token, stamp), now
        silent, limit = now - self._changed, BEAT * (REFUSED if granted is False else MISSED)
        return silent >= limit and self._taken_over(f"no sign of life for {silent:.0f} s")

    def _taken_over(self, why: str) -> bool:
        logger.warning("%s: taken over from %s: %s", self.folder, self.holder, why)
        return True

    def _sign(self, handle: int, note: Note) -> None:
        try:
            os.pwrite(handle, note.to_bytes(), 0)
        except OSError as error:
            if not files.is_full(error):
                raise
            for left in self.folder.glob(files.temporary_name(Path("*")).name):  # of a writer that was killed
                files.remove(left)
            os.pwrite(handle, note.to_bytes(), 0)


def _flock(handle: int) -> bool | None:
    """Ask for the kernel's lock: got, refused, or None where there is no such thing."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Return whether the open file still has its name: a former holder may have removed the folder."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _kernel() -> str:
    """Return what tells this boot of this machine from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _restarts() -> int:
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def _patience() -> float:
    text = os.environ.get(WAIT, "")
    try:
        return float(text or 0)
    except ValueError:
        logger.warning("%s is not a number of seconds: %r; ignored", WAIT, text)
        return 0.0
