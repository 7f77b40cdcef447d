"""Damage that once led to something else than a right result or one line: tried again in every run of the tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import pandas as pd
from security.mutations import Change, Mutation, nest_deeply, put_folder, put_pipe, put_ring


@dataclass(frozen=True)
class Case:
    """One case: which command reads the damaged input (`security.fuzz_inputs`), and the damage."""

    kind: str
    command: int
    damage: Callable[[list[Path]], Mutation]


def on(name: str, change: Change, way: str = "format") -> Callable[[list[Path]], Mutation]:
    """Return damage of the file of a name, below the folder of inputs."""

    def damage(targets: list[Path]) -> Mutation:
        path = targets[0].parent / name
        return Mutation(path, way, change(path, random.Random(0)))

    return damage


def put(place: int, more: bytes) -> Change:
    """Return a change that inserts bytes."""

    def change(path: Path, rng: random.Random) -> str:
        data = path.read_bytes()
        path.write_bytes(data[:place] + more + data[place:])
        return f"{more} at {place}"

    return change


def zeros(place: int, length: int) -> Change:
    """Return a change that puts zeros in place of bytes."""

    def change(path: Path, rng: random.Random) -> str:
        data = bytearray(path.read_bytes())
        data[place : place + length] = bytes(length)
        path.write_bytes(data)
        return f"{length} zeros at {place}"

    return change


def flip(place: int) -> Change:
    """Return a change that flips a bit."""

    def change(path: Path, rng: random.Random) -> str:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        return f"a bit of byte {place}"

    return change


def huge_pointers(path: Path, rng: random.Random) -> str:
    """Make row pointers numbers that no integer holds."""
    with h5py.File(path, "r+") as file:
        pointers = file["X/indptr"][()].astype("f8")
        pointers[1] = float("nan")
        attributes = dict(file["X/indptr"].attrs)
        del file["X/indptr"]
        file["X/indptr"] = pointers
        file["X/indptr"].attrs.update(attributes)
    return "row pointers of float64 with NaN"


def without_codes(path: Path, rng: random.Random) -> str:
    """Take the codes of a column of labels away."""
    with h5py.File(path, "r+") as file:
        del file["obs/batch/codes"]
    return "no codes"


def codes_of_numbers(path: Path, rng: random.Random) -> str:
    """Make codes of labels floating-point numbers."""
    with h5py.File(path, "r+") as file:
        codes = file["obs/batch/codes"]
        values, attributes = codes[()].astype("f8"), dict(codes.attrs)
        del file["obs/batch/codes"]
        file["obs/batch/codes"] = values
        file["obs/batch/codes"].attrs.update(attributes)
    return "codes of float64"


def negative_and_nan(path: Path, rng: random.Random) -> str:
    """Make one value negative and another no number."""
    with h5py.File(path, "r+") as file:
        file["X/data"][3:5] = [-7, float("nan")]
    return "values -7 and NaN"


def bytes_for_texts(column: str) -> Change:
    """Return a change that makes texts of a table bytes that are no text."""

    def change(path: Path, rng: random.Random) -> str:
        table = pd.read_parquet(path)
        table[column] = [b"\xff"] * len(table)
        table.to_parquet(path)
        return f"column {column} of bytes"

    return change


def parts_reversed(path: Path, rng: random.Random) -> str:
    """Hand the parts of a split to other conditions, so that it is another split."""
    table = pd.read_parquet(path)
    table["part"] = table["part"].to_numpy()[::-1]
    table.to_parquet(path)
    return "parts of other rows"


KEPT: tuple[Case, ...] = (
    Case("report", 0, on("base/aggregate.csv", put(4280, b"\xf0"), "bytes")),  # no UTF-8: a traceback
    Case("bundle", 3, on("bundle/run.json", nest_deeply)),  # a RecursionError
    Case("cells", 1, on("mine.h5ad", put_pipe, "place")),  # waited for ever
    Case("counts", 0, on("counts.h5ad", put_ring, "place")),  # "Symlink loop": a traceback
    Case("predictions", 0, on("pred.h5ad", put_ring, "place")),
    Case("counts", 0, on("counts.h5ad", zeros(5136, 64), "bytes")),  # waited for ever in libhdf5
    Case("store", 0, on("store/part-0000.zarr/obs/_index/c/0", flip(190), "bytes")),  # a traceback of zarr's
    Case("cells", 0, on("mine.h5ad", huge_pointers)),  # a warning before the line
    Case("report", 0, on("scores/run.json", put_ring, "place")),  # another page
    Case("report", 0, on("scores/manifest.json", put_pipe, "place")),  # waited for ever
    Case("statistics", 0, on("stats/manifest.json", put_ring, "place")),  # another page
    Case("counts", 0, on("counts.h5ad", without_codes)),  # StopIteration
    Case("cells", 0, on("mine.h5ad", codes_of_numbers)),  # an IndexError
    Case("store", 0, on("store/conditions.parquet", put_folder, "place")),  # a KeyError
    Case("cells", 0, on("mine.h5ad", negative_and_nan)),  # a warning before the line
    Case("zarr", 0, on("counts.zarr/obs/cell_type/codes/0", put_folder, "place")),  # another store
    Case("split", 0, on("split.parquet", bytes_for_texts("cell_type"))),  # a UnicodeDecodeError
    Case("embedding", 0, on("embedding.parquet", bytes_for_texts("name"))),
    Case("split", 0, on("split.parquet", parts_reversed)),  # another ceiling
)
