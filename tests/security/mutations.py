"""Ways to damage a file: by its bytes, by what its format means, and by what lies in its place."""

from __future__ import annotations

import io
import json
import os
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Random = random.Random


class NotPossible(Exception):
    """This file cannot be damaged in this way."""


# Bytes ------------------------------------------------------------------------------------------------------------


def flip_bits(data: bytearray, rng: Random) -> str:
    """Flip one to four bits."""
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    return f"bits of bytes {places}"


def zero_range(data: bytearray, rng: Random) -> str:
    """Put zeros in place of a range."""
    start, length = _range(data, rng)
    data[start : start + length] = bytes(length)
    return f"{length} zeros at {start}"


def truncate(data: bytearray, rng: Random) -> str:
    """Keep the beginning only."""
    kept = rng.choice((0, 1, len(data) - 1, rng.randrange(len(data))))
    del data[kept:]
    return f"cut to {kept} bytes"


def swap_blocks(data: bytearray, rng: Random) -> str:
    """Exchange two blocks of equal length."""
    length = min(rng.choice((4, 16, 64, 512)), len(data) // 2)
    first = rng.randrange(len(data) - 2 * length + 1)
    second = rng.randrange(first + length, len(data) - length + 1)
    one, other = data[first : first + length], data[second : second + length]
    data[first : first + length], data[second : second + length] = other, one
    return f"{length} bytes at {first} and {second} swapped"


def insert_bytes(data: bytearray, rng: Random) -> str:
    """Put random bytes in between."""
    place, more = rng.randrange(len(data) + 1), rng.randbytes(rng.choice((1, 2, 8, 100)))
    data[place:place] = more
    return f"{len(more)} bytes inserted at {place}"


def remove_bytes(data: bytearray, rng: Random) -> str:
    """Leave a few bytes out."""
    start, length = _range(data, rng)
    del data[start : start + length]
    return f"{length} bytes left out at {start}"


def random_range(data: bytearray, rng: Random) -> str:
    """Put random bytes in place of a range."""
    start, length = _range(data, rng)
    data[start : start + length] = rng.randbytes(length)
    return f"{length} random bytes at {start}"


def _range(data: bytearray, rng: Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(rng.choice((1, 4, 8, 64, 512, 4096)), len(data) - start)


BYTES = (flip_bits, flip_bits, zero_range, truncate, swap_blocks, insert_bytes, remove_bytes, random_range)

# Places -----------------------------------------------------------------------------------------------------------


def delete(path: Path, rng: Random) -> str:
    """Delete it."""
    path.unlink()
    return "deleted"


def put_folder(path: Path, rng: Random) -> str:
    """Put a folder in its place."""
    path.unlink()
    path.mkdir()
    return "a folder in its place"


def put_dangling_link(path: Path, rng: Random) -> str:
    """Put a link in its place that leads nowhere."""
    path.unlink()
    path.symlink_to("nowhere")
    return "a link to nowhere in its place"


def put_ring(path: Path, rng: Random) -> str:
    """Put a link to itself in its place."""
    path.unlink()
    path.symlink_to(path.name)
    return "a link to itself in its place"


def put_pipe(path: Path, rng: Random) -> str:
    """Put a pipe in its place, that nobody writes to."""
    path.unlink()
    os.mkfifo(path)
    return "a pipe in its place"


def empty(path: Path, rng: Random) -> str:
    """Empty it."""
    path.write_bytes(b"")
    return "emptied"


def put_other(path: Path, rng: Random) -> str:
    """Put a file of another format in its place."""
    name, content = rng.choice(
        (
            ("text", b"perturbation,cell_type\np1,B\n"),
            ("JSON", b"{}"),
            ("a list", b"[1, 2]"),
            ("a zip", b"PK\x05\x06" + bytes(18)),
            ("a gzip", b"\x1f\x8b\x08\x00" + bytes(40)),
            ("an empty HDF5", _empty_h5()),
            ("an empty parquet", _empty_parquet()),
        )
    )
    path.write_bytes(content)
    return f"{name} in its place"


def _empty_h5() -> bytes:
    buffer = io.BytesIO()
    h5py.File(buffer, "w").close()
    return buffer.getvalue()


def _empty_parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({}), buffer)
    return buffer.getvalue()


PLACE_SHARE = 0.12

PLACES = (delete, put_folder, put_dangling_link, put_ring, put_pipe, empty, put_other)

# Text formats -----------------------------------------------------------------------------------------------------

_NESTED: Any = 1
for _ in range(60):
    _NESTED = [_NESTED]

ODD_VALUES: tuple[Any, ...] = (
    float("nan"),
    float("inf"),
    1e18,
    10**30,
    -1,
    0,
    0.5,
    1e-320,
    True,
    None,
    "",
    "x",
    "../../../etc/passwd",
    "=1+1",
    "<script>",
    "a\nb",
    "\u202eabc",
    "\x00",
    "é" * 300,
    [],
    {},
    [1, 2, 3],
    {"a": {"b": 1}},
    _NESTED,
)


def edit_json(path: Path, rng: Random) -> str:
    """Put an odd value in place of one, or remove, rename or double a key."""
    try:
        tree = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise NotPossible from error
    spots = list(_spots(tree))
    if not spots:
        raise NotPossible
    holder, key = rng.choice(spots)
    how = rng.choice(("value", "value", "value", "remove", "rename", "number"))
    if how == "number":
        numbers = [s for s in spots if isinstance(s[0][s[1]], int | float)]
        holder, key = rng.choice(numbers or spots)
        value = holder[key]
        holder[key] = value + rng.choice((1, -1, 1e6)) if isinstance(value, int | float) else 7
        said = f"{key!r}: {value!r} becomes {holder[key]!r}"
    elif how == "value":
        value = rng.choice(ODD_VALUES)
        holder[key] = value
        said = f"{key!r} becomes {_short(value)}"
    elif how == "remove" or isinstance(holder, list):
        del holder[key]
        said = f"{key!r} removed"
    else:
        holder["other"] = holder.pop(key)
        said = f"{key!r} renamed"
    path.write_text(json.dumps(tree, indent=2))
    return said


def double_key(path: Path, rng: Random) -> str:
    """Give one key of a JSON object twice."""
    text = path.read_text()
    found = list(re.finditer(r'"[^"\n]+": ("[^"\n]*"|[0-9.eE+-]+)', text))
    if not found:
        raise NotPossible
    one = rng.choice(found)
    key = one.group(0).split(":")[0]
    path.write_text(text[: one.start()] + f"{key}: 1, " + text[one.start() :])
    return f"{key} twice"


def nest_deeply(path: Path, rng: Random) -> str:
    """Put 100,000 brackets in place of the content."""
    path.write_text("[" * 100_000 + "]" * 100_000)
    return "100,000 brackets in its place"


def _spots(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _spots(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}…"


ODD_WORDS = (
    ".nan",
    "nan",
    ".inf",
    "-.inf",
    "inf",
    "1e18",
    "-1",
    "-1e18",
    "0",
    "0.5",
    "99999999999999999999999999",
    "true",
    "null",
    '""',
    "[]",
    "{}",
    "[1, [2, [3]]]",
    "'a: b'",
    "../../etc/passwd",
    "=1+1",
    "<b>x</b>",
    "1:30",
    "0x10",
    "2024-01-01",
    "!!python/object/apply:os.system [id]",
    "!!binary aGFsbG8=",
    "!other 3",
    "*a",
    "&a [*a]",
    "\u202eabc",
    "\x00",
    "é" * 300,
)


def edit_line(path: Path, rng: Random) -> str:
    """Double, drop, indent or swap lines, or put an odd word in place of a value."""
    lines = path.read_text().splitlines()
    if not lines:
        raise NotPossible
    number = rng.randrange(len(lines))
    how = rng.choice(("double", "drop", "indent", "swap", "word", "word", "word", "word", "bracket"))
    if how == "double":
        lines.insert(number, lines[number])
    elif how == "drop":
        del lines[number]
    elif how == "indent":
        lines[number] = rng.choice(("  ", "\t", "    ")) + lines[number]
    elif how == "swap":
        other = rng.randrange(len(lines))
        lines[number], lines[other] = lines[other], lines[number]
    elif how == "bracket":
        lines[number] += rng.choice(("[", "{", '"', "'", "]", ": :", " # x", ",", "\\"))
    else:
        key, sign, _ = re.match(r"^([^:=,]*)([:=,]?)(.*)$", lines[number]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        lines[number] = f"{key}{sign or ':'} {rng.choice(ODD_WORDS)}"
    path.write_text("\n".join(lines) + "\n")
    return f"line {number + 1}: {how}: {_short(lines[number]) if number < len(lines) else ''}"


def alias_bomb(path: Path, rng: Random) -> str:
    """Put aliases of aliases before the content: a few lines that stand for 10**9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for k in range(1, 9):
        ten = ", ".join([f"*a{k - 1}"] * 10)
        lines.append(f"a{k}: &a{k} [{ten}]")
    path.write_text("\n".join(lines) + "\n" + path.read_text())
    return "aliases of aliases"


def deep_keys(path: Path, rng: Random) -> str:
    """Add a key of 50,000 dotted parts, or as many brackets."""
    sign = "=" if path.suffix == ".toml" else ":"
    more = rng.choice((".".join("a" * 50_000) + f" {sign} 1", f"a {sign} " + "[" * 50_000 + "]" * 50_000))
    path.write_text(f"{more}\n{path.read_text()}")
    return "a key of great depth"


def edit_cell(path: Path, rng: Random) -> str:
    """Put an odd word in place of a cell of a CSV, or drop or double a column."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    if not rows:
        raise NotPossible
    how = rng.choice(("cell", "cell", "cell", "drop", "double", "name"))
    column = rng.randrange(len(rows[0]))
    if how == "cell":
        number = rng.randrange(len(rows))
        word = rng.choice((*ODD_WORDS, '"', "a\nb", "-0", "1e400", "−1"))
        rows[number][min(column, len(rows[number]) - 1)] = word
        said = f"row {number}, column {column} becomes {_short(word)}"
    elif how == "name":
        rows[0][column] = rng.choice(rows[0])
        said = f"column {column} named {rows[0][column]}"
    else:
        for row in rows:
            if column < len(row):
                row[column : column + 1] = [] if how == "drop" else [row[column]] * 2
        said = f"column {column}: {how}"
    path.write_text("\n".join(map(",".join, rows)) + "\n")
    return said


# Parquet ----------------------------------------------------------------------------------------------------------


def edit_parquet(path: Path, rng: Random) -> str:
    """Drop, retype, rename or swap columns, or drop, double, empty or change rows."""
    table = pq.read_table(path)
    names = table.column_names
    if not names or not len(table):
        raise NotPossible
    name = rng.choice(names)
    place = names.index(name)
    how = rng.choice(("drop", "text", "rename", "rows", "double", "null", "value", "value", "empty", "bytes"))
    if how == "drop":
        table = table.drop_columns([name])
    elif how == "rename":
        table = table.rename_columns([f"{n}_" if n == name else n for n in names])
    elif how == "rows":
        table = table.slice(0, rng.randrange(len(table)))
    elif how == "double":
        table = pa.concat_tables([table, table.slice(rng.randrange(len(table)), 1)])
    elif how == "empty":
        table = table.slice(0, 0)
    else:
        values = table.column(place).to_pylist()
        if how == "text":
            values = [None if v is None else str(v) for v in values]
        elif how == "bytes":
            values = [b"\xff\x00"] * len(values)
        else:
            values[rng.randrange(len(values))] = None if how == "null" else _other_value(values[0], rng)
        try:
            column = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise NotPossible from error
        table = table.set_column(place, name, column)
    pq.write_table(table, path)
    return f"column {name}: {how}"


def _other_value(value: Any, rng: Random) -> Any:
    if isinstance(value, str):
        return rng.choice(("x", "", "p1", "train", "test", "=1+1", "<script>", "../..", "a\nb"))
    if isinstance(value, float):
        return rng.choice((float("nan"), float("inf"), -1.0, 1e18, 0.25))
    return rng.choice((-1, 0, 1, 7, 2**40))


# HDF5 -------------------------------------------------------------------------------------------------------------


def edit_h5(path: Path, rng: Random) -> str:
    """Remove, retype, reshape or replace an object of an HDF5 file, or an attribute."""
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        if not names:
            raise NotPossible
        name = rng.choice(names)
        how = rng.choice(
            (
                "remove",
                "no attribute",
                "attribute",
                "type",
                "text",
                "shape",
                "fill",
                "group",
                "link",
                "external",
            )
        )
        found, holder = file[name], file[name].parent
        last = name.rsplit("/", 1)[-1]
        if how in ("no attribute", "attribute"):
            owner = rng.choice([o for o in (found, file) if len(o.attrs)] or [None])
            if owner is None:
                raise NotPossible
            attribute = rng.choice(list(owner.attrs))
            if how == "attribute":
                owner.attrs[attribute] = rng.choice(("x", "array", -1, 1e18, [1, 2, 3], b"\xff\xfe"))
            else:
                del owner.attrs[attribute]
            return f"{owner.name}: {how} {attribute}"
        if how in ("type", "text", "shape", "fill"):
            if not isinstance(found, h5py.Dataset):
                raise NotPossible
            values, attributes = found[()], dict(found.attrs)
            replaced = _other_array(values, how, rng)
            del holder[last]
            try:
                made = holder.create_dataset(last, data=replaced)
            except TypeError as error:
                raise NotPossible from error
            made.attrs.update({k: v for k, v in attributes.items() if not isinstance(v, h5py.Reference)})
            return f"{name}: {how} {getattr(replaced, 'dtype', type(replaced))} {np.shape(replaced)}"
        del holder[last]
        if how == "group":
            holder.create_group(last)
        elif how == "link":
            holder[last] = h5py.SoftLink(rng.choice((f"/{rng.choice(names)}", "/nowhere", f"/{name}")))
        elif how == "external":
            holder[last] = h5py.ExternalLink(rng.choice(("other.h5ad", "/etc/passwd", path.name)), f"/{name}")
    return f"{name}: {how}"


def _other_array(values: Any, how: str, rng: Random) -> Any:
    if how == "text":
        return np.array(["x"] * max(1, np.size(values)), dtype=h5py.string_dtype())
    if how == "type":
        kind = rng.choice(("f8", "f4", "i8", "i2", "u1", "b1", "c8"))
        if np.asarray(values).dtype.kind not in "iufb":
            return np.arange(np.size(values)).astype(kind)
        with np.errstate(all="ignore"):
            return np.asarray(values).astype(kind)
    if how == "shape":
        array = np.asarray(values)
        return rng.choice((array.reshape(-1)[:-1], array.reshape(1, -1), array.reshape(-1)[:0]))
    if np.asarray(values).dtype.kind not in "iuf":
        return values
    filler = rng.choice((float("nan"), float("inf"), -1, 0, 1e18, 2**31 - 1))
    array = np.array(values).reshape(-1)
    if array.dtype.kind in "iu" and not np.isfinite(filler):
        array = array.astype("f8")
    chosen = rng.choice((slice(None), rng.randrange(max(1, len(array)))))
    with np.errstate(all="ignore"):
        array[chosen] = np.asarray(filler, "f8").astype(array.dtype)
    return array.reshape(np.shape(values))


# Weights ----------------------------------------------------------------------------------------------------------


def edit_safetensors(path: Path, rng: Random) -> str:
    """Change the header: a type, a shape, offsets, a name, or its length; or a weight."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = rng.choice([n for n in header if n != "__metadata__"])
    entry = header[name]
    how = rng.choice(("dtype", "shape", "offsets", "remove", "rename", "length", "add", "nan", "swap"))
    if how == "dtype":
        entry["dtype"] = rng.choice(("F16", "F64", "I32", "BF16", "BOOL", "X", 3))
    elif how == "shape":
        entry["shape"] = rng.choice(([10**18], [-1], [], [1, *entry["shape"]], entry["shape"][::-1], "x"))
    elif how == "offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(([begin + 4, end + 4], [0, 10**18], [end, begin], [-4, 0], "x"))
    elif how == "remove":
        del header[name]
    elif how == "rename":
        header[f"{name}.x"] = header.pop(name)
    elif how == "add":
        header["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(rest), len(rest)]}
    elif how == "swap":
        other = rng.choice(
            [n for n in header if n != "__metadata__" and header[n]["shape"] == entry["shape"]]
        )
        header[name], header[other] = header[other], header[name]
    elif how == "nan":
        begin = entry["data_offsets"][0]
        rest = rest[:begin] + np.float32("nan").tobytes() + rest[begin + 4 :]
    text = json.dumps(header).encode()
    size = rng.choice((10**18, 0, len(text) + 1, len(text) - 1)) if how == "length" else len(text)
    path.write_bytes(struct.pack("<Q", size) + text + rest)
    return f"{name}: {how}"


# Arrays of numpy --------------------------------------------------------------------------------------------------


def edit_npz(path: Path, rng: Random) -> str:
    """Drop, retype or reshape an array of an npz file, or make it one of objects."""
    with np.load(path, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    name = rng.choice(sorted(arrays))
    how = rng.choice(("drop", "objects", "shape", "type", "nan"))
    if how == "drop":
        del arrays[name]
    elif how == "objects":
        arrays[name] = np.array([{"a": 1}] * len(arrays[name]), dtype=object)
    elif how == "shape":
        arrays[name] = arrays[name].reshape(-1)[:-1]
    elif how == "type":
        arrays[name] = np.arange(arrays[name].size).astype("c8").reshape(arrays[name].shape)
    elif arrays[name].dtype.kind == "f":
        arrays[name] = np.full_like(arrays[name], np.nan)
    np.savez(path, **arrays)
    return f"{name}: {how}"


Change = Callable[[Path, Random], str]

FORMATS: dict[str, tuple[Change, ...]] = {
    ".json": (edit_json, edit_json, edit_json, double_key, nest_deeply),
    ".yaml": (edit_line, edit_line, edit_line, edit_line, alias_bomb, deep_keys),
    ".toml": (edit_line, edit_line, edit_line, edit_line, deep_keys),
    ".csv": (edit_cell, edit_cell, edit_line),
    ".txt": (edit_line,),
    ".parquet": (edit_parquet,),
    ".h5ad": (edit_h5,),
    ".h5": (edit_h5,),
    ".safetensors": (edit_safetensors,),
    ".npz": (edit_npz,),
}
"""Changes of what a file means, by its suffix."""


def files_of(target: Path) -> list[Path]:
    """Return the files at or below a path, in a fixed order."""
    return [target] if target.is_file() else sorted(p for p in target.rglob("*") if p.is_file())


@dataclass(frozen=True)
class Mutation:
    """What was done: to which file, whether to its bytes, its meaning (``format``) or its place, and in words."""

    file: Path
    way: str
    text: str


def mutate(targets: list[Path], rng: Random) -> Mutation:
    """Damage one file of an input in one way.

    Parameters
    ----------
    targets
        Files and folders that make up the input. A file is chosen by its format first, so that many chunks do not
        hide a few tables.
    rng
        Decides everything.
    """
    by_format: dict[str, list[Path]] = {}
    for file in (file for target in targets for file in files_of(target)):
        by_format.setdefault(file.suffix or "none", []).append(file)
    while True:
        file = rng.choice(by_format[rng.choice(sorted(by_format))])
        way = rng.choice(("bytes", "format", "format") if file.suffix in FORMATS else ("bytes",))
        way = "place" if rng.random() < PLACE_SHARE else way
        before = file.read_bytes()
        try:
            return Mutation(file, way, _damage(file, way, rng))
        except NotPossible:
            if file.is_file() and file.read_bytes() != before:
                file.write_bytes(before)


def _damage(file: Path, way: str, rng: Random) -> str:
    if way == "place":
        return rng.choice(PLACES)(file, rng)
    if way == "format":
        return rng.choice(FORMATS[file.suffix])(file, rng)
    data = bytearray(file.read_bytes())
    if len(data) < 4:
        raise NotPossible
    said = rng.choice(BYTES)(data, rng)
    file.write_bytes(data)
    return said
