"""Opens files that others made (h5ad and 10x h5, Zarr folders, npz) after checking them: no value is read before."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import signal
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5l, h5o, h5s, h5t  # pyright: ignore[reportAttributeAccessIssue]
from h5py._objects import phil
from numpy.lib import format as npy

from perturbdiff.io.damage import explain_damage
from perturbdiff.io.tenx_folder import is_tenx_folder, open_tenx_folder
from perturbdiff.io.token_parquet import TokenParquet, is_token_parquet
from perturbdiff.io.zarr_check import check_zarr, open_group
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MUDATA_HEAD = 512  # bytes of text before the signature of a MuData file
_SECONDS = 4  # of processor time; waiting for a slow disk does not count
_BYTES_PER_SECOND = 20 << 20  # a large file has more texts and pieces
_MEMORY = 2 << 30  # bytes beside what the parent holds
_LARGEST_CHUNK = 2 << 30
_MATRICES = ("X", "raw/X", "layers", "obsm")
_FREE = ("obsp", "varm", "varp", "uns")  # never read whole
_TEXTS_PER_READ = 1 << 16
_FEW_TEXTS = 4096
_NEIGHBOURS = 16  # texts that lie in one piece of the heap, which is read as a whole
_VALUES = ("data", "indices")
_MOST_TEXT = 4000


def check_hdf5(path: Path) -> None:
    """Refuse a file that reads from other files, that is damaged in its structure, or that declares what it lacks.

    Raises
    ------
    UserError
        In one line that names the file and the place in it.
    """
    if path.stat().st_size == 0:
        raise UserError(f"{path}: is empty (0 bytes); copy or make the file again")
    with path.open("rb") as handle:
        begin = handle.read(_MUDATA_HEAD + len(_SIGNATURE))
        head = _MUDATA_HEAD if begin.startswith(b"MuData") else 0
        if begin[head : head + len(_SIGNATURE)] != _SIGNATURE:
            raise UserError(f"{path}: is not an h5ad file (no HDF5 signature); give h5ad, zarr or 10x h5")
    facts = path.stat()
    if fault := _fault(path.resolve(), facts.st_size, facts.st_mtime_ns):
        raise UserError(f"{path}: {fault}")


@functools.lru_cache(maxsize=64)
def _fault(path: Path, size: int, changed: int) -> str:
    """Return what is wrong with a file of this size and time; one that is opened again is not checked again."""
    del size, changed
    return _in_child(path)


def _in_child(path: Path) -> str:
    """Return what is wrong with a file; a child process looks, which a crash of the library may end."""
    readable, writable = os.pipe()
    with phil:  # no other thread is within the library while its state is copied
        child = os.fork()
    if child == 0:
        _answer(path, readable, writable)
    os.close(writable)
    try:
        with os.fdopen(readable, "rb") as pipe:
            answer = pipe.read(_MOST_TEXT)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGXCPU:
            return _damaged("the HDF5 library does not finish reading its structure")
        return _damaged("the HDF5 library crashes on it")
    if os.WEXITSTATUS(status):
        return _damaged("its structure cannot be read")
    return answer.decode(errors="replace")


def _answer(path: Path, readable: int, writable: int) -> None:
    """Run in the child: write what is wrong to the pipe, and end without touching what it has from its parent."""
    code = 1
    try:
        os.close(readable)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # a crashing library would print a second message
            os.dup2(nothing, stream)
        _limit(path.stat().st_size)
        try:
            fault = _Walk(path).fault()
        except Exception as error:  # noqa: BLE001  a damaged file raises anything
            fault = _damaged(" ".join(str(error).split()) or type(error).__name__)
        os.write(writable, fault.encode(errors="replace")[:_MOST_TEXT])
        code = 0
    finally:
        os._exit(code)


def _limit(size: int) -> None:
    with open("/proc/self/statm", "rb") as handle:  # noqa: PTH123
        used = int(handle.read().split()[0]) * resource.getpagesize()
    seconds = _SECONDS + size // _BYTES_PER_SECOND
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: used + _MEMORY}
    for kind, limit in wanted.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))


class _Walk:
    """Visits all links, groups and data sets of a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, path.stat().st_size
        self._file = h5py.File(path, "r")
        self._seen: set[int] = set()
        self._extents: list[np.ndarray] = []

    def fault(self) -> str:
        """Return the first thing that is wrong, or an empty text."""
        root = self._file.id
        _read_attributes(root)
        stopped = root.links.visit(self._link, info=True)
        return self._overlap() if stopped is None else str(stopped)

    def _link(self, name: bytes, link: Any) -> str | None:
        place = _shown(name)
        if link.type == h5l.TYPE_SOFT:
            return None  # leads to a link of this file, which is looked at as well
        if link.type != h5l.TYPE_HARD:
            return (
                f"'{place}' is a link to another file, which is not followed; write the file again with the values "
                "in it"
            )
        element: Any = h5o.open(self._file.id, name)
        address = h5o.get_info(element).addr
        if address in self._seen:
            return None
        self._seen.add(address)
        _read_attributes(element)
        return self._data_set(element, place) if isinstance(element, h5d.DatasetID) else None

    def _data_set(self, data_set: Any, place: str) -> str | None:
        """Return what is wrong with a data set."""
        plan = data_set.get_create_plist()
        layout = plan.get_layout()
        if layout == h5d.VIRTUAL or plan.get_external_count():
            return (
                f"'{place}' takes its values from other files, which are not read; write the file again with the "
                "values in it"
            )
        if data_set.get_space().get_simple_extent_type() != h5s.SIMPLE:
            return None
        shape, item = data_set.shape, self._item(data_set.get_type())
        matrix = place.startswith(_MATRICES) or place.rpartition("/")[2] in _VALUES
        if not matrix and not place.startswith(_FREE) and shape[0] > self._size:
            return f"'{place}' declares {shape[0]} entries, more than the file has bytes ({self._size})"
        if (
            _is_text(data_set.get_type())
            and shape[0] <= self._size
            and (fault := self._texts(data_set, place))
        ):
            return fault
        if layout == h5d.CONTIGUOUS:
            return self._contiguous(data_set, place, math.prod(shape) * item)
        if layout == h5d.CHUNKED:
            return self._chunked(data_set, place, shape, plan, item)
        return None

    def _item(self, kind: Any) -> int:
        """Return the bytes that a value takes in the data set itself; texts of any length lie elsewhere."""
        return 8 + self._file.id.get_create_plist().get_sizes()[0] if _is_text(kind) else kind.get_size()

    def _texts(self, data_set: Any, place: str) -> str:
        """Read texts once: on a damaged heap, where they lie, the library can run without end."""
        texts = h5py.Dataset(data_set)
        step = 1 if len(texts) <= _FEW_TEXTS else _NEIGHBOURS
        try:
            for start in range(0, len(texts), _TEXTS_PER_READ):
                texts[start : start + _TEXTS_PER_READ : step]
        except Exception as error:  # noqa: BLE001  a damaged file raises anything
            return "" if place.startswith(_FREE) else _damaged(f"'{place}': {' '.join(str(error).split())}")
        return ""

    def _contiguous(self, data_set: Any, place: str, size: int) -> str | None:
        if size == 0 or place.startswith(_FREE):
            return None
        begin = data_set.get_offset()
        if data_set.get_storage_size() < size or begin is None or begin + size > self._size:
            return _lacking(place)
        self._extents.append(np.array([[begin, size]], np.int64))
        return None

    def _chunked(self, data_set: Any, place: str, shape: tuple[int, ...], plan: Any, item: int) -> str | None:
        chunk = plan.get_chunk()
        size = math.prod(chunk) * item
        if size > _LARGEST_CHUNK:
            return f"'{place}' is stored in pieces of {size / 2**30:.1f} GiB; write it again in smaller ones"
        grid = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
        if place.startswith(_FREE):
            return None
        if data_set.get_num_chunks() != math.prod(grid):
            return _lacking(place)
        stored: list[Any] = []
        data_set.chunk_iter(stored.append)
        if not stored:
            return None
        corners = np.array([s.chunk_offset for s in stored], np.int64) // np.array(chunk, np.int64)
        known = (corners < grid).all() and len(np.unique(np.ravel_multi_index(corners.T, grid))) == len(
            stored
        )
        extents = np.array([(s.byte_offset, s.size) for s in stored], np.int64)
        left_out = np.array([s.filter_mask for s in stored]) != 0
        sizes = extents[:, 1]
        # a chunk that no filter made smaller is stored as it is, perhaps with a checksum
        plain = (sizes == size) | (sizes == size + 4)
        bounds = (sizes > size + size // 8 + 4096).any() or (left_out & ~plain).any()
        if plan.get_nfilters() == 0:
            bounds |= bool((sizes != size).any())
        if len(stored) != math.prod(grid) or not known or bounds or (extents.sum(1) > self._size).any():
            return _lacking(place)
        self._extents.append(extents)
        return None

    def _overlap(self) -> str:
        """Say if two pieces of data overlap, which means that an address is wrong."""
        if not self._extents:
            return ""
        every = np.concatenate(self._extents)
        every = every[np.argsort(every[:, 0], kind="stable")]
        if (every[:-1].sum(1) > every[1:, 0]).any():
            return _damaged("two of its pieces overlap")
        return ""


def _read_attributes(element: Any) -> None:
    """Read all attributes of an object once; one that cannot be read is an error only where it is used."""
    for name in h5py.AttributeManager(_Holder(element)):  # type: ignore[arg-type]
        with contextlib.suppress(OSError, TypeError, ValueError, KeyError, RuntimeError):
            h5py.AttributeManager(_Holder(element))[name]  # type: ignore[arg-type]


class _Holder:
    """What h5py needs to read the attributes of an object."""

    def __init__(self, element: Any) -> None:
        self.id = element


def _is_text(kind: Any) -> bool:
    """Return whether the values are texts of any length, which are stored apart from the data set."""
    return kind.get_class() == h5t.VLEN or (kind.get_class() == h5t.STRING and kind.is_variable_str())


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _lacking(place: str) -> str:
    return _damaged(f"'{place}' lacks some of its values, which would be read as zeros")


def _damaged(reason: str) -> str:
    return f"cannot be read, it is damaged or incomplete ({reason}); copy or make the file again"


_UNPACKED_AT_LEAST, _UNPACKED_TIMES = 64 << 20, 100


def open_root(path: Path, *, cache: int = 0, checked: bool = False) -> Any:
    """Open an HDF5 file, a Zarr folder, a 10x folder or Parquet files of cells for reading.

    Parameters
    ----------
    path
        The file or folder.
    cache
        Bytes of HDF5's own cache of decoded chunks. A pass from the first row to the last needs none.
    checked
        Whether the same run has checked it already, in another process.

    Returns
    -------
    h5py.File, zarr.Group, TokenParquet or mapping
        The root. A 10x folder has the form of a 10x h5 file.

    Raises
    ------
    UserError
        If there is no such file, it is of another kind, damaged, or not safe to read.
    """
    if is_tenx_folder(files.existing(path, "input")):
        return open_tenx_folder(path)
    if is_token_parquet(path):
        return TokenParquet(path)
    if not checked:
        check(path)
    with explain_damage(path):
        if not path.is_dir():
            return h5py.File(path, "r", rdcc_nbytes=cache)
        try:
            return open_group(path)
        except (FileNotFoundError, ValueError):
            raise UserError(f"{path}: is not an AnnData Zarr store or h5ad file") from None


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
    with np.load(path, allow_pickle=False) as arrays:
        return [arrays[name] for name in names]


def _header(handle: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of the array in an open ``.npy`` file."""
    version = npy.read_magic(handle)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(handle)
    return shape, dtype
