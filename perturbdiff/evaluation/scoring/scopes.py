"""The scopes of an evaluation (the pool, each context), and how they are shared out between the parts of a run."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perturbdiff.conditions.condition import Condition
from perturbdiff.conditions.targets import Targets
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.metrics.differential import DEFINITIONS, Controls, Differential
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.metrics.spread import Spread, variances
from perturbdiff.evaluation.readers.pairing import Pairing
from perturbdiff.runtime.files import explain_os_errors

POOLED = "pooled"
_OWN = 3  # cost of a cell's distances, in units of its tests
HELD_BYTES = 1 << 26
"""If all test results take more than this, they are kept in a temporary file."""
_ROWS = 1024
_KINDS = ("real p", "real mean", "real variance", "predicted p", "predicted mean")

Scope = tuple[str, str]  # kind ("pooled" or "context") and label


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
        The conditions whose distances and realism are scored with this unit; each condition is so in one unit only.
    """

    scopes: tuple[Scope, ...]
    conditions: tuple[Condition, ...]
    own: tuple[Condition, ...]

    @property
    def perturbations(self) -> tuple[str, ...]:
        """Return the perturbations, sorted by name."""
        return tuple(sorted({c.perturbation for c in self.conditions}))

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
        label: tuple(conditions)
        for label, conditions in sorted(members.items())
        if all(any(c.group in side for c in conditions) for side in sides)
    }
    everything = tuple(pairing.conditions)
    pool: tuple[Scope, ...] = ((POOLED, POOLED),)
    if len(tested) == 1 and set(next(iter(tested.values()))) == set(everything):
        return [Unit((*pool, ("context", next(iter(tested)))), everything, everything)]
    elsewhere = {condition for conditions in tested.values() for condition in conditions}
    contexts = [Unit((("context", label),), conditions, conditions) for label, conditions in tested.items()]
    return [Unit(pool, everything, tuple(c for c in everything if c not in elsewhere)), *contexts]


def sizes_of(unit: Unit, pairing: Pairing) -> dict[str, tuple[int, int]]:
    """Return the real and the predicted cells of each perturbation."""
    sizes: dict[str, tuple[int, int]] = dict.fromkeys(unit.perturbations, (0, 0))
    for condition in unit.conditions:
        real, predicted = sizes[condition.perturbation]
        real += len(pairing.real.rows[condition])
        sizes[condition.perturbation] = real, predicted + len(pairing.predicted.rows[condition])
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
    chosen = set()
    for unit in sorted(units, key=lambda u: (-work[u.scopes], u.scopes)):
        part = load.index(min(load))
        load[part] += work[unit.scopes]
        if part == shard[0]:
            chosen.add(unit.scopes)
    return [unit for unit in units if unit.scopes in chosen]


class Tested:
    """p, mean and variance of one unit's perturbations, float64; rows are written by threads.

    Parameters
    ----------
    unit
        The unit.
    controls
        Those of the real and those of the predicted side.
    genes
        Names of the columns.
    held
        Whether to hold them in memory.
    targets
        Target genes of all perturbations of the evaluation, in whatever scope they are.
    """

    def __init__(
        self,
        unit: Unit,
        controls: tuple[Controls, Controls],
        genes: tuple[str, ...],
        *,
        held: bool,
        targets: Targets | None = None,
    ) -> None:
        self.unit, self.controls, self.genes, self._targets = unit, controls, genes, targets
        self.perturbations = unit.perturbations
        self._row = {name: i for i, name in enumerate(self.perturbations)}
        self._shape = (len(_KINDS), len(self.perturbations), len(genes))
        self._cells = np.zeros((2, len(self.perturbations)), np.int64)
        self._total = np.zeros(len(self.perturbations))
        self._held = np.empty(self._shape) if held else None
        self._file = None
        if not held:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as this
            weakref.finalize(self, self._file.close)

    @staticmethod
    def size(unit: Unit, num_genes: int) -> int:
        """Return the bytes that a unit's results take."""
        return len(_KINDS) * len(unit.perturbations) * num_genes * 8

    def put(
        self, perturbation: str, rows: Sequence[np.ndarray], total: float, cells: tuple[int, int]
    ) -> None:
        """Keep what was found of a perturbation.

        Parameters
        ----------
        rows
            Real p, mean and variance, predicted p and mean, [G] each.
        total
            Sum over genes of the variance of the predicted cells.
        cells
            Number of real and of predicted cells.
        """
        place = self._row[perturbation]
        self._cells[:, place], self._total[place] = cells, total
        for kind, row in enumerate(rows):
            if self._held is not None:
                self._held[kind, place] = row
            elif self._file is not None:
                at = (kind * self._shape[1] + place) * self._shape[2] * 8
                with explain_os_errors(Path(tempfile.gettempdir())):
                    os.pwrite(self._file.fileno(), np.asarray(row, np.float64).tobytes(), at)

    def _table(self, kind: int) -> np.ndarray:
        if self._held is not None:
            return self._held[kind]
        assert self._file is not None
        out = np.empty(self._shape[1:])
        for row in range(0, len(out), _ROWS):  # one call reads 2 GiB at most
            at = kind * out.nbytes + row * out[0].nbytes
            os.preadv(self._file.fileno(), [out[row : row + _ROWS].data], at)
        return out

    def comparison(self, config: EvaluateConfig) -> Comparison:
        """Return the adjusted test results of both sides."""
        definition = DEFINITIONS[config.definition]
        sides = [
            Differential.of(
                self._table(_KINDS.index(f"{name} p")),
                self._table(_KINDS.index(f"{name} mean")),
                controls.mean,
                definition=definition,
                alpha=config.alpha,
            )
            for name, controls in zip(("real", "predicted"), self.controls, strict=True)
        ]
        spread = Spread(
            self._table(_KINDS.index("real variance")),
            self._total,
            variances(self.controls[0].columns),
            *self._cells,
        )
        real, predicted = sides
        of = self.perturbations, self.genes, real, predicted, definition, config.min_de
        return Comparison(*of, spread, self._targets)


class Comparisons(Mapping[Scope, Comparison]):
    """Comparisons by scope. Each is computed on demand and not kept, because it takes some 40 bytes a value."""

    def __init__(self, tested: Sequence[Tested], config: EvaluateConfig) -> None:
        self._of = {scope: results for results in tested for scope in results.unit.scopes}
        self._config = config

    def __getitem__(self, scope: Scope) -> Comparison:
        return self._of[scope].comparison(self._config)

    def __iter__(self) -> Iterator[Scope]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)
