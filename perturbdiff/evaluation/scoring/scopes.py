"""The scopes of an evaluation (the pool, each context), and how they are shared out between the parts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perturbdiff.evaluation.readers.cells_by_condition import Condition
from perturbdiff.evaluation.readers.pairing import Pairing

POOLED = "pooled"
Scope = tuple[str, str]  # kind ("pooled" or "context") and label

_OWN = 3  # what a cell's distances cost, in tests of it


@dataclass(frozen=True)
class Unit:
    """Scopes with the same conditions: tested once.

    Attributes
    ----------
    scopes
        One, or the pool and the only context.
    conditions
        What is pooled and tested, in the order of the pairing.
    own
        Those whose distances and realism are scored along with it; each condition is some unit's own.
    """

    scopes: tuple[Scope, ...]
    conditions: tuple[Condition, ...]
    own: tuple[Condition, ...]

    @property
    def perturbations(self) -> tuple[str, ...]:
        """Return the perturbations, sorted by name."""
        return tuple(sorted({c[2] for c in self.conditions}))

    @property
    def is_pool(self) -> bool:
        """Whether it holds all conditions."""
        return self.scopes[0][0] == POOLED


def units_of(pairing: Pairing) -> list[Unit]:
    """Return the pool, then the contexts by name.

    A context none of whose groups has controls is part of the pool only.
    """
    members: dict[str, list[Condition]] = {}
    for condition in pairing.conditions:
        if (label := pairing.contexts.get(condition)) is not None:
            members.setdefault(label, []).append(condition)
    sides = [pairing.controls]
    if pairing.predicted_controls is not None:
        sides.append(pairing.predicted_controls)
    tested = {
        label: tuple(found)
        for label, found in sorted(members.items())
        if all(any(c[:2] in side for c in found) for side in sides)
    }
    everything = tuple(pairing.conditions)
    pool: tuple[Scope, ...] = ((POOLED, POOLED),)
    if len(tested) == 1 and set(next(iter(tested.values()))) == set(everything):
        return [Unit((*pool, ("context", next(iter(tested)))), everything, everything)]
    elsewhere = {condition for found in tested.values() for condition in found}
    contexts = [Unit((("context", label),), found, found) for label, found in tested.items()]
    return [Unit(pool, everything, tuple(c for c in everything if c not in elsewhere)), *contexts]


def sizes_of(unit: Unit, pairing: Pairing) -> dict[str, tuple[int, int]]:
    """Return the real and the predicted cells of each perturbation."""
    sizes: dict[str, tuple[int, int]] = dict.fromkeys(unit.perturbations, (0, 0))
    for condition in unit.conditions:
        real, predicted = sizes[condition[2]]
        real += len(pairing.real.rows[condition])
        sizes[condition[2]] = real, predicted + len(pairing.predicted.rows[condition])
    return sizes


def of_shard(units: Sequence[Unit], pairing: Pairing, shard: tuple[int, int]) -> list[Unit]:
    """Return the units of part ``shard[0]`` of ``shard[1]``: all parts have about as much to do.

    A part of more parts than there are units may be empty.
    """
    cells = {c: len(pairing.real.rows[c]) + len(pairing.predicted.rows[c]) for c in pairing.conditions}
    work = {
        u.scopes: sum(cells[c] for c in u.conditions) + _OWN * sum(cells[c] for c in u.own) for u in units
    }
    load = [0] * shard[1]
    mine = set()
    for unit in sorted(units, key=lambda u: (-work[u.scopes], u.scopes)):
        part = load.index(min(load))
        load[part] += work[unit.scopes]
        if part == shard[0]:
            mine.add(unit.scopes)
    return [unit for unit in units if unit.scopes in mine]
