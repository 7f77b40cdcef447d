"""What the data are, for the report: folders of `stats` and splits as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from perturbdiff.report.figures import page_tables
from perturbdiff.report.figures.page_tables import Cell, Row, Table
from perturbdiff.report.loading.results import read_json, unique_names
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError

_EXPLAINED = {
    "depth": ", counts per cell",
    "sparsity": ", share of zeros",
    "control": " label",
}
_SHARES = ("sparsity", "share", "fraction")


def read_splits(paths: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """Return the splits by their names.

    Raises
    ------
    UserError
        If a file is not a split.
    """
    found = {}
    for name, path in zip(unique_names(paths), paths, strict=True):
        table = tabular.read_parquet(path, "give a split, as 'perturbdiff split' writes it")
        if "part" not in table:
            raise UserError(f"{path}: no column 'part'; give a file written by 'perturbdiff split'")
        found[name.removesuffix(".parquet")] = table
    return found


def data_tables(statistics: Sequence[Path], splits: Mapping[str, pd.DataFrame]) -> list[Table]:
    """Return the facts of each data set side by side, and conditions and cells per part of each split."""
    found = []
    facts = {n: _facts(p) for n, p in zip(unique_names(statistics), statistics, strict=True)}
    if facts:
        keys = list(dict.fromkeys(k for record in facts.values() for k in record))
        rows = [Row(_words(k), tuple(Cell(_shown(k, r.get(k)), "num") for r in facts.values())) for k in keys]
        found.append(Table(("", *facts), tuple(rows), "Cells, genes, depth"))
    if (counts := page_tables.parts(splits)) is not None:
        found.append(Table(counts.columns, counts.rows, "Parts of the split"))
    return found


def _facts(folder: Path) -> dict[str, Any]:
    """Return the single numbers and words of a folder of `stats`."""
    record = read_json(folder / "summary.json")
    if not record:
        raise UserError(f"{folder}: no summary.json; is it a folder written by 'perturbdiff stats'?")
    return _flat(record)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and words, and of each distribution its median with the middle half."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and {"median", "quartile_1", "quartile_3"} <= set(value):
            middle, low, high = (page_tables.amount(value[k]) for k in ("median", "quartile_1", "quartile_3"))
            found[f"{_words(key)}: median (middle half)"] = f"{middle} ({low} to {high})"
        elif isinstance(value, str | int | float):
            found[key] = value
    return found


def _words(key: str) -> str:
    return f"{key.removeprefix('n_').removeprefix('num_').replace('_', ' ')}{_EXPLAINED.get(key, '')}"


def _shown(key: str, value: Any) -> str:
    if isinstance(value, float) and any(word in key for word in _SHARES) and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return page_tables.amount(value)
