"""The known attacks: predictions without knowledge that hope for a good score, each from honest cells.

None uses a cell of the condition that it predicts. The first ones take cells and change their values. Others choose
cells cleverly, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import scipy.sparse as sp

from perturbdiff.adversaries.honest_cells import HonestCells, blocks
from perturbdiff.conditions.condition import Condition
from perturbdiff.io.matrices import Sparse

CONTROL, PERTURBED_MEAN = "control", "perturbed_mean"

CELLS_AT_ONCE = 1024
_FEW = 5  # cells that are handed in, or repeated
_SCALE = 2.0  # of log1p values
_STRETCH = 3.0  # of changes
_CUT = 0.3  # log1p units that the clipping attack takes from every value
_SPIKE = 3.0  # log1p units, a strong gene
_NUDGE = 0.5  # log1p units, enough for a rank test
_NOISE = 0.1  # SD, log1p units


@dataclass(frozen=True)
class Start:
    """What an attacker knows of one condition before it changes any value.

    Attributes
    ----------
    honest
        All honest cells.
    condition
        What is predicted.
    rows
        Rows of the cells that it starts from.
    """

    honest: HonestCells
    condition: Condition
    rows: np.ndarray

    @cached_property
    def mean(self) -> np.ndarray:
        """Return the mean log1p profile of these cells, float64 [G]."""
        return self.honest.profile(self.rows)

    @property
    def change(self) -> np.ndarray:
        """Return their mean change from the matched controls, float64 [G]."""
        return self.mean - self.honest.control_mean(self.condition)

    @cached_property
    def foreign_targets(self) -> np.ndarray:
        """Return the columns of the panel's target genes that are not the condition's own."""
        targets = self.honest.targets
        own = set(targets.genes.get(self.condition.perturbation, ()))
        place = {gene: i for i, gene in enumerate(targets.measured)}
        return np.array([place[gene] for gene in targets.panel if gene not in own], np.int64)


Change = Callable[[Sparse, Start, np.random.Generator], Sparse | np.ndarray]
"""Takes log1p values [n, G], returns others of the same shape."""


def _drawn_others(honest: HonestCells, condition: Condition) -> np.ndarray:
    return honest.drawn_others(condition)


def _drawn_controls(honest: HonestCells, condition: Condition) -> np.ndarray:
    return honest.drawn_controls(condition)


@dataclass(frozen=True)
class Attack:
    """One attack, or an honest reference.

    Attributes
    ----------
    name
        In tables and file names.
    hope
        What the attacker hopes for, in a sentence.
    base
        The honest reference that it starts from and is compared with.
    rows
        Chooses rows of the truth for a condition.
    change
        Changes the values of these cells; None: nothing.
    controls
        Changes the values of the controls in the file; None: the real ones are handed in.
    leaves_out
        Whether conditions with fewer cells than the median are left out.
    """

    name: str
    hope: str
    base: str = PERTURBED_MEAN
    rows: Callable[[HonestCells, Condition], np.ndarray] = _drawn_others
    change: Change | None = None
    controls: Change | None = None
    leaves_out: bool = False

    def conditions(self, honest: HonestCells) -> list[Condition]:
        """Return the conditions that are handed in."""
        if not self.leaves_out:
            return honest.conditions
        middle = float(np.median([honest.size(c) for c in honest.conditions]))
        return [c for c in honest.conditions if honest.size(c) >= middle]

    def cells(self, honest: HonestCells, condition: Condition) -> Iterator[Sparse]:
        """Yield the predicted cells of a condition, CSR, a few at a time; log1p, or counts if counts are handed in."""
        start = Start(honest, condition, self.rows(honest, condition))
        yield from _changed(start, start.rows, self.change)

    def handed_controls(self, honest: HonestCells, condition: Condition) -> Iterator[Sparse]:
        """Yield the controls that the file holds for the group of a condition, as `cells` does."""
        start = Start(
            honest, condition, self.rows(honest, condition) if self.controls else np.empty(0, np.int64)
        )
        yield from _changed(start, honest.controls(condition), self.controls)


def _changed(start: Start, rows: np.ndarray, change: Change | None) -> Iterator[Sparse]:
    rng = start.honest.rng(start.condition)
    for some in blocks(rows, CELLS_AT_ONCE):
        cells = start.honest.view.cells(some)
        changed = cells if change is None else sp.csr_matrix(change(cells, start, rng), dtype=np.float32)
        yield start.honest.handed(changed, cells, some, rng)


def _few_repeated(honest: HonestCells, condition: Condition) -> np.ndarray:
    return np.sort(np.resize(_few(honest, condition), honest.size(condition)))


def _few(honest: HonestCells, condition: Condition) -> np.ndarray:
    rows = honest.drawn_others(condition)
    return honest.rng(condition).choice(rows, min(_FEW, len(rows)), replace=False)


def _spread(honest: HonestCells, condition: Condition) -> np.ndarray:
    """Choose cells that stand apart: each from another place among the rows, which are sorted by condition."""
    rows = honest.drawn_others(condition)
    return rows[np.linspace(0, len(rows) - 1, min(_FEW, len(rows))).round().astype(int)]


def _same_controls(honest: HonestCells, condition: Condition) -> np.ndarray:
    rows = honest.controls(condition)
    return rows[np.linspace(0, len(rows) - 1, honest.size(condition)).round().astype(int)]


def _relabelled(honest: HonestCells, condition: Condition) -> np.ndarray:
    return honest.of(honest.relabelled(condition), condition)


def _best(honest: HonestCells, condition: Condition) -> np.ndarray:
    return honest.of(honest.best_known(condition), condition)


def _values(
    cells: Sparse, _start: Start, _rng: np.random.Generator, *, of: Callable[..., np.ndarray]
) -> Sparse:
    """Change the non-zero values one by one."""
    return sp.csr_matrix((of(cells.data), cells.indices, cells.indptr), shape=cells.shape)


def _shifted(cells: Sparse, shift: np.ndarray) -> np.ndarray:
    return np.maximum(cells.toarray() + shift.astype(np.float32), 0.0)


def _stretch(cells: Sparse, start: Start, _rng: np.random.Generator) -> np.ndarray:
    return _shifted(cells, (_STRETCH - 1.0) * start.change)


def _spike(cells: Sparse, start: Start, _rng: np.random.Generator) -> np.ndarray:
    shift = np.zeros(cells.shape[1])
    shift[start.foreign_targets] = _SPIKE
    return _shifted(cells, shift)


def _profile(cells: Sparse, start: Start, _rng: np.random.Generator) -> np.ndarray:
    return np.tile(start.mean, (cells.shape[0], 1))


def _noisy(cells: Sparse, _start: Start, rng: np.random.Generator) -> np.ndarray:
    return cells.toarray() + np.abs(rng.normal(0.0, _NOISE, cells.shape))


def _nudge(cells: Sparse, start: Start, _rng: np.random.Generator) -> np.ndarray:
    return _shifted(cells, np.where(start.change < 0, -_NUDGE, _NUDGE))


def _opposite(cells: Sparse, start: Start, _rng: np.random.Generator) -> np.ndarray:
    return _shifted(cells, -start.change)


HONEST: Mapping[str, Attack] = {
    one.name: one
    for one in (
        Attack(
            CONTROL,
            "Matched control cells drawn at random: no change.",
            CONTROL,
            rows=_drawn_controls,
        ),
        Attack(PERTURBED_MEAN, "Cells drawn from all other perturbations of the same context."),
    )
}
"""What an honest person without any knowledge of the perturbation hands in."""

ATTACKS: Mapping[str, Attack] = {
    one.name: one
    for one in (
        Attack(
            "scaled-values",
            f"Values × {_SCALE:g} make every change large, so that more genes are found.",
            change=partial(_values, of=lambda x: _SCALE * x),
        ),
        Attack(
            "scaled-changes",
            f"The usual change × {_STRETCH:g} keeps its direction, which correlations reward, and passes more tests.",
            change=_stretch,
        ),
        Attack(
            "log1p-twice",
            "A second log1p shrinks all values, and with them all errors.",
            change=partial(_values, of=np.log1p),
        ),
        Attack(
            "clipped",
            f"Values less {_CUT:g}, clipped at zero, get rid of small values that may be wrong.",
            change=partial(_values, of=lambda x: np.maximum(x - _CUT, 0.0)),
        ),
        Attack(
            "panel-spikes",
            "All other perturbations' target genes are raised, so that only the own perturbation, whose gene is not "
            "looked at, stays near.",
            CONTROL,
            rows=_drawn_controls,
            change=_spike,
        ),
        Attack(
            "repeated-cells",
            f"{_FEW} cells again and again look like many, and many cells make every difference significant.",
            rows=_few_repeated,
        ),
        Attack(
            "mean-profile",
            "The mean profile as every cell has the right averages without noise, and metrics of averages see no cell.",
            change=_profile,
        ),
        Attack(
            "control-copies",
            "The same control cells for every perturbation are real cells, and most genes do not change anyway.",
            CONTROL,
            rows=_same_controls,
        ),
        Attack(
            "rows-left-out",
            "Only conditions with many cells are handed in, whose scores are better, so that the mean is better.",
            leaves_out=True,
        ),
        Attack(
            "noise",
            "A little noise on every value leaves no zero, so that rank tests call every gene changed.",
            change=_noisy,
        ),
        Attack(
            "own-controls",
            "The file holds controls of its own from which all changes look twice as large.",
            controls=_opposite,
        ),
        Attack(
            "few-cells", f"{_FEW} cells per condition are too few to be tested and found wrong.", rows=_few
        ),
        Attack(
            "spread-cells",
            f"{_FEW} cells of different perturbations are further apart than cells drawn at random, and distances "
            "between populations subtract what predicted cells are apart.",
            rows=_spread,
        ),
        Attack(
            "all-genes-de",
            f"Every gene moved by {_NUDGE:g} is significant, so that no true gene is missed.",
            change=_nudge,
        ),
        Attack(
            "permuted-labels",
            "Real cells of another perturbation are perfect cells, and only the label is wrong.",
            rows=_relabelled,
        ),
        Attack(
            "best-known",
            "The perturbation with the most cells, given to all, has the response that many share.",
            rows=_best,
        ),
    )
}
"""Every known attack by name."""
