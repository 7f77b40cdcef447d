"""Tables of conditions to predict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from perturbdiff.predictions import LABELS
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store


def read_requests(path: Path, store: Store) -> pd.DataFrame:
    """Read a table of conditions to predict.

    Parameters
    ----------
    path
        CSV with ``cell_type, batch, perturbation`` and optionally ``n_cells`` and ``guidance``; a column of labels
        may be left out if the store's one label is 'all'.
    store
        Tells how many cells it has of each condition.

    Returns
    -------
    pd.DataFrame
        The labels (str), ``n_cells`` (float; nan: neither told nor in the store) and, if the table has it,
        ``guidance`` (float; nan: the recipe's).

    Raises
    ------
    UserError
        If it cannot be read, lacks a column, or a number is not what it must be.
    """
    table = tabular.read_csv(
        path, "give a CSV of cell_type, batch, perturbation", dtype=str, keep_default_na=False
    )
    for name in LABELS:
        only = store.conditions[name].unique()
        if name not in table and list(only) == ["all"]:
            table[name] = "all"
    missing = [name for name in LABELS if name not in table]
    table = table.drop(columns=[name for name in table if name not in (*LABELS, "n_cells", "guidance")])
    if missing or not len(table):
        what = f"lacks the column {missing[0]}" if missing else "has no rows"
        raise UserError(f"{path}: {what}; it needs cell_type, batch, perturbation and optionally n_cells")
    if table.duplicated(list(LABELS)).any():
        raise UserError(
            f"{path}: a condition occurs twice; give each (cell_type, batch, perturbation) one row"
        )
    known = store.conditions.set_index(list(LABELS))["n_cells"].astype(float)
    there = known.reindex(pd.MultiIndex.from_frame(pd.DataFrame(table[list(LABELS)]))).to_numpy()
    told = _numbers(
        path, table, "n_cells", "whole numbers from 1 to 1e9", lambda n: n.between(1, 1e9) & (n % 1 == 0)
    )
    table["n_cells"] = told.fillna(pd.Series(there, index=table.index))
    if "guidance" in table:
        table["guidance"] = _numbers(
            path, table, "guidance", "numbers not below 0", lambda w: w.between(0, 1e6)
        )
    return table


def _numbers(
    path: Path, table: pd.DataFrame, name: str, wanted: str, fits: Callable[[pd.Series], pd.Series]
) -> pd.Series:
    """Return a column as floats, nan where a cell is empty or the column is not there."""
    if name not in table:
        return pd.Series(float("nan"), index=table.index)
    text = table[name].str.strip()
    number = pd.Series(pd.to_numeric(text, errors="coerce"), index=table.index)
    wrong = text.ne("") & ~fits(number)
    if wrong.any():
        raise UserError(f"{path}: {name} must be {wanted}, found '{text[wrong].iloc[0]}'")
    return number
