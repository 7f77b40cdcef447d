"""Damage that once led to something else than a right result or one line: tried again in every run of the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from security.mutations import Mutation


@dataclass(frozen=True)
class Case:
    """One case: which command reads the damaged input (`security.fuzz_inputs`), and the damage."""

    kind: str
    command: int
    damage: Callable[[list[Path]], Mutation]


KEPT: tuple[Case, ...] = ()
