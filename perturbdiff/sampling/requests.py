"""Tables of conditions to predict."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from perturbdiff.data.store import Store
from perturbdiff.errors import UserError
from perturbdiff.predictions import LABELS


def read_requests(path: Path, store: Store) -> pd.DataFrame:
    """Read a table of conditions to predict; see `sample`.

    Raises
    ------
    UserError
        If it cannot be read, lacks a column, or a number of cells is not a positive whole number.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a CSV table ({error})") from None
    for name in LABELS:
        only = store.conditions[name].unique()
        if name not in table and list(only) == ["all"]:
            table[name] = "all"
    missing = [name for name in LABELS if name not in table]
    if missing or not len(table):
        what = f"lacks the column {missing[0]}" if missing else "has no rows"
        raise UserError(f"{path}: {what}; it needs cell_type, batch, perturbation and optionally n_cells")
    if table.duplicated(list(LABELS)).any():
        raise UserError(
            f"{path}: a condition occurs twice; give each (cell_type, batch, perturbation) one row"
        )
    known = store.conditions.set_index(list(LABELS))["n_cells"].astype(float)
    rows = pd.MultiIndex.from_frame(pd.DataFrame(table[list(LABELS)]))
    table["there"] = known.reindex(rows).to_numpy()
    if "n_cells" not in table:
        return table.assign(n_cells=table["there"])
    text = table["n_cells"].str.strip()
    number = pd.Series(pd.to_numeric(text, errors="coerce"), index=table.index)
    wrong = text.ne("") & ~((number >= 1) & (number % 1 == 0))
    if wrong.any():
        raise UserError(f"{path}: n_cells must be whole numbers above 0, found '{text[wrong].iloc[0]}'")
    return table.assign(n_cells=number.where(text.ne(""), table["there"]))
