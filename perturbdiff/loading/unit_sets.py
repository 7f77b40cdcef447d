"""Cell sets that are drawn within a unit: one well, plate, guide or replicate, as `data.set_key` says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.control_matching import ControlPools, Rows
from perturbdiff.conditions.set_units import UnitPools, UnitRows
from perturbdiff.loading.cell_sets import CellSetSampler
from perturbdiff.loading.set_streams import CellSet
from perturbdiff.runtime.errors import UserError

logger = logging.getLogger(__name__)


class UnitSetSampler(CellSetSampler):
    """The stream of cell sets of a store that knows its sets. Cells of a set are from one unit, its controls also.

    It is the stream of `CellSetSampler` with units in place of conditions: an epoch has every cell of every unit at
    least once, and the last set of a unit is filled up with repeats. Units of fewer than 8 cells are left out, unless
    their condition has no larger one.

    Parameters
    ----------
    sets
        int [n_cells]: number of the set of each store row (`Store.set_of`).

    The other parameters are those of `CellSetSampler`. ``targets`` are units.
    """

    def __init__(
        self,
        conditions: pd.DataFrame,
        use: np.ndarray,
        *,
        sets: np.ndarray,
        exclude: np.ndarray | None = None,
        **options: Any,
    ) -> None:
        self.units = UnitRows(conditions, sets, exclude)
        self._conditions, self._exclude = conditions, exclude
        of_units = conditions.iloc[self.units.condition].reset_index(drop=True)
        used = np.asarray(use, dtype=bool)[self.units.condition] & self.units.large_enough()
        super().__init__(of_units, used, **options)

    @property
    def target_conditions(self) -> np.ndarray:
        """The conditions whose cells are targets, int64, ascending."""
        return np.unique(self.units.condition[self.targets])

    def check_family(self, told: Sequence[str], set_key: str) -> None:
        """Raise a `UserError` if the labels that the model is told leave it one set for each of them.

        Parameters
        ----------
        told
            Those of ``perturbation, cell_type, batch`` that the model is told. Controls tell it the cell type anyway.
        set_key
            The column with the sets, for the message.
        """
        known = list(dict.fromkeys([*told, "cell_type"]))
        targets = self._conditions.iloc[self.units.condition[self.targets]]
        if int(targets[known].value_counts().max()) > 1:
            return
        raise UserError(
            f"loss.mmd_statistic=set: '{set_key}' (data.set_key) names one set for each {' and '.join(known)} that "
            "the model is told, so there is no difference between sets to learn; take the label that tells the set, "
            "such as the batch, out of model.covariates, or preprocess with another data.set_key"
        )

    def _usable(self, conditions: pd.DataFrame, exclude: np.ndarray | None) -> Rows:
        return self.units

    def _matched(self, conditions: pd.DataFrame, perturbed: np.ndarray, *, quiet: bool) -> UnitPools:
        wanted = np.unique(self.units.condition[perturbed])
        rows = Rows(self._conditions, self._exclude)
        return UnitPools(ControlPools(self._conditions, rows, wanted, quiet=quiet), self.units)

    def _cell_set(self, condition: int, distinct: np.ndarray, rng: np.random.Generator) -> CellSet:
        made = super()._cell_set(condition, distinct, rng)
        return replace(made, condition=int(self.units.condition[condition]))

    def _report_small(self, count: np.ndarray) -> None:
        number, middle = len(self.units.count), int(np.median(count))
        logger.info(
            "%d sets of %d to %d cells (data.set_key), %d too small to learn from",
            number, count.min(), count.max(), number - int(self.units.large_enough().sum()),
        )  # fmt: skip
        if middle < self.set_size:
            logger.warning(
                "most sets have fewer cells than train.set_size=%d (half of them at most %d): what lacks is filled up "
                "with repeats, which look like differences between sets; choose train.set_size=%d or less",
                self.set_size, middle, middle,
            )  # fmt: skip
