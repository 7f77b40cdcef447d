"""Figures of what a store holds, from a folder of `stats`: for that folder and for the report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures import number_texts, store_plots
from perturbdiff.reporting.figures.page_tables import Cell, Row, Table
from perturbdiff.reporting.figures.svg import Plot
from perturbdiff.reporting.loading.results import read_json, unique_names
from perturbdiff.runtime import tabular

MOST_CELL_TYPES = 30
"""Cell types shown in a figure: those with most cells."""
_DRAWN = (
    "nonzero_by_cell_type",
    "genes_per_cell",
    "genes_per_cell_list",
    "cells_per_perturbation",
    "cells_per_condition",
    "cell_types",
    "distances",
    "distance_summary",
)
_LEVELS = {
    "perturbation": "Perturbations, all cells pooled",
    "condition": "Perturbations within a cell type and batch",
}
_KINDS = {
    "within": "two halves of one perturbation",
    "between": "two perturbations",
    "control": "perturbation and control",
}


@dataclass
class DataPictures:
    """What the page shows of one store: figures with captions, and the table of distances."""

    name: str
    figures: list[tuple[Plot, str]] = field(default_factory=list)
    distances: Table | None = None

    @property
    def plots(self) -> list[Plot]:
        """Return all figures, for export."""
        return [plot for plot, _ in self.figures]


def pictures(statistics: Sequence[Path]) -> list[DataPictures]:
    """Return the figures of each folder of `stats`. Those whose tables a folder lacks are left out.

    Folders with the same tables, such as those of one store with several splits, are shown once under all their
    names.

    Raises
    ------
    UserError
        If a table cannot be read.
    """
    same: dict[bytes, list[tuple[str, Path]]] = {}
    for name, folder in zip(unique_names(statistics), statistics, strict=True):
        same.setdefault(_fingerprint(Path(folder)), []).append((name, Path(folder)))
    stores = {", ".join(name for name, _ in shown): shown[0][1] for shown in same.values()}
    by_store = [
        _pictures(f"data-{i}", name, folder) for i, (name, folder) in enumerate(stores.items(), start=1)
    ]
    return [*_side_by_side(stores), *by_store]


def _side_by_side(stores: Mapping[str, Path]) -> list[DataPictures]:
    """Return what is shown of several stores in one figure."""
    read = {name: _Tables(folder).get("genes_per_cell") for name, folder in stores.items()}
    histograms = {name: table for name, table in read.items() if table is not None}
    if len(histograms) < 2:
        return []
    plot = store_plots.outlines("data-all-sparsity", "Non-zero genes per cell", histograms)
    caption = "Each outline has the same area. The stores may have different numbers of genes."
    return [DataPictures("Data sets side by side", [(plot, caption)])]


def _fingerprint(folder: Path) -> bytes:
    """Return a hash of the tables that are drawn."""
    digest = hashlib.sha256()
    for name in _DRAWN:
        path = folder / f"{name}.csv"
        digest.update(path.read_bytes() if path.is_file() else b"")
        digest.update(b"\0" + name.encode())
    return digest.digest()


def write_figures(folder: Path) -> None:
    """Write the figures of a folder of finished tables into ``plots/`` there, as SVG."""
    drawn = _pictures("", "", Path(folder))
    place = Path(folder) / "plots"
    place.mkdir(exist_ok=True)
    for plot in drawn.plots:
        (place / f"{plot.name}.svg").write_text(plot.file, encoding="utf-8")


def _pictures(prefix: str, name: str, folder: Path) -> DataPictures:
    reader = _Tables(folder)
    of_store = DataPictures(name)
    start = f"{prefix}-" if prefix else ""
    of_store.figures += _sparsity(start, reader)
    of_store.figures += _group_sizes(start, reader)
    of_store.figures += _distances(start, reader)
    of_store.distances = _distance_table(reader.get("distance_summary"))
    return of_store


class _Tables:
    """Tables and summary of one folder. A table that is not there is None."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = read_json(folder / "summary.json")

    def get(self, name: str) -> pd.DataFrame | None:
        """Return a table, or None if it is missing or has no rows."""
        path = self.folder / f"{name}.csv"
        if not path.is_file():
            return None
        labels = ("cell_type", "batch", "group_a", "group_b", "perturbation", "interval_over")
        table = tabular.read_csv(
            path,
            "run perturbdiff stats again",
            dtype=dict.fromkeys(labels, str),
            keep_default_na=False,
            na_values=[""],
        )
        columns = [column for column in labels if column in table]
        table[columns] = table[columns].astype(object).fillna("")
        return table if len(table) else None


def _sparsity(start: str, reader: _Tables) -> list[tuple[Plot, str]]:
    figures = []
    by_type = reader.get("nonzero_by_cell_type")
    for gene_set, name, title in (
        ("store", "genes_per_cell", "Non-zero genes per cell"),
        ("list", "genes_per_cell_list", "Non-zero genes of the list per cell"),
    ):
        table = reader.get(name)
        if table is None or by_type is None:
            continue
        rows = _where(by_type, gene_set=gene_set)
        total = _where(rows, scope="all cells").iloc[0]
        text = (
            f"of {number_texts.amount(int(total['n_genes']))} genes",
            f"mean {number_texts.amount(round(float(total['mean']), 1))}",
            f"{100 * float(total['share_nonzero']):.1f} % non-zero",
        )
        label = f"{start}sparsity" if gene_set == "store" else f"{start}sparsity-list"
        plot = store_plots.histogram(label, title, table, "n_cells", ("non-zero genes", "cells"), text)
        figures.append((plot, f"{title}, over {number_texts.amount(int(total['n_cells']))} cells."))
    if by_type is not None:
        rows = _where(by_type, gene_set="store", scope="cell type")
        if len(rows) > 1:
            shown = _largest(rows)
            plot = store_plots.ranges(f"{start}sparsity-by-cell-type", "Non-zero genes by cell type", shown)
            figures.append(
                (plot, f"Middle half and median of the non-zero genes per cell.{_left(rows, shown)}")
            )
    return figures


def _where(table: pd.DataFrame, **values: str) -> pd.DataFrame:
    """Return the rows whose columns have these values."""
    keep = np.ones(len(table), np.bool_)
    for column, value in values.items():
        keep &= (table[column] == value).to_numpy()
    return pd.DataFrame(table[keep])


def _largest(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(["n_cells", "cell_type"], ascending=[False, True]).head(MOST_CELL_TYPES)


def _left(table: pd.DataFrame, shown: pd.DataFrame) -> str:
    return f" The {len(shown)} largest of {len(table)} cell types." if len(shown) < len(table) else ""


def _group_sizes(start: str, reader: _Tables) -> list[tuple[Plot, str]]:
    figures = []
    for name, key, what, title in (
        ("cells_per_perturbation", "n_perturbations", "perturbations", "Cells per perturbation"),
        (
            "cells_per_condition",
            "n_conditions",
            "combinations",
            "Cells per perturbation, cell type and batch",
        ),
    ):
        table = reader.get(name)
        known = "cells_per_perturbation" if key == "n_perturbations" else "cells_per_perturbed_condition"
        described = reader.summary.get(known)
        if table is None or not described or table[key].sum() < 2:
            continue
        text = (
            f"{number_texts.amount(int(table[key].sum()))} {what}",
            f"mean {number_texts.amount(round(float(described['mean']), 1))} cells",
        )
        label = f"{start}{name.replace('_', '-')}"
        plot = store_plots.histogram(label, title, table, key, ("cells", what), text, log_axis=True)
        figures.append((plot, f"{title}, without controls."))
    composition = reader.get("cell_types")
    if composition is not None and len(composition) > 1:
        shown = _largest(composition)
        plot = store_plots.bars(f"{start}composition", "Cell-type composition", shown)
        figures.append((plot, f"Cells of each cell type, controls too.{_left(composition, shown)}"))
    return figures


def _distances(start: str, reader: _Tables) -> list[tuple[Plot, str]]:
    table, summary = reader.get("distances"), reader.get("distance_summary")
    if table is None or summary is None:
        return []
    figures = []
    settings = (reader.summary.get("distances") or {}).get("settings", {})
    cells = settings.get("cells_per_group", "?")
    for level, title in _LEVELS.items():
        rows = _where(table, level=level)
        if rows["kind"].value_counts().max() > 2:  # else the table says it all
            means = _where(summary, level=level)
            plot = store_plots.violins(f"{start}distances-{level}", title, rows, means)
            caption = (
                f"{title}: energy distance between samples of at most {cells} cells, log1p units. Tick: mean with its "
                "95 % interval. Two samples of equal populations lie around 0."
            )
            figures.append((plot, caption))
    by_type, composition = _where(summary, level="cell type"), reader.get("cell_types")
    kind = "between" if (by_type["kind"] == "between").any() else "control"
    rows = _where(by_type, kind=kind)
    if composition is not None and len(rows) > 1:
        joined = rows.merge(composition[["cell_type", "n_cells"]], on="cell_type")
        shown = _largest(joined)
        values = _where(table, level="cell type", kind=kind)
        plot = store_plots.beside(f"{start}distances-by-cell-type", _KINDS[kind], shown, values)
        rho = (reader.summary.get("distances") or {}).get("cells_and_distance", {}).get("spearman")
        correlation = (
            ""
            if rho is None or kind != "between"
            else f" Their rank correlation is {number_texts.number(rho, 2)}."
        )
        caption = (
            f"Number of cells and energy distance ({_KINDS[kind]}) by cell type, with mean and 95 % interval."
        )
        figures.append((plot, f"{caption}{correlation}{_left(joined, shown)}"))
    return figures


def _distance_table(summary: pd.DataFrame | None) -> Table | None:
    """Return means and intervals of the distances over all cell types."""
    if summary is None:
        return None
    rows = []
    pooled = pd.DataFrame(summary[summary["level"].isin(list(_LEVELS))])
    digits = number_texts.decimals_for(pooled["mean"].tolist())
    for row in pooled.to_dict("records"):
        low, high = (number_texts.number(float(row[end]), digits) for end in ("low", "high"))
        interval = "" if np.isnan(row["low"]) else f"{low} to {high}"
        above = "" if np.isnan(row["above_within"]) else f"{100 * row['above_within']:.0f} %"
        cells = (
            Cell(_KINDS[row["kind"]]),
            Cell(number_texts.number(float(row["mean"]), digits), "num", interval),
            Cell(number_texts.number(float(row["median"]), digits), "num"),
            Cell(number_texts.number(float(row["sd"]), digits), "num"),
            Cell(above, "num"),
            Cell(number_texts.amount(int(row["n_pairs"])), "num"),
        )
        rows.append(Row(_LEVELS[row["level"]], cells))
    heads = (
        "Energy distance",
        "of",
        "mean, 95 % interval",
        "median",
        "s.d.",
        "beyond 95 % of halves",
        "pairs",
    )
    return Table(heads, tuple(rows)) if rows else None
