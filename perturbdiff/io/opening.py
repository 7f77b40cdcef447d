"""The one door for files of others: h5ad and 10x h5, Zarr folders and npz, checked before any value is read."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.lib import format as npy

from perturbdiff.io.damage import explain_damage
from perturbdiff.io.hdf5_check import check_hdf5
from perturbdiff.io.zarr_check import check_zarr, open_group
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError

_UNPACKED_AT_LEAST, _UNPACKED_TIMES = 64 << 20, 100


def open_root(path: Path, *, cache: int = 0, checked: bool = False) -> Any:
    """Open an HDF5 file or a Zarr folder for reading.

    Parameters
    ----------
    path
        The file or folder.
    cache
        Bytes of HDF5's own cache of decoded chunks; blocks that are read onwards would only be copied once more.
    checked
        Whether the same run has checked it already, in another process.

    Returns
    -------
    h5py.File or zarr.Group
        The root.

    Raises
    ------
    UserError
        If there is no such file, it is of another kind, damaged, or not safe to read.
    """
    if not checked:
        check(path)
    if path.is_dir():
        try:
            return open_group(path)
        except (FileNotFoundError, ValueError):
            raise UserError(f"{path}: is not an AnnData Zarr store or h5ad file") from None
    with explain_damage(path):
        return h5py.File(path, "r", rdcc_nbytes=cache)


def check(path: Path) -> None:
    """Refuse an HDF5 file or a Zarr folder that is not there, damaged in its structure, or not safe to read.

    Raises
    ------
    UserError
        In one line that names the file and the place in it.
    """
    if files.existing(path, "input").is_dir():
        check_zarr(path)
    else:
        check_hdf5(path)


def read_npz(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Return arrays of an npz file, after a look at the sizes that it declares.

    Raises
    ------
    UserError
        If it unpacks to far more than it has bytes, or an array declares more than it holds.
    KeyError
        If one is not there.
    ValueError, OSError, zipfile.BadZipFile
        If the file is damaged or holds pickled objects.
    """
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        wanted = [members[name] for name in names]
        most = max(_UNPACKED_AT_LEAST, _UNPACKED_TIMES * path.stat().st_size)
        if sum(info.file_size for info in wanted) > most:
            raise UserError(f"{path}: unpacks to more than {_UNPACKED_TIMES} times its size; write it again")
        for info in wanted:
            with archive.open(info) as handle:
                shape, dtype = _header(handle)
            if not dtype.hasobject and math.prod(shape) * dtype.itemsize > info.file_size:
                raise UserError(f"{path}: {info.filename} declares more values than it holds; write it again")
    with np.load(path, allow_pickle=False) as found:
        return [found[name] for name in names]


def _header(handle: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of the array in an open ``.npy`` file."""
    version = npy.read_magic(handle)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(handle)
    return shape, dtype
