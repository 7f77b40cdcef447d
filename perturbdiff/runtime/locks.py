"""Lock a folder for one process, on one machine and across the nodes of a cluster.

The lock is the file ``.lock``. Its holder locks it in the kernel (``flock``) and writes a note into it: host, process,
Slurm job. The kernel releases its lock when the holder dies, however it dies. But on some network file systems this
lock does not reach other nodes, or does not exist. The holder therefore also shows that it is alive: every `BEAT`
seconds, one of its threads renews the file's time stamp. A process that finds a note in the file applies these rules,
in this order:

1. If the holder ran on this machine (same boot of the same kernel) and had the kernel's lock, the kernel decides.
2. If the holder is an earlier run of our own requeued Slurm job, it is gone and the folder is ours.
3. Otherwise, the time stamp decides by whether it *changes* while we watch. Clocks of different machines are never
   compared. If it changes, the folder is in use. If it does not change for `MISSED` beats (`REFUSED` beats if the
   kernel still reports a lock), the holder is gone or stalled, and the folder is taken over.

A holder that only stalled (a suspended node, storage that hung) finds another note in the file when it continues. It
must call `Lock.taken_by` before it writes anything that the other process may also write.

The locks of the library ``filelock`` (4.2) were tried instead. Its lease works without ``flock`` too, but it tells a
holder that stalled only after two beats, removes a link at the lock's name where we refuse it, cannot know that a
requeued job is the holder itself, and names no holder on the same machine.
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
"""Name of the lock file in a folder."""
BEAT = 15.0
"""Seconds between two updates of the time stamp by the holder."""
MISSED = 5
"""Number of missed beats after which a holder counts as gone."""
REFUSED = 40
"""The same number if the kernel still reports the lock of a holder on another node."""
WAIT = "PD_WAIT"
"""Environment variable with the seconds to wait for a folder that is in use."""

_POLL, _SPEAK = 2.0, 60.0
_SIZE = 1024  # a new note overwrites the old one at once, so it needs no space on a full disk


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
        """Return the note in a lock file, or None if there is none."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """Return the note as it is stored in the file."""
        return json.dumps(asdict(self)).encode().ljust(_SIZE - 1) + b"\n"

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"host {self.host}, process {self.process}{job}, since {self.since}"


class Lock:
    """A locked folder.

    Attributes
    ----------
    waited
        Whether another process held the folder first.
    other
        The process that took the folder over; empty as long as none is known.
    """

    def __init__(self, path: Path, handle: int, note: Note) -> None:
        self.path, self.waited = path, False
        self.other = ""
        self._handle, self._note = handle, note
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="heartbeat", daemon=True)
        self._thread.start()

    def taken_by(self) -> str | None:
        """Return who took the folder over, or None if it is ours or the storage does not answer."""
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

    def _show_life(self) -> None:
        while not self._ended.wait(BEAT):
            if other := self.taken_by():
                if self.path.exists():  # otherwise a finished stage removed it
                    logger.warning("%s: taken over by %s", self.path.parent, other)
                return
            with contextlib.suppress(OSError):  # the storage may answer again at the next beat
                os.utime(self._handle)

    def release(self) -> None:
        """Release the folder."""
        self._ended.set()
        self._thread.join(1)  # with a limit, because storage may hang
        with contextlib.suppress(OSError):
            if self.taken_by() is None:
                os.pwrite(self._handle, b" " * (_SIZE - 1) + b"\n", 0)
        os.close(self._handle)


@contextlib.contextmanager
def locked(folder: Path, what: str, *, stop: Callable[[], str | None] = lambda: None) -> Iterator[Lock]:
    """Create and lock ``folder`` for this process, by the rules in the module's description.

    Parameters
    ----------
    folder
        The folder.
    what
        What else may hold it, e.g. 'another training'.
    stop
        Returns the reason why waiting must end now, or None.

    Raises
    ------
    UserError
        If another process holds the folder (after waiting, if ``PD_WAIT`` is set), or it cannot be written.
    StoppedEarly
        If ``stop`` ended the waiting.
    """
    lock = _wait_for(_LockFile(folder), what, stop)
    try:
        yield lock
    finally:
        lock.release()


def _wait_for(file: _LockFile, what: str, stop: Callable[[], str | None]) -> Lock:
    """Wait for the folder while its holder may be gone, and otherwise for ``PD_WAIT`` seconds."""
    patience, began, last_message = _patience(), time.monotonic(), None
    while (lock := file.try_to_lock()) is None:
        now = time.monotonic()
        if not file.in_doubt and now - began >= patience:
            after = f" after {now - began:.0f} s of waiting" if patience else ""
            raise UserError(
                f"{file.folder}: {what} is using this folder{after} ({file.holder}); wait for it or cancel it"
            )
        if reason := stop():
            raise StoppedEarly(
                f"{reason}; was still waiting for {what} ({file.holder}) to leave {file.folder} and has touched "
                "nothing; run the same command again"
            )
        if last_message is None or now - last_message >= _SPEAK:
            last_message = now
            doubt = ", if it still lives" if file.in_doubt else ""
            logger.info("waiting for %s in %s to end%s: %s", what, file.folder, doubt, file.holder)
        time.sleep(min(_POLL, BEAT))
    lock.waited = last_message is not None
    return lock


class _LockFile:
    """The lock file of a folder that we want. Remembers between attempts what it saw of the holder.

    Attributes
    ----------
    holder
        Who holds the folder, for messages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self.holder = "it has not signed yet"
        self._seen: tuple[str, int] | None = None  # token of the note and time stamp of the file
        self._changed, self._lives = 0.0, False  # when these were last seen to change, and whether ever

    @property
    def in_doubt(self) -> bool:
        """Whether the holder may be gone, which only further watching can show."""
        return self._seen is not None and not self._lives

    def try_to_lock(self) -> Lock | None:
        """Return the lock if the folder is free by now, or None if it is or may be in use."""
        with files.explain_os_errors(self.folder, kept_at=self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = self._open()
        lock = None
        try:
            granted = _flock(handle)
            note = Note.parse(os.pread(handle, _SIZE, 0))
            if self._is_free(note, granted, os.fstat(handle).st_mtime_ns) and _is_at(handle, self.path):
                note = Note.own(flock=bool(granted))
                with files.explain_os_errors(self.folder, kept_at=self.folder):
                    self._sign(handle, note)
                lock = Lock(self.path, handle, note)
        finally:
            if lock is None:
                os.close(handle)
        return lock

    def _open(self) -> int:
        """Open the lock file. It is created only in an empty folder, so that other people's folders stay untouched."""
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

    def _is_free(self, note: Note | None, granted: bool | None, stamp: int) -> bool:  # noqa: FBT001
        """Return whether the folder is ours by the rules. ``granted`` is the answer of `_flock`."""
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
            for left in self.folder.glob(files.temporary_name(Path("*")).name):  # of a killed writer
                files.remove(left)
            os.pwrite(handle, note.to_bytes(), 0)


def _flock(handle: int) -> bool | None:
    """Ask for the kernel's lock: True if granted, False if refused, None if locks are not supported."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Return whether the open file still has its name. A former holder may have removed the folder."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _kernel() -> str:
    """Return a text that identifies this boot of this machine."""
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
