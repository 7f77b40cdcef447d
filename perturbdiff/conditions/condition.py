"""A condition: one perturbation of one cell type in one batch; the table of conditions of a store, and doses in labels.

Doses follow the paper, App. Covariate Encoder.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from perturbdiff.runtime.errors import UserError, listing

Group = tuple[str, str]
"""Cell type and batch. The conditions of a group share its control cells."""


class Condition(NamedTuple):
    """The three labels of a condition. They sort by perturbation first and print as 'cell type|batch|perturbation'."""

    perturbation: str
    cell_type: str
    batch: str

    @property
    def group(self) -> Group:
        """Cell type and batch."""
        return self.cell_type, self.batch

    def __str__(self) -> str:
        return f"{self.cell_type}|{self.batch}|{self.perturbation}"


LABELS: tuple[str, ...] = Condition._fields
"""Names of the three labels. They are columns of every table of conditions."""


def conditions_of(table: Any) -> list[Condition]:
    """Return the condition of each row of a table with the columns `LABELS`, in the order of the rows."""
    return [Condition(*labels) for labels in zip(*(table[name].astype(str) for name in LABELS), strict=True)]


SORTED_BY = ("cell_type", "batch", "perturbation")
"""The labels by which the cells of a store are sorted, and the order of its columns."""
ALL = "all"
"""Cell type or batch of every cell if the input has no column for it."""

OBS_COLUMNS = (*SORTED_BY, "dose", "n_counts", "n_genes", "source_row", "source_file")
"""Columns of a store's obs, before those that a user asks to keep. ``dose`` exists only if the input has doses."""

FEW_CELLS = 10
"""Scores of a condition with fewer cells are mostly noise."""

SET = "set"
"""Column of obs with the set that a cell belongs to, if the store knows it."""

RESERVED = frozenset({*OBS_COLUMNS, "cell", "n_cells"})
"""Names that a further column cannot have."""

CONDITION_COLUMNS = (*SORTED_BY, "n_cells", "start", "stop", "is_control", "control", "part")


def dose_label(agent: str, dose: float) -> str:
    """Return the perturbation label of an agent at a dose, e.g. ``'imatinib@0.5'``."""
    return f"{agent}@{dose:g}"


def sort_conditions(table: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return the conditions in store order: by cell type, then batch, then the control first, then perturbation."""
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
        One row per condition in store order, indexed by condition id, with the columns `CONDITION_COLUMNS`.
        ``start`` and ``stop`` are store rows (int64). ``control`` is the id of the control condition of the same
        cell type and batch, or -1 if there is none. ``part`` is 0.
    """
    labels = list(SORTED_BY)
    plain = pd.DataFrame(obs[labels].astype(str))
    plain["n_cells"] = obs["n_cells"].to_numpy(np.int64) if "n_cells" in obs else np.int64(1)
    table = plain.groupby(labels, observed=True, sort=False)["n_cells"].sum().reset_index()
    return complete(sort_conditions(table, control), control)


def complete(table: pd.DataFrame, control: str) -> pd.DataFrame:
    """Return a sorted table of conditions with the row range and the control of each condition added."""
    table = table.copy()
    sizes: np.ndarray = table["n_cells"].to_numpy(np.int64)
    table["stop"] = np.cumsum(sizes)
    table["start"] = table["stop"] - sizes
    table["is_control"] = (table["perturbation"] == control).to_numpy()
    group: np.ndarray = table.groupby(["cell_type", "batch"], sort=False).ngroup().to_numpy()
    of_group = np.full(int(group.max(initial=-1)) + 1, -1, np.int64)
    controls = np.flatnonzero(table["is_control"])
    of_group[group[controls]] = controls
    table["control"] = of_group[group]
    table["part"] = np.int64(0)
    return pd.DataFrame(table[list(CONDITION_COLUMNS)])


Agent = tuple[str, float | None]
"""Name of an agent, and its dose if the label has one."""


def agents(
    label: str, separator: str = "+", *, names: Container[str] = (), control: str | None = None
) -> tuple[Agent, ...]:
    """Return the agents of a perturbation label and their doses.

    ``'imatinib@0.5'`` is one agent with a dose, ``'IFNG+TNF'`` is two agents without, and ``'IFNG@1+TNF@10'`` is two
    agents with a dose each. A single dose at the end (``'IFNG+TNF@10'``) applies to all agents. A Python literal, such
    as the lists of tuples (name, dose, unit) in Tahoe-100M, is parsed as data and never run. All doses are assumed
    to have the same unit.

    Parameters
    ----------
    label
        The perturbation.
    separator
        Stands between the agents of a combination. If it is empty, every label is one agent.
    names
        Known names of agents. A known name that contains the separator is not split.
    control
        Label of the control, which does not count as an agent (``'CEBPE+ctrl'`` is CEBPE alone).
    """
    everything = _agents(label.strip(), separator, names)
    return tuple(agent for agent in everything if agent[0] != control) or everything


def _agents(text: str, separator: str, names: Container[str]) -> tuple[Agent, ...]:
    if text.startswith(("[", "(")) and (listed := _literal(text)):
        return listed
    name, dose = _with_dose(text)
    if not separator or separator not in text or text in names or name in names:
        return ((name, dose),)
    pieces = [piece.strip() for piece in _split(text, separator)]
    if len(pieces) == 1 or not all(pieces):
        return ((name, dose),)
    combined = tuple(_with_dose(piece) for piece in pieces)
    if all(value is None for _, value in combined[:-1]):
        combined = tuple((agent, combined[-1][1]) for agent, _ in combined)
    return combined


def dose_values(
    labels: Iterable[str], separator: str = "+", *, names: Container[str] = ()
) -> tuple[float, ...]:
    """Return the distinct doses in ``labels``, ascending."""
    doses = {dose for label in labels for _, dose in agents(label, separator, names=names)}
    return tuple(sorted(dose for dose in doses if dose is not None))


def dose_weights(
    labels: Sequence[str],
    doses: Sequence[float],
    *,
    combination: str = "mean",
    separator: str = "+",
    names: Container[str] = (),
    control: str | None = None,
) -> np.ndarray:
    """Return the weight of each dose in each label, float32 [labels, doses].

    A single agent has weight 1 at its dose. The row of a label without a dose is zero. The doses of a combination are
    averaged or, with ``combination='sum'``, added, as the vectors of its agents are.

    Raises
    ------
    UserError
        If a label has a dose that is not one of ``doses``.
    """
    place = {float(dose): i for i, dose in enumerate(doses)}
    weights = np.zeros((len(labels), len(place)), np.float32)
    for row, label in enumerate(labels):
        combined = agents(label, separator, names=names, control=control)
        share = 1.0 if combination == "sum" else 1.0 / len(combined)
        for name, dose in combined:
            if dose is None:
                continue
            if dose not in place:
                near = sorted(sorted(place, key=lambda known, asked=dose: abs(known - asked))[:3])
                raise UserError(
                    f"perturbation {label}: the model knows no dose {dose:g} of {name}; "
                    f"the nearest it was trained with: {listing([f'{value:g}' for value in near]) or 'none'}"
                )
            weights[row, place[dose]] += share
    return weights


def _literal(text: str) -> tuple[Agent, ...] | None:
    """Return the agents of a list of tuples (name, dose, …), or None if the text is something else."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if isinstance(value, tuple) and isinstance(next(iter(value), None), str):
        value = [value]
    listed: list[Agent] = []
    for item in value if isinstance(value, list | tuple) else ():
        name, dose, *_ = (*item, None) if isinstance(item, tuple | list) and item else (None, None)
        if not isinstance(name, str) or isinstance(dose, bool) or not isinstance(dose, int | float | None):
            return None
        listed.append((name.strip(), None if dose is None else float(dose)))
    return tuple(listed) or None


def _with_dose(text: str) -> Agent:
    name, at, number = text.rpartition("@")
    try:
        dose = float(number) if at and name.strip() else math.nan
    except ValueError:
        dose = math.nan
    return (name.strip(), dose) if math.isfinite(dose) else (text.strip(), None)


def _split(text: str, separator: str) -> list[str]:
    """Split at the separator, but not inside a dose such as ``1e+06``."""
    pieces: list[str] = []
    for piece in text.split(separator):
        before = pieces[-1].rpartition("@")[2].lower() if pieces else ""
        if (
            separator == "+"
            and before.endswith("e")
            and before[:-1].replace(".", "", 1).isdigit()
            and piece[:1].isdigit()
        ):
            pieces[-1] += separator + piece
        else:
            pieces.append(piece)
    return pieces
