"""The units of a store: cells of one condition that were one set, such as a well, a plate or a guide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from perturbdiff.conditions.control_matching import ControlPools, Rows

FEWEST_CELLS = 8  # a set of fewer different cells represents its unit badly


class UnitRows(Rows):
    """The usable rows of each unit. Units are numbered in the order of conditions, and of sets within a condition.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    sets
        int [n_cells]: number of the set of each store row (`Store.set_of`).
    exclude
        bool [n_cells]: store rows that must never be used. None excludes no row.

    Attributes
    ----------
    condition, label
        int64 [units]: condition of each unit, and number of its set. Sets of one number in several conditions are
        several units.
    count
        int64 [units]: number of usable rows, never 0.
    """

    def __init__(self, conditions: pd.DataFrame, sets: np.ndarray, exclude: np.ndarray | None = None) -> None:
        sizes = conditions["n_cells"].to_numpy(np.int64)
        of_row = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        self._order = np.lexsort((sets, of_row))
        if exclude is not None:
            self._order = self._order[~exclude[self._order]]
        condition, label = of_row[self._order], sets[self._order]
        new = np.ones(len(condition), bool)
        new[1:] = (np.diff(condition) != 0) | (np.diff(label) != 0)
        self.start = np.flatnonzero(new)
        self.count = np.diff(np.append(self.start, len(condition)))
        self.condition = condition[self.start].astype(np.int64)
        self.label = label[self.start].astype(np.int64)

    def at(self, condition: int, positions: np.ndarray) -> np.ndarray:
        """Return the store rows (int64) at ``positions`` 0..count-1 of a unit."""
        return self._order[self.start[condition] + positions]

    def of(self, conditions: np.ndarray | Sequence[int]) -> np.ndarray:
        """Return the units of conditions that are large enough to be drawn from, int64.

        They have at least 8 cells, or as many as the largest one of these conditions.
        """
        units = np.flatnonzero(np.isin(self.condition, conditions))
        return units[self.count[units] >= min(FEWEST_CELLS, self.count[units].max(initial=0))]

    def large_enough(self) -> np.ndarray:
        """Return for each unit whether it has at least 8 cells, or as many as the largest of its condition; bool."""
        largest = np.zeros(int(self.condition.max(initial=-1)) + 1, np.int64)
        np.maximum.at(largest, self.condition, self.count)
        return self.count >= np.minimum(FEWEST_CELLS, largest[self.condition])


class UnitPools:
    """Control cells of units: a set of them is from one unit.

    It is the unit of the same set, if that has at least 8 controls among the matched ones, or else one of the matched
    controls' units, drawn in proportion to their numbers of cells.

    Parameters
    ----------
    matched
        The control conditions of each condition that needs controls.
    units
        Units of the same conditions.
    """

    def __init__(self, matched: ControlPools, units: UnitRows) -> None:
        self._matched, self._units = matched, units
        self._candidates: dict[tuple[int, ...], np.ndarray] = {}

    def drawn(self) -> np.ndarray:
        """Return the units of controls (int64, ascending) that may be drawn from."""
        return self._units.of(self._matched.drawn())

    def draw(self, unit: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return ``size`` random rows (int64) of one unit of matched controls. Rows repeat only if it has too few."""
        pool = self._matched.pool(int(self._units.condition[unit]))
        units = self._candidates.setdefault(tuple(pool.tolist()), self._units.of(pool))
        same = units[
            (self._units.label[units] == self._units.label[unit]) & (self._units.count[units] >= FEWEST_CELLS)
        ]
        among = same if len(same) else units
        share = self._units.count[among] / self._units.count[among].sum()
        return self._units.draw(rng.choice(among, 1, p=share), size, rng)
