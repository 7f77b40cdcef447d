"""Which cells a simulated experiment has: sizes of conditions and sets, and their order in the file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from perturbdiff.config.settings import SimulateConfig
from perturbdiff.simulation.true_effects import MAX_LATENT, Truth, stream

TINY = 5  # cells in the largest of the tiny conditions
MIN_CONTROLS = 10  # control cells that every (cell type, batch) has at least


@dataclass(frozen=True)
class Plan:
    """Which cells there are.

    Attributes
    ----------
    conditions
        One row per condition: ``cell_type, batch, perturbation`` as numbers, ``n_cells``.
    sets
        One row per set (a well of a condition): ``condition``, ``well``, ``latent`` (standard normal, cut),
        ``n_cells``.
    set_of_cell
        Set of each cell ``[n]`` int32, in the file's random order. The only thing held per cell.
    """

    conditions: pd.DataFrame
    sets: pd.DataFrame
    set_of_cell: NDArray[np.int32]

    def of_set(self, name: str) -> NDArray[np.int64]:
        """Return column ``name`` of the conditions for each set."""
        return self.conditions[name].to_numpy(np.int64)[self.sets["condition"].to_numpy()]


def draw_plan(config: SimulateConfig, truth: Truth, seed: int) -> Plan:
    """Draw the sizes of conditions and sets, each set's latent factor, and the order of the cells."""
    labels = len(truth.perturbations)
    shape = (config.cell_types, config.batches, labels)
    cell_type, batch, perturbation = (axis.ravel() for axis in np.indices(shape))
    rng = stream(seed, "sizes")
    # a perturbation is frequent or rare everywhere, a context large or small for all, and the rest is chance
    spread = config.size_spread
    log_size = 0.8 * spread * rng.normal(size=(1, 1, labels)) + 0.4 * spread * rng.normal(
        size=(config.cell_types, config.batches, 1)
    )
    weight = np.exp(log_size + 0.45 * spread * rng.normal(size=shape))
    n_cells = _sizes(config, weight, perturbation == 0, rng)
    conditions = pd.DataFrame(
        {"cell_type": cell_type, "batch": batch, "perturbation": perturbation, "n_cells": n_cells}
    )
    per_well = rng.multinomial(n_cells, np.full(config.wells, 1.0 / config.wells))
    condition, well = np.nonzero(per_well)
    latent = np.clip(stream(seed, "latent").normal(size=per_well.shape), -MAX_LATENT, MAX_LATENT)
    sets = pd.DataFrame(
        {
            "condition": condition,
            "well": well,
            "latent": latent[condition, well].astype(np.float32),
            "n_cells": per_well[condition, well],
        }
    )
    set_of_cell = np.repeat(np.arange(len(sets), dtype=np.int32), sets["n_cells"])
    stream(seed, "order").shuffle(set_of_cell)
    return Plan(conditions, sets, set_of_cell)


def _sizes(
    config: SimulateConfig,
    weight: NDArray[np.float64],
    is_control: NDArray[np.bool_],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the cells of each condition; they sum to ``config.cells``."""
    weight, treated = weight.ravel(), np.flatnonzero(~is_control)
    size = np.zeros(len(weight), np.int64)
    tiny = rng.permutation(treated)[: math.ceil(config.tiny_fraction * len(treated))]
    size[tiny] = rng.integers(1, TINY + 1, len(tiny))
    others = np.setdiff1d(treated, tiny)
    controls = max(round(config.control_fraction * config.cells), MIN_CONTROLS * int(is_control.sum()))
    rest = config.cells - int(size.sum())
    controls = min(controls, rest - (TINY + 1) * len(others)) if len(others) else rest
    size[is_control] = _share(controls, weight[is_control], MIN_CONTROLS)
    size[others] = _share(config.cells - int(size.sum()), weight[others], TINY + 1)
    return size


def _share(total: int, weight: NDArray[np.float64], least: int) -> NDArray[np.int64]:
    """Return integers of sum ``total``, each at least ``least``, the rest in proportion to ``weight``."""
    if len(weight) == 0:
        return np.zeros(0, np.int64)
    exact = (total - least * len(weight)) * weight / weight.sum()
    size = np.floor(exact).astype(np.int64)
    short = total - least * len(weight) - int(size.sum())
    size[np.argsort(size - exact, kind="stable")[:short]] += 1
    return size + least


def condition_table(truth: Truth, plan: Plan) -> pd.DataFrame:
    """Return the conditions by name: cell_type, batch, perturbation, agent, kind, dose, n_cells, n_sets."""
    plan_rows = plan.conditions
    facts = truth.perturbations.iloc[plan_rows["perturbation"]].reset_index(drop=True)
    table = facts[["perturbation", "agent", "kind", "dose"]].copy()
    table.insert(0, "cell_type", np.asarray(truth.cell_types)[plan_rows["cell_type"]])
    table.insert(1, "batch", np.asarray(truth.batches)[plan_rows["batch"]])
    table["n_cells"] = plan_rows["n_cells"].to_numpy()
    table["n_sets"] = np.bincount(plan.sets["condition"], minlength=len(table))
    return table
