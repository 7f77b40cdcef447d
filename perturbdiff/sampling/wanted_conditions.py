"""A table of the conditions to predict, as a user gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from perturbdiff.conditions.condition import LABELS
from perturbdiff.io.recognise import confusion
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.files import existing
from perturbdiff.sampling.condition_sampler import ORIGIN
from perturbdiff.store.store import Store


def read_requests(path: Path, store: Store, columns: Mapping[str, str | None] | None = None) -> pd.DataFrame:
    """Read a table of conditions to predict.

    Parameters
    ----------
    path
        CSV with ``cell_type, batch, perturbation`` and optionally ``n_cells`` and ``guidance``. A column of labels
        may be left out if 'all' is the only label in the store.
    store
        The store, which knows the number of cells in each condition.
    columns
        The table's own names of ``perturbation``, ``cell_type`` and ``batch`` where they are others.

    Returns
    -------
    pd.DataFrame
        The labels (str), ``n_cells`` (float; nan: neither in the table nor in the store) and, if the table has it,
        ``guidance`` (float; nan: as in the recipe).

    Raises
    ------
    UserError
        If the table cannot be read, lacks a column or has an invalid number.
    """
    wanted = "give a CSV of cell_type, batch, perturbation"
    if other := confusion(existing(path, "table of conditions"), "a table of conditions (CSV)"):
        raise UserError(f"{path}: {other}; {wanted}")
    table = tabular.read_csv(path, wanted, dtype=str, keep_default_na=False)
    table = _renamed(path, table, columns or {})
    for name in LABELS:
        only = store.conditions[name].unique()
        if name not in table and list(only) == ["all"]:
            table[name] = "all"
    missing = [name for name in LABELS if name not in table]
    table = table.drop(columns=[name for name in table if name not in (*LABELS, "n_cells", "guidance")])
    if missing or not len(table):
        what = f"lacks the column {missing[0]}" if missing else "has no rows"
        raise UserError(
            f"{path}: {what}; it needs cell_type, batch, perturbation and optionally n_cells, or the names of its own "
            "columns by --cell-type-col, --batch-col, --pert-col"
        )
    if table.duplicated(list(LABELS)).any():
        raise UserError(
            f"{path}: a condition occurs twice; give each (cell_type, batch, perturbation) one row"
        )
    known = store.conditions.set_index(list(LABELS))["n_cells"].astype(float)
    known_numbers = known.reindex(pd.MultiIndex.from_frame(pd.DataFrame(table[list(LABELS)]))).to_numpy()
    numbers = _numbers(
        path, table, "n_cells", "whole numbers from 1 to 1e9", lambda n: n.between(1, 1e9) & (n % 1 == 0)
    )
    table["n_cells"] = numbers.fillna(pd.Series(known_numbers, index=table.index))
    if "guidance" in table:
        table["guidance"] = _numbers(
            path, table, "guidance", "numbers not below 0", lambda w: w.between(0, 1e6)
        )
    table.attrs[ORIGIN] = str(path)
    return table


def _renamed(path: Path, table: pd.DataFrame, columns: Mapping[str, str | None]) -> pd.DataFrame:
    """Return the table with its label columns under our names."""
    named = {label: column for label, column in columns.items() if column is not None}
    for column in named.values():
        if column not in table:
            hint = nearest(column, table.columns) or f"; columns: {listing(table.columns)}"
            raise UserError(f"{path}: no column '{column}'{hint}")
    taken = [label for label in named if label in table and label not in named.values()]
    return table.drop(columns=taken).rename(columns={column: label for label, column in named.items()})


def _numbers(
    path: Path, table: pd.DataFrame, name: str, wanted: str, fits: Callable[[pd.Series], pd.Series]
) -> pd.Series:
    """Return a column as floats, with nan where a cell is empty or the column is missing."""
    if name not in table:
        return pd.Series(float("nan"), index=table.index)
    text = table[name].str.strip()
    number = pd.Series(pd.to_numeric(text, errors="coerce"), index=table.index)
    wrong = text.ne("") & ~fits(number)
    if wrong.any():
        raise UserError(f"{path}: {name} must be {wanted}, found '{text[wrong].iloc[0]}'")
    return number
