"""Tables of what stores hold, for the report: their facts side by side, the parts of splits, the paper's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from perturbdiff.reporting.figures import number_texts, page_tables
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.loading.results import read_json, unique_names
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
    splits = {}
    for name, path in zip(unique_names(paths), paths, strict=True):
        table = tabular.read_parquet(path, "give a split, as 'perturbdiff split' writes it")
        if "part" not in table:
            raise UserError(f"{path}: no column 'part'; give a file written by 'perturbdiff split'")
        splits[name.removesuffix(".parquet")] = table
    return splits


def data_tables(statistics: Sequence[Path], splits: Mapping[str, pd.DataFrame]) -> list[Table]:
    """Return the facts of each data set side by side, and conditions and cells per part of each split."""
    tables = []
    facts = {n: _facts(p) for n, p in zip(unique_names(statistics), statistics, strict=True)}
    if facts:
        keys = list(dict.fromkeys(k for record in facts.values() for k in record))
        rows = [Row(_words(k), tuple(Cell(_shown(k, r.get(k)), "num") for r in facts.values())) for k in keys]
        tables.append(Table(("", *facts), tuple(rows), "Cells, genes, depth"))
    if (counts := page_tables.parts(splits)) is not None:
        tables.append(Table(counts.columns, counts.rows, "Parts of the split"))
    return tables + _beside_the_paper(statistics)


def _beside_the_paper(statistics: Sequence[Path]) -> list[Table]:
    """Return the paper's numbers of each data set beside those of its store, where `stats` was asked for them.

    Stores of one data set with the same numbers are shown once.
    """
    tables: dict[tuple[Row, ...], Table] = {}
    for name, folder in zip(unique_names(statistics), statistics, strict=True):
        path = Path(folder) / "paper_counts.csv"
        if not path.is_file():
            continue
        found = tabular.read_csv(path, "run perturbdiff stats again")
        rows = tuple(
            Row(
                str(row["number"]),
                (
                    Cell(number_texts.amount(row["paper"]), "num", value=row["paper"]),
                    Cell(number_texts.amount(row["here"]), "num", value=row["here"]),
                    Cell(
                        "equal" if row["agrees"] else f"{100 * row['difference']:+.2g} %".replace("-", "−"),
                        "num",
                    ),
                ),
            )
            for row in found.to_dict("records")
        )
        title = f"Beside the paper’s counts: {name.removesuffix('.stats')}"
        tables.setdefault(rows, Table(("", "paper", "here", "difference"), rows, title))
    return list(tables.values())


def _facts(folder: Path) -> dict[str, Any]:
    """Return the single numbers and words of a folder of `stats`."""
    record = read_json(folder / "summary.json")
    if not record:
        raise UserError(f"{folder}: no summary.json; is it a folder written by 'perturbdiff stats'?")
    return _flat(record)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and words, and of each distribution its median with the middle half."""
    facts: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and {"median", "quartile_1", "quartile_3"} <= set(value):
            middle, low, high = (
                number_texts.amount(value[k]) for k in ("median", "quartile_1", "quartile_3")
            )
            facts[f"{_words(key)}: median (middle half)"] = f"{middle} ({low} to {high})"
        elif isinstance(value, str | int | float):
            facts[key] = value
    return facts


def _words(key: str) -> str:
    return f"{key.removeprefix('n_').removeprefix('num_').replace('_', ' ')}{_EXPLAINED.get(key, '')}"


def _shown(key: str, value: Any) -> str:
    if isinstance(value, float) and any(word in key for word in _SHARES) and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return number_texts.amount(value)
