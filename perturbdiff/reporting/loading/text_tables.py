"""Tables of texts that a user or the workflow gives to the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.files import existing


def read_texts(path: Path, what: str, columns: Sequence[str], needed: Sequence[str]) -> pd.DataFrame:
    """Read a CSV, every value as text, empty ones as ''.

    Parameters
    ----------
    path, what
        The file, and what it is, for messages.
    columns, needed
        What it may hold, and what it must.

    Raises
    ------
    UserError
        If it is missing, is no table or lacks a column.
    """
    remedy = f"give a CSV of {', '.join(columns)}"
    table = tabular.read_csv(existing(path, what), remedy, dtype=str, keep_default_na=False)
    if lacking := [c for c in needed if c not in table]:
        raise UserError(f"{path}: no column {listing(lacking)}; it needs {', '.join(needed)}")
    return table
