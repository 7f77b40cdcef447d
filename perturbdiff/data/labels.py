"""From obs columns to conditions: cell type, batch and perturbation (with its dose) of every cell."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.config import DataConfig
from perturbdiff.data.counts import CountsFile, Inputs
from perturbdiff.data.schema import ALL, LABELS, RESERVED, dose_label, sort_conditions
from perturbdiff.errors import UserError, listing, nearest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Labels:
    """The conditions of the inputs' cells.

    Attributes
    ----------
    conditions
        One row per condition in store order: ``cell_type, batch, perturbation, n_cells``.
    codes
        Row of ``conditions`` for every cell, in input order, int32 (4 bytes per cell).
    perturbations
        One row per perturbation: ``perturbation, agent, dose`` (nan without a dose).
    """

    conditions: pd.DataFrame
    codes: np.ndarray
    perturbations: pd.DataFrame


def read_labels(inputs: Inputs) -> Labels:
    """Return the condition of every cell of ``inputs``, reading obs only.

    Raises
    ------
    UserError
        If a column is missing or has missing values, a dose is not a number, or no cell is a control.
    """
    config = inputs.config
    tables, codes, doses = [], [], {}
    for file in inputs.files:
        frame = _label_frame(file, config, doses)
        numbers = frame.groupby(list(LABELS), observed=True, sort=False).ngroup().to_numpy().astype(np.int32)
        seen, first, counts = np.unique(numbers, return_index=True, return_counts=True)
        table = frame.iloc[first].astype(str).reset_index(drop=True)
        table["n_cells"] = counts
        tables.append(table)
        codes.append(numbers if len(seen) == numbers.max() + 1 else np.searchsorted(seen, numbers))
    rows = pd.concat(tables, ignore_index=True)
    total = rows.groupby(list(LABELS), sort=False)["n_cells"].sum().reset_index()
    conditions = sort_conditions(total, config.control)
    _check_control(conditions, inputs)
    place = pd.MultiIndex.from_frame(pd.DataFrame(conditions[list(LABELS)]))
    for number, table in enumerate(tables):
        to_global = place.get_indexer(pd.MultiIndex.from_frame(table[list(LABELS)])).astype(np.int32)
        codes[number] = to_global[codes[number]]
    every = codes[0] if len(codes) == 1 else np.concatenate(codes)
    return Labels(conditions, every, _perturbations(conditions, doses))


def conditions_of(inputs: Sequence[Path], config: DataConfig) -> pd.DataFrame:
    """Return the conditions of raw inputs before a store exists, reading obs only.

    Parameters
    ----------
    inputs
        h5ad files or Zarr stores.
    config
        Names of the columns.

    Returns
    -------
    pd.DataFrame
        Columns ``cell_type, batch, perturbation``, the configured ``extra_obs`` (str) and ``n_cells``: one
        row per condition, and several where an extra column has several values within it.
    """
    with Inputs(inputs, config, Path()) as opened:
        labels = read_labels(opened)
        names = extra_names(config)
        if not names:
            return labels.conditions
        columns = [pd.Categorical(extra_column(opened, name)) for name in names]
    frame = pd.DataFrame(dict(enumerate([labels.codes, *columns]))).assign(n_cells=1)
    keys = list(range(len(names) + 1))
    grouped = pd.DataFrame(frame.groupby(keys, observed=True, sort=False, dropna=False).sum().reset_index())
    table = pd.DataFrame(labels.conditions.loc[grouped[0], list(LABELS)]).reset_index(drop=True)
    for number, name in enumerate(names, 1):
        table[name] = grouped[number].astype(str)
    return sort_conditions(table.assign(n_cells=grouped["n_cells"]), config.control)


def extra_names(config: DataConfig) -> tuple[str, ...]:
    """Return the further obs columns to keep, without those that are kept as a label anyway.

    Raises
    ------
    UserError
        If one has the name of another column of the store.
    """
    own = {"cell_type": config.cell_type_key, "batch": config.batch_key, "dose": config.dose_key}
    own |= {"perturbation": config.perturbation_key if config.dose_key is None else None}
    kept = tuple(name for name in config.extra_obs if own.get(name) != name)
    taken = [name for name in kept if name in RESERVED]
    if taken:
        raise UserError(
            f"data.extra_obs: the store has a column '{taken[0]}' of its own; rename that obs column of the input"
        )
    return kept


def extra_column(inputs: Inputs, name: str) -> pd.Series:
    """Return a further obs column of all files: numbers stay numbers, anything else is categorical text.

    A missing text is the empty string.
    """
    parts = [file.column(name, "data.extra_obs") for file in inputs.files]
    if all(pd.api.types.is_numeric_dtype(p) and not pd.api.types.is_bool_dtype(p) for p in parts):
        return pd.concat(parts, ignore_index=True)
    texts = [_as_text(p) for p in parts]
    categories = sorted({""}.union(*(t.categories for t in texts)))
    codes = [
        pd.Index(categories).get_indexer(pd.Index([*t.categories, ""])).astype(np.int32)[t.codes]
        for t in texts
    ]
    return pd.Series(pd.Categorical.from_codes(np.concatenate(codes), categories))


def _as_text(values: pd.Series) -> pd.Categorical:
    """Return a column as a categorical of text, with missing values where it has them.

    A whole number stored as a float loses its '.0'.
    """
    found = pd.Categorical(values)
    names = [
        str(int(c)) if isinstance(c, float) and c.is_integer() else str(c) for c in found.categories.tolist()
    ]
    unique = sorted(set(names))
    place = np.append(pd.Index(unique).get_indexer(pd.Index(names)), -1).astype(np.int32)
    return pd.Categorical.from_codes(place[found.codes], unique)


def _label_frame(file: CountsFile, config: DataConfig, doses: dict[str, tuple[str, float]]) -> pd.DataFrame:
    """Return the three labels of a file's cells as categoricals, noting agents and doses in ``doses``."""
    if config.perturbation_key is None:
        perturbation = _constant(file, config.control)
    else:
        perturbation = _categorical(file, config.perturbation_key, "data.perturbation_key")
    if config.dose_key is not None and config.perturbation_key is not None:
        perturbation = _with_dose(file, perturbation, config, doses)
    columns = {"perturbation": perturbation}
    keys = {"cell_type": config.cell_type_key, "batch": config.batch_key}
    for label, key in keys.items():
        if key is None:
            columns[label] = _constant(file, ALL)
        else:
            columns[label] = _categorical(file, key, f"data.{label}_key; null if the data has none")
    return pd.DataFrame({label: columns[label] for label in LABELS})


def _constant(file: CountsFile, label: str) -> pd.Categorical:
    return pd.Categorical.from_codes(np.zeros(file.n_cells, np.int8), [label])


def _categorical(file: CountsFile, name: str, role: str) -> pd.Categorical:
    found = _as_text(file.column(name, role))
    empty = found.categories.get_loc("") if "" in found.categories else -1
    missing = (found.codes == -1) | (found.codes == empty)
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        cell = file.cell_names(row, row + 1)[0]
        raise UserError(
            f"{file.path}: obs column '{name}' has {int(missing.sum())} missing values (first: cell '{cell}'); "
            "give these cells a label or drop them"
        )
    return found


def _with_dose(
    file: CountsFile, agents: pd.Categorical, config: DataConfig, doses: dict[str, tuple[str, float]]
) -> pd.Categorical:
    name = str(config.dose_key)
    raw = file.column(name, "data.dose_key")
    plain = raw.astype(object) if isinstance(raw.dtype, pd.CategoricalDtype) else raw
    values = np.asarray(pd.to_numeric(plain, errors="coerce"), np.float64)
    control = np.asarray(agents == config.control)
    wrong = ~np.isfinite(values) & ~control
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UserError(
            f"{file.path}: obs column '{name}' is not a number for {int(wrong.sum())} treated cells "
            f"(first: {plain.iloc[row]!r}, cell '{file.cell_names(row, row + 1)[0]}'); give doses as numbers"
        )
    levels, level = np.unique(np.where(control, 0.0, values), return_inverse=True)
    pair = agents.codes.astype(np.int64) * len(levels) + level
    seen, codes = np.unique(pair, return_inverse=True)
    labels = []
    for number in seen:
        agent, dose = str(agents.categories[number // len(levels)]), float(levels[number % len(levels)])
        label = agent if agent == config.control else dose_label(agent, dose)
        doses.setdefault(label, (agent, np.nan if agent == config.control else dose))
        labels.append(label)
    unique = sorted(set(labels))
    place = np.array([unique.index(label) for label in labels])
    return pd.Categorical.from_codes(place[codes], unique)


def _check_control(conditions: pd.DataFrame, inputs: Inputs) -> None:
    config = inputs.config
    names = listing([f.path.name for f in inputs.files], 3)
    labels = conditions["perturbation"].unique()
    if config.control not in labels:
        hint = nearest(config.control, labels) or f"; its labels are {listing(labels)}"
        raise UserError(
            f"{names}: no control cells, '{config.control}' (data.control) is not a label of obs column "
            f"'{config.perturbation_key}'{hint}"
        )
    if len(labels) == 1:
        logger.warning("%s: every cell is a control; there is no perturbation to learn", names)
    groups = conditions.groupby(["cell_type", "batch"])["perturbation"]
    without = [f"{key[0]} / {key[1]}" for key, group in groups if config.control not in set(group)]  # type: ignore[index]
    if without:
        logger.warning(
            "%d combinations of cell type and batch have no control cells (%s); "
            "their cells can be stored but not used as sets",
            len(without),
            listing(without, 4),
        )


def _perturbations(conditions: pd.DataFrame, doses: dict[str, tuple[str, float]]) -> pd.DataFrame:
    labels = sorted(conditions["perturbation"].unique())
    pairs = [doses.get(label, (label, np.nan)) for label in labels]
    return pd.DataFrame(
        {
            "perturbation": labels,
            "agent": [p[0] for p in pairs],
            "dose": np.array([p[1] for p in pairs], float),
        }
    )
