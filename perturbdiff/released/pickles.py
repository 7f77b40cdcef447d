"""Reads pickles of other people without running anything in them.

A pickle names functions that are called when it is read. Here, every name is looked up in a fixed table of plain
containers and inert stand-ins. A name that is not in the table stops the reading. Configuration containers, array
scalars, loggers and types become dicts, lists, strings, numbers and None. Neither omegaconf nor lightning is imported.
"""

from __future__ import annotations

import collections
import io
import itertools
import math
import pickle
import pickletools
import re
import struct
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError

_DAMAGED = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, EOFError, OSError, RuntimeError, ArithmeticError,
    AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError,
)  # fmt: skip

_NESTED = "it is nested deeper or holds more than weights and settings do"
_LARGEST_PICKLE = 1 << 26  # bytes, settings and dictionaries of labels have a few megabytes
_MOST_STEPS = 4_000_000
_DEEPEST = 64
_MOST_VALUES = 20_000_000  # a value counts each time that it is referenced


class Refused(Exception):
    """A pickle names something that is not in the table."""


class _TooMuch(Exception):
    """A pickle asks for more than weights and settings need."""


class _Inert:
    """Keeps its arguments and does nothing else."""

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Container(_Inert):
    """A dict or list of omegaconf."""


class _Node(_Inert):
    """A value of omegaconf."""


class _Dtype(_Inert):
    """A numpy dtype, by its code."""


def plain(value: Any) -> Any:
    """Return a value with stand-ins replaced by their contents.

    Raises
    ------
    UserError
        If it is nested too deep or too large. A list can contain itself.
    """
    try:
        return _plain(value, 0, itertools.count())
    except (_TooMuch, TypeError) as error:
        raise UserError(f"what the pickle holds cannot be read: {error}") from None


def _plain(value: Any, depth: int, counted: Iterator[int]) -> Any:
    if depth > _DEEPEST or next(counted) > _MOST_VALUES:
        raise _TooMuch(_NESTED)
    depth += 1
    state = getattr(value, "state", None)
    if isinstance(value, _Container):
        return _plain(state.get("_content"), depth, counted) if isinstance(state, dict) else None
    if isinstance(value, _Node):
        return _plain(state.get("_val"), depth, counted) if isinstance(state, dict) else None
    if isinstance(value, _Inert):
        return None
    if isinstance(value, dict):
        return {_plain(key, depth, counted): _plain(item, depth, counted) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth, counted) for item in value]
    if isinstance(value, str | int | float | bool | set | Tensor) or value is None:
        return value
    return None


def read_torch(path: Path) -> dict[str, Any]:
    """Read a file of ``torch.save``. Tensors stay on disk until they are used.

    Raises
    ------
    UserError
        If it is not such a file, is damaged, or names a function or class that is not needed for weights and
        settings. Nothing in the file has been run then.
    """
    files.existing(path, "checkpoint")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: not a checkpoint of torch.save (zip format); damaged, or of another kind")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(Path(entry.filename).name == "constants.pkl" for entry in entries):
            raise UserError(f"{path}: a TorchScript program, not weights; it is not run")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UserError(f"{path}: compressed afterwards; read it with torch and save it again")
        _check_archive(path, entries)
        # weights_only refuses these files because of their settings, and torch has no other safe way to read them.
        # Only the stand-ins in `_table` are called, never a function that the file chooses.
        content = torch.load(
            str(path), map_location="cpu", mmap=True, weights_only=False, pickle_module=_module()
        )
    except Refused as error:
        raise _refusal(path, error) from None
    except _TooMuch as error:
        raise UserError(f"{path}: refused, {error}") from None
    except _DAMAGED as error:
        raise UserError(f"{path}: damaged or not a checkpoint ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not a checkpoint")
    return content


def read_pickle(path: Path) -> Any:
    """Read a pickle of plain containers, strings and numbers.

    Raises
    ------
    UserError
        As `read_torch`.
    """
    if files.existing(path, "file").stat().st_size > _LARGEST_PICKLE:
        raise UserError(f"{path}: larger than any list of genes")
    try:
        return plain(_unpickler()(io.BytesIO(path.read_bytes())).load())
    except Refused as error:
        raise _refusal(path, error) from None
    except _TooMuch as error:
        raise UserError(f"{path}: refused, {error}") from None
    except _DAMAGED as error:
        raise UserError(f"{path}: damaged or not a pickle ({type(error).__name__})") from None


def _check_archive(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse an archive with wrong places or sizes of entries."""
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: refused, two entries of one name")
    for name in names:
        if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or "\0" in name:
            raise UserError(f"{path}: refused, an entry names a place outside the archive: {name[:80]!r}")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise UserError(f"{path}: refused, its entries are said to be larger than the file")
    for entry in entries:
        if entry.filename.endswith(".pkl") and entry.file_size > _LARGEST_PICKLE:
            raise UserError(f"{path}: refused, its settings are larger than any that are known")


def check_steps(data: bytes) -> None:
    """Refuse a pickle that would exhaust the stack or the memory, without running it.

    Every step is simulated on a stack of the depth and the number of values of each value. A value counts each time
    that it is referenced. This is needed because Python hashes a tuple that is a key to any depth.

    Raises
    ------
    _TooMuch
        If it is nested too deep, holds too many values, takes too many steps or uses too large memory numbers.
    ValueError
        If it is not a pickle.
    """
    if len(data) > _LARGEST_PICKLE:
        raise _TooMuch(_NESTED)
    stack: list[list[int] | None] = []  # of each value its depth and number of values, None: a mark
    memory: dict[int, list[int]] = {}
    for steps, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if steps > _MOST_STEPS:
            raise _TooMuch(_NESTED)
        if name == "MARK":
            stack.append(None)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memory) if name == "MEMOIZE" else int(argument)  # pyright: ignore[reportArgumentType]
            if place > steps:
                raise _TooMuch("it numbers what it remembers by more than it has")
            memory[place] = _top(stack)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            if argument not in memory:
                raise ValueError("a value that was never remembered")
            stack.append(memory[argument])
        elif name == "POP":
            stack.pop()
        else:
            _take(stack, opcode)


def _take(stack: list[list[int] | None], opcode: pickletools.OpcodeInfo) -> None:
    """Apply a step to the stack. The values that it takes become part of the value that it returns."""
    needed = len([kind for kind in opcode.stack_before if kind.name not in ("mark", "stackslice")])
    taken: list[list[int]] = []
    if pickletools.markobject in opcode.stack_before:
        while (value := stack.pop()) is not None:
            taken.append(value)
        needed = opcode.stack_before.index(pickletools.markobject)
    for _ in range(needed):
        taken.append(_top(stack))
        stack.pop()
    if not opcode.stack_after:
        return
    if opcode.name == "DUP":
        stack += [taken[0], taken[0]]
        return
    depth = 1 + max((value[0] for value in taken), default=0)
    number = 1 + sum(value[1] for value in taken)
    if depth > _DEEPEST or number > _MOST_VALUES:
        raise _TooMuch(_NESTED)
    grown = opcode.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
    if grown and taken:  # the same container may also be in the memory
        container = taken[-1]
        container[0] = max(container[0], 1 + max((value[0] for value in taken[:-1]), default=0))
        container[1] = number
        stack.append(container)
    else:
        stack.append([depth, number])


def _top(stack: list[list[int] | None]) -> list[int]:
    if not stack or stack[-1] is None:
        raise ValueError("nothing there to take")
    return stack[-1]


def _refusal(path: Path, error: Refused) -> UserError:
    return UserError(
        f"{path}: refused, it asks to load '{error}', which weights and settings do not need; nothing was run"
    )


def _module() -> Any:
    """Return the stand-in for the module ``pickle`` in ``torch.load``."""
    return types.SimpleNamespace(Unpickler=_unpickler(), __name__="restricted_pickle")


def _unpickler() -> type[pickle.Unpickler]:
    table = _table()

    class Unpickler(pickle.Unpickler):
        def __init__(self, file: Any, **options: Any) -> None:
            data = file.read()
            check_steps(data)  # checked here, so that the checked bytes are those that are read
            super().__init__(io.BytesIO(data), **options)

        def find_class(self, module_name: str, global_name: str) -> Any:
            stand_in = table.get(f"{module_name.replace('__builtin__', 'builtins')}.{global_name}")
            if stand_in is None:
                raise Refused(f"{module_name}.{global_name}")
            return stand_in

    return Unpickler


def _table() -> dict[str, Callable[..., Any]]:
    """Return the names that a pickle may use. They are made anew, so that no file can change those of another."""
    node, container, inert, dtype = (type(c.__name__, (c,), {}) for c in (_Node, _Container, _Inert, _Dtype))

    def encode(text: str, coding: str = "latin1") -> bytes:
        if coding not in ("latin1", "latin-1"):
            raise ValueError(coding)
        return text.encode("latin1")

    def nothing(*_: Any) -> None:
        return None

    def scalar(kind: Any, raw: bytes) -> str | int | float | bool:
        return _scalar(kind, raw)

    def tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
        if not isinstance(storage, torch.storage.TypedStorage):
            raise TypeError("storage")
        if math.prod(map(int, size)) > len(storage):
            raise ValueError("a tensor of more values than are stored")
        empty = torch.empty(0, dtype=storage.dtype)
        return empty.set_(storage._untyped_storage, int(offset), tuple(size), tuple(stride))

    def parameter(data: Tensor, *_: Any) -> Tensor:
        return data

    containers = (collections.OrderedDict, collections.defaultdict)
    builtin = (dict, list, set, frozenset, tuple, str, int, float, bool)
    names: dict[str, Callable[..., Any]] = {f"builtins.{kind.__name__}": kind for kind in builtin}
    names |= {f"collections.{kind.__name__}": kind for kind in containers}
    names |= {
        f"omegaconf.nodes.{kind}Node": node for kind in ("Any", "String", "Integer", "Float", "Boolean")
    }
    names |= {f"omegaconf.base.{kind}": inert for kind in ("Metadata", "ContainerMetadata")}
    return names | {
        "builtins.long": int,
        "builtins.unicode": str,
        "omegaconf.dictconfig.DictConfig": container,
        "omegaconf.listconfig.ListConfig": container,
        "_codecs.encode": encode,
        "logging.getLogger": nothing,
        "typing.Any": inert,
        "numpy.dtype": dtype,
        "numpy.core.multiarray.scalar": scalar,
        "numpy._core.multiarray.scalar": scalar,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_parameter": parameter,
    }


def _scalar(kind: Any, raw: bytes) -> str | int | float | bool:
    """Return a numpy scalar of text or number as Python's own."""
    code = kind.arguments[0] if isinstance(kind, _Dtype) and kind.arguments else None
    if not isinstance(code, str) or not isinstance(raw, bytes):
        raise TypeError("scalar")
    if code[:1] == "U":
        order = kind.state[1] if isinstance(kind.state, tuple | list) and len(kind.state) > 1 else "<"
        return raw.decode("utf-32-be" if order == ">" else "utf-32-le").rstrip("\0")
    if code in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"):
        return np.frombuffer(raw, np.dtype(code).newbyteorder("<"), count=1)[0].item()
    raise TypeError("scalar")


def tensors(content: Mapping[str, Any], key: str) -> dict[str, Tensor]:
    """Return the tensors of one entry of a checkpoint by name. Empty if there is no such entry."""
    entry = content.get(key)
    if not isinstance(entry, Mapping):
        return {}
    return {str(name): value for name, value in entry.items() if isinstance(value, Tensor)}
