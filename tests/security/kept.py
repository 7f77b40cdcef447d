"""Damage that once led to something else than a right result or one line: tried again in every run of the tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from security.mutations import Change, Mutation, nest_deeply, put_pipe


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


KEPT: tuple[Case, ...] = (
    Case("report", 0, on("base/aggregate.csv", put(4280, b"\xf0"), "bytes")),  # no UTF-8: a traceback
    Case("bundle", 3, on("bundle/run.json", nest_deeply)),  # a RecursionError
    Case("cells", 1, on("mine.h5ad", put_pipe, "place")),  # waited for ever
)
