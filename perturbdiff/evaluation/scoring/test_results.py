"""Test results of scopes as they come in, perturbation by perturbation, and what is made of them at the end."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.metrics.definitions import DEFINITIONS
from perturbdiff.evaluation.metrics.differential import Controls, Differential
from perturbdiff.evaluation.metrics.profile_metrics import Comparison
from perturbdiff.evaluation.scoring.scopes import Scope, Unit
from perturbdiff.runtime.files import explain_os_errors

HELD_BYTES = 1 << 26
"""Test results of more than that in all wait in a temporary file."""

_ROWS = 1024
_KINDS = ("real p", "real mean", "predicted p", "predicted mean")


class Tested:
    """p and mean of one unit's perturbations on both sides, float64; rows are written by threads.

    Parameters
    ----------
    unit
        Whose they are.
    controls
        Those of the real and those of the predicted side.
    genes
        Names of the columns.
    held
        Whether to hold them in memory.
    """

    def __init__(
        self, unit: Unit, controls: tuple[Controls, Controls], genes: tuple[str, ...], *, held: bool
    ) -> None:
        self.unit, self.controls, self.genes = unit, controls, genes
        self.perturbations = unit.perturbations
        self._row = {name: i for i, name in enumerate(self.perturbations)}
        self._shape = (len(_KINDS), len(self.perturbations), len(genes))
        self._held = np.empty(self._shape) if held else None
        self._file = None
        if not held:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as this
            weakref.finalize(self, self._file.close)

    @staticmethod
    def size(unit: Unit, num_genes: int) -> int:
        """Return the bytes that a unit's results take."""
        return len(_KINDS) * len(unit.perturbations) * num_genes * 8

    def put(self, perturbation: str, rows: Sequence[np.ndarray]) -> None:
        """Keep a perturbation's real p and mean, then the predicted ones, [G] each."""
        place = self._row[perturbation]
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
                self._table(2 * side),
                self._table(2 * side + 1),
                controls.mean,
                definition=definition,
                alpha=config.alpha,
            )
            for side, controls in enumerate(self.controls)
        ]
        return Comparison(self.perturbations, self.genes, *sides, definition=definition, min_de=config.min_de)


class Comparisons(Mapping[Scope, Comparison]):
    """Comparisons by scope, each made when it is asked for and not kept: one takes some 40 bytes a value."""

    def __init__(self, tested: Sequence[Tested], config: EvaluateConfig) -> None:
        self._of = {scope: found for found in tested for scope in found.unit.scopes}
        self._config = config

    def __getitem__(self, scope: Scope) -> Comparison:
        return self._of[scope].comparison(self._config)

    def __iter__(self) -> Iterator[Scope]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)
