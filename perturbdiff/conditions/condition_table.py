"""What a store is: the names of its columns, its version, and its table of conditions."""

from __future__ import annotations

import numpy as np
import pandas as pd

LABELS = ("cell_type", "batch", "perturbation")
"""The three labels that make a condition, in the order rows are sorted by."""

ALL = "all"
"""Label of every cell when the input has no column for a cell type or a batch."""

OBS_COLUMNS = (*LABELS, "dose", "n_counts", "n_genes", "source_row", "source_file")
"""Columns of a store's obs, beside those a user asks to keep; ``dose`` if the input has one."""

RESERVED = frozenset({*OBS_COLUMNS, "cell", "n_cells"})
"""Names that an extra column cannot have."""

CONDITION_COLUMNS = (*LABELS, "n_cells", "start", "stop", "is_control", "control", "part")


def dose_label(agent: str, dose: float) -> str:
    """Return the perturbation label of an agent at a dose, e.g. ``'imatinib@0.5'``."""
    return f"{agent}@{dose:g}"


def sort_conditions(table: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return the conditions in store order: by cell type, batch, then the control, then perturbation."""
    ordered = table.assign(_not_control=table["perturbation"] != control)
    ordered = ordered.sort_values(["cell_type", "batch", "_not_control", "perturbation"], kind="stable")
    return ordered.drop(columns="_not_control").reset_index(drop=True)


def condition_table(obs: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return the store's table of conditions for cells or for already counted conditions.

    Parameters
    ----------
    obs
        Columns ``cell_type, batch, perturbation`` and, if rows are conditions, ``n_cells``.
    control
        Label of the control perturbation.

    Returns
    -------
    pd.DataFrame
        One row per condition in store order, indexed by condition id, with the columns
        `CONDITION_COLUMNS`: ``start`` and ``stop`` are store rows (int64), ``control`` is the id of the
        control condition of the same cell type and batch (-1 if there is none), ``part`` is 0.
    """
    labels = list(LABELS)
    plain = obs[labels].astype(str)
    plain["n_cells"] = obs["n_cells"].to_numpy(np.int64) if "n_cells" in obs else np.int64(1)
    table = plain.groupby(labels, observed=True, sort=False)["n_cells"].sum().reset_index()
    return complete(sort_conditions(table, control), control)


def complete(table: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return a sorted table of conditions with its row ranges and the control of each condition."""
    table = table.copy()
    sizes = table["n_cells"].to_numpy(np.int64)
    table["stop"] = np.cumsum(sizes)
    table["start"] = table["stop"] - sizes
    table["is_control"] = (table["perturbation"] == control).to_numpy()
    group = table.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    of_group = np.full(int(group.max(initial=-1)) + 1, -1, np.int64)
    controls = np.flatnonzero(table["is_control"])
    of_group[group[controls]] = controls
    table["control"] = of_group[group]
    table["part"] = np.int64(0)
    return pd.DataFrame(table[list(CONDITION_COLUMNS)])
