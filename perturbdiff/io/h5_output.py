"""HDF5 files that are written by pieces: a full disk ends in one error, not in a crash of the library."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

_NO_ROOM = "No space left on device"
_UNFINISHED = ("Can't decrement id ref count", "file write failed")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[h5py.File]:
    """Yield a new HDF5 file; it is closed at the end and unusable after an error.

    Raises
    ------
    OSError
        If the file cannot be made, or the disk is full.
    """
    file = create(path)
    try:
        yield file
        finish(file)
    finally:
        abandon(file)


def create(path: Path) -> h5py.File:
    """Open a new HDF5 file for writing, to be closed by `finish` or `abandon`."""
    _hush()
    return h5py.File(path, "w")


def finish(file: h5py.File) -> None:
    """Write what is still in memory and close the file.

    Raises
    ------
    OSError
        If the disk is full; then the file has to be abandoned.
    """
    try:
        file.flush()
    except RuntimeError as error:
        if _NO_ROOM not in str(error):
            raise
        raise OSError(errno.ENOSPC, _NO_ROOM) from error
    file.close()


def abandon(file: h5py.File) -> None:
    """Close a file that could not be finished; a closed one is left as it is.

    The file is emptied first, so that the library has room for what it insists on writing.
    """
    if not file:
        return
    _end_without_library()
    os.truncate(file.filename, 0)
    with contextlib.suppress(OSError, RuntimeError):
        file.close()


def growing(group: h5py.Group, name: str, dtype: Any, chunk: int) -> h5py.Dataset:
    """Create an empty one-dimensional array for `append`, compressed in pieces of ``chunk`` values."""
    return group.create_dataset(
        name,
        (0,),
        dtype,
        maxshape=(None,),
        chunks=(chunk,),
        compression="gzip",
        compression_opts=1,
        shuffle=True,
    )


def append(array: Any, values: np.ndarray) -> None:
    """Write ``values`` at the end of a one-dimensional array of HDF5 or Zarr."""
    if len(values):
        start = array.shape[0]
        array.resize((start + len(values),))
        array[start:] = values


def recast(group: h5py.Group, name: str, dtype: Any, chunk: int) -> None:
    """Write an array of `growing` again with another type, ``chunk`` values at a time."""
    old: Any = group[name]
    del group[name]
    new = growing(group, name, dtype, chunk)
    for start in range(0, old.shape[0], chunk):
        append(new, old[start : start + chunk].astype(dtype))


@functools.cache
def _end_without_library() -> None:
    """Skip the library's clean-up when the process ends: it crashes over objects that it could not write."""
    system = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # only glibc tells a handler the exit code
        system.on_exit(system._exit, None)


@functools.cache
def _hush() -> None:
    """Silence what the library prints of objects that it could not write; the error is raised as well."""

    def without(former: Callable[..., Any], error_of: Callable[..., object]) -> Callable[..., Any]:
        def hook(*arguments: Any) -> None:
            if not any(text in str(error_of(*arguments)) for text in _UNFINISHED):
                former(*arguments)

        return hook

    sys.excepthook = without(sys.excepthook, lambda _kind, error, _trace: error)
    sys.unraisablehook = without(sys.unraisablehook, lambda unraisable: unraisable.exc_value)
