"""The checkpoint folder of a run. It has one trainer at a time, and keeps the last two complete checkpoints.

``last.ckpt`` is written under another name and then renamed; the checkpoint before it becomes ``previous.ckpt``.
Weights kept during training (the best so far, the end of the first epoch, bundles of single steps) are stored here
too. A checkpoint records which of them it needs, with their SHA-256. If the storage cannot be written, e.g. because
the disk is full, training continues. The old checkpoint stays, kept weights wait in memory, and both are tried again
when the next checkpoint is due.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from perturbdiff.model import Denoiser
from perturbdiff.runtime import files, locks
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.outputs import differences

logger = logging.getLogger(__name__)

KEY = "perturbdiff"
LOGS = "logs"
"""Subfolder for the loggers' files, first in the checkpoint folder and later in the bundle."""
FIRST_EPOCH = "first-epoch.safetensors"
"""Name under which the weights at the end of the first epoch are kept."""
_AFRESH = "start afresh with --resume never, or give another --checkpoints folder"
_BEST = "best-*.safetensors"


@dataclass(frozen=True)
class Unwritten:
    """Weights that could not be written: a copy of the network and the function that writes it."""

    model: Denoiser
    write: Callable[[Denoiser, Path], None]
    folder: bool


class Start(NamedTuple):
    """Where training starts: a checkpoint and its step, or None and 0."""

    checkpoint: Path | None
    step: int


class CheckpointFolder:
    """The folder of one run's checkpoints.

    Parameters
    ----------
    path
        The folder.
    fingerprint
        Resolved configuration and hashes of the inputs, which determine the run. It is stored in each checkpoint.

    Attributes
    ----------
    saved_step
        Step of the checkpoint from which an interrupted run would continue; 0 if there is none.
    trouble
        Why the last attempt to save failed, or None.
    unwritten
        Weights that wait for free space, by name.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.saved_step = 0
        self.trouble: str | None = None
        self.unwritten: dict[str, Unwritten] = {}
        self._lock: locks.Lock | None = None
        self._last_is_good = False
        self._needed: dict[str, str] = {}  # names and hashes of the files that the next checkpoint needs
        self._of_last: set[str] = set()
        self._of_previous: set[str] = set()

    @property
    def key(self) -> str:
        """A short hash that distinguishes this run from others."""
        return hashlib.sha256(self._fingerprint().encode()).hexdigest()[:16]

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.path / "last.ckpt"

    @property
    def previous(self) -> Path:
        """The checkpoint before the last one, in case the last one is damaged."""
        return self.path / "previous.ckpt"

    @contextmanager
    def locked(self, stop: Callable[[], str | None] = lambda: None) -> Iterator[None]:
        """Lock the folder for this process; see `locks.locked`.

        Raises
        ------
        UserError
            If another process trains there, or the folder cannot be written.
        StoppedEarly
            If ``stop`` ended the waiting.
        """
        with locks.locked(self.path, "another training", stop=stop) as self._lock:
            yield

    @property
    def was_used(self) -> bool:
        """Whether a training holds the folder, or one that was killed left it."""
        return (self.path / locks.LOCK).is_file()

    @property
    def held(self) -> bool:
        """Whether this process holds the folder, or held it before."""
        return self._lock is not None

    @property
    def lost(self) -> str | None:
        """Message naming who took over the folder, or None. Does not access the storage."""
        other = None if self._lock is None else self._lock.other
        return f"{self.path} was taken over by {other}" if other else None

    def _is_ours(self) -> bool:
        return self._lock is None or self._lock.taken_by() is None

    def find(self, resume: Literal["auto", "never"]) -> tuple[Path | None, int]:
        """Return the checkpoint to continue from and its step, or (None, 0). ``never`` clears the folder.

        Raises
        ------
        UserError
            If the checkpoint belongs to a run with other settings or inputs, or none can be read.
        """
        if resume == "never":
            self.clear()
        for left in self.path.glob("**/.*.partial"):  # left by a trainer that was killed
            files.remove(left)
        bad: list[str] = []
        for path in (self.last, self.previous):
            if not path.exists():
                continue
            try:
                kept = self._read(path)
            except Exception as error:  # noqa: BLE001 - torch and zip raise many kinds of errors for incomplete files
                bad.append(f"{path}: this checkpoint cannot be read ({type(error).__name__}: {error})")
                continue
            self._check(path, kept)
            self.saved_step = int(kept["global_step"])
            for line in bad:
                logger.warning("%s; going on from the one before it, step %d", line, self.saved_step)
            self._last_is_good = path == self.last
            self._needed = dict(kept[KEY]["needs"])
            self._of_last = set(self._needed)
            self._of_previous = {best.name for best in self.path.glob(_BEST)}
            return path, self.saved_step
        if bad:
            raise UserError(f"{'; '.join(bad)}; {_AFRESH}")
        return None, 0

    def _read(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint after verifying all of its parts and all files that it needs."""
        with zipfile.ZipFile(path) as archive:  # torch itself does not verify the checksums
            if part := archive.testzip():
                raise ValueError(f"{part} is damaged")
        kept = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for name, digest in kept[KEY]["needs"].items():
            if files.sha256(self.path / name) != digest:
                raise ValueError(f"{name}, which it needs, is damaged")
        return kept

    def _check(self, path: Path, kept: Mapping[str, Any]) -> None:
        if "pytorch-lightning_version" in kept:
            raise UserError(f"{path}: an earlier version of perturbdiff wrote this checkpoint; {_AFRESH}")
        theirs, ours = json.loads(kept[KEY]["fingerprint"]), json.loads(self._fingerprint())
        if theirs != ours:
            raise UserError(
                f"{path}: this checkpoint belongs to another run; different: "
                f"{listing(differences(theirs, ours))}; {_AFRESH}"
            )

    def _fingerprint(self) -> str:
        return json.dumps(self.fingerprint, sort_keys=True, default=str)

    def clear(self) -> None:
        """Delete all checkpoints, kept weights and logs."""
        kept = ("*.ckpt", ".*.partial", _BEST, FIRST_EPOCH, "steps", LOGS)
        for pattern in kept:
            for path in self.path.glob(pattern):
                files.remove(path)

    def tidy(self) -> None:
        """Remove the folder if no run can go on from it, for example after the inputs were refused."""
        alone = (locks.LOCK, LOGS, FIRST_EPOCH)  # of no use without a checkpoint
        if self._is_ours() and self.path.is_dir() and all(p.name in alone for p in self.path.iterdir()):
            files.discard(self.path)

    def discard(self) -> None:
        """Remove the folder after training. If it contains other files, these and the folder stay."""
        self.clear()
        if left := [path.name for path in self.path.iterdir() if path.name != locks.LOCK]:
            logger.info("%s: stays, for it holds %s", self.path, listing(sorted(left)))
        else:
            files.discard(self.path)

    def mark(self) -> dict[str, Any]:
        """Return what a checkpoint records about its run."""
        return {"fingerprint": self._fingerprint(), "needs": dict(self._needed)}

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint of ``state``, unless the folder is no longer ours. On failure, `trouble` says why."""
        if not self._is_ours():
            return
        try:
            try:
                self._write(state)
            except OSError as error:
                if not self._gives_room(error):
                    raise
                logger.info("%s: no room for three checkpoints; the last but one is given up", self.path)
                files.remove(self.previous)
                self._of_previous = set()
                self._forget_unneeded()
                self._write(state)
        except OSError as error:
            self.trouble = self._explained(error)
            return
        self.trouble, self.saved_step = None, int(state["global_step"])

    def _write(self, state: dict[str, Any]) -> None:
        for name, item in list(self.unwritten.items()):
            self._write_kept(name, item)
            del self.unwritten[name]
        state[KEY] = self.mark()
        partial = files.temporary_name(self.last)
        _write_whole(state, partial)
        if self._last_is_good and self.last.exists():
            self.last.replace(self.previous)  # after a kill here, the former checkpoint has this name
            self._of_previous = self._of_last
        partial.replace(self.last)
        files.sync(self.path)
        self._last_is_good, self._of_last = True, set(self._needed)
        self._forget_unneeded()

    def _forget_unneeded(self) -> None:
        for best in self.path.glob(_BEST):
            if best.name not in self._of_last | self._of_previous | set(self._needed):
                files.remove(best)

    def _gives_room(self, error: OSError) -> bool:
        """Return whether deleting the previous checkpoint makes enough room, given that the last one is good."""
        if not files.is_full(error) or not (
            self._last_is_good and self.last.exists() and self.previous.exists()
        ):
            return False
        free = shutil.disk_usage(self.path).free + self.previous.stat().st_size
        return free > self.last.stat().st_size or error.errno == errno.EDQUOT

    def _explained(self, error: OSError) -> str:
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(self.path).free / 2**20:.0f} MiB free"
        return f"{'no space left' if files.is_full(error) else error.strerror or error}{free}"

    def best(self, step: int) -> str:
        """Return the file name for the weights of the best step so far."""
        return f"best-{step:09d}.safetensors"

    def keep(
        self,
        name: str,
        model: Denoiser,
        write: Callable[[Denoiser, Path], None],
        *,
        folder: bool = False,
        instead_of: str | None = None,
    ) -> None:
        """Keep weights next to the checkpoints, or in memory until there is room.

        Parameters
        ----------
        name
            Path below the folder.
        model, write
            The model to keep, and the function that writes it to a path.
        folder
            Whether ``write`` creates a folder.
        instead_of
            Name of weights that are no longer needed. They stay while checkpoints on the disk still need them.
        """
        if not self._is_ours():
            return
        self._needed.pop(instead_of or "", None)
        self.unwritten.pop(instead_of or "", None)
        item = Unwritten(model, write, folder)
        try:
            self._forget_unneeded()
            self._write_kept(name, item)
        except OSError as error:
            why = self._explained(error)
            logger.warning(
                "%s cannot be written (%s): kept in memory until there is room", self.path / name, why
            )
            self.unwritten[name] = Unwritten(copy.deepcopy(model).cpu(), write, folder)

    def _write_kept(self, name: str, item: Unwritten) -> None:
        path = self.path / name
        try:
            with files.writing(path, folder=item.folder) as partial:
                item.write(item.model, partial)
        except UserError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise
        if not item.folder:
            self._needed[name] = files.sha256(path)

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return kept weights.

        Raises
        ------
        UserError
            If they are missing or damaged.
        """
        if name in self.unwritten:
            return self.unwritten[name].model.state_dict()
        path = self.path / name
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            raise UserError(f"{path}: these weights are gone; run again with --resume never") from None


def _write_whole(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint and force it to the disk. After a failure, nothing is left behind."""
    try:
        with path.open("wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
    except BaseException as error:
        files.remove(path)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch's message hides that of the system
        raise
