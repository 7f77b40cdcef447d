"""What a submission has to be, and the panel of genes, perturbations and contexts that it is for.

The rules of ``vcc2026`` are those that ``vcc prep`` of vcc-cli 0.3.0 enforces before an upload, those of ``cell-eval2``
what cell-eval2 0.20.0 accepts with its preset ``vcc2026`` (docs/vcc2026_metrics/vcc2026-metrics.md, "Submissions").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.io.input_file import InputFile
from perturbdiff.io.opening import open_root
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.files import existing

PERTURBATION, CONTEXT, NUMBER = "target_gene", "context", "n_cells"
"""Columns of a submission and of the competition's list of perturbations."""
_PRESET = "target"
"""The perturbation's column in the presets of cell-eval2."""

_HEADERS = ("gene_name", "gene_names", "gene", "genes", "gene_symbol")
_MATRICES = (".h5ad", ".zarr", ".h5")
_MANIFEST = "manifest.json"
_SMALL = 1 << 18  # bytes; a larger manifest is not the competition's


@dataclass(frozen=True)
class Rules:
    """What is accepted.

    Attributes
    ----------
    what
        One sentence for messages and help.
    controls
        Whether control cells belong into the file; else they must not be there.
    panel
        Whether contexts and perturbations must be exactly those of the panel.
    cells
        Number of cells of each perturbation in each context; None: any.
    most_cells, most_values
        Largest number of cells and of stored values; None: no limit.
    most_counts
        Largest sum of a cell's counts.
    control
        Label of the control cells.
    columns
        Columns of obs with the perturbation.
    """

    what: str
    controls: bool
    panel: bool
    cells: int | None = None
    most_cells: int | None = None
    most_values: int | None = None
    most_counts: int = 1_000_000
    control: str = "non-targeting"
    columns: tuple[str, ...] = (PERTURBATION,)


RULES: Mapping[str, Rules] = {
    "vcc2026": Rules(
        "an upload to the Virtual Cell Challenge 2026, to be packed by 'vcc prep'",
        controls=False, panel=True, cells=400, most_cells=400_000, most_values=4_750_000_000,
    ),
    "cell-eval2": Rules(
        "a file for 'cell-eval2 run --preset vcc2026', with control cells",
        controls=True, panel=False, columns=(PERTURBATION, _PRESET),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """What a submission is for.

    Attributes
    ----------
    genes
        Names of the columns, in order.
    perturbations
        Number of cells (None: that of the rules) of each perturbation, by context; under None what holds in every
        context. None: not known.
    contexts
        Labels of the contexts; None: not known.
    """

    genes: list[str]
    perturbations: Mapping[str | None, Mapping[str, int | None]] | None = None
    contexts: tuple[str, ...] | None = None

    def wanted(self, context: str) -> Mapping[str, int | None]:
        """Return the perturbations of a context and their numbers of cells."""
        lists = self.perturbations or {}
        return lists.get(context, lists.get(None, {}))


def read_panel(genes: Path, perturbations: Path | None, contexts: tuple[str, ...] | None) -> Panel:
    """Read the panel from the competition's files.

    Parameters
    ----------
    genes
        Text file with a gene per line (``gene_names.csv``, with or without a header), or an AnnData file whose genes
        are taken: the competition's control cells, or the truth.
    perturbations
        Table with ``target_gene`` and optionally ``context`` and ``n_cells`` (``pert_counts.csv``).
    contexts
        Labels of the contexts. Default: those of the ``manifest.json`` beside one of the files, if there is one.

    Raises
    ------
    UserError
        If a file cannot be read, names a gene twice or lacks a column.
    """
    listed = None if perturbations is None else _read_perturbations(perturbations)
    beside = [path for path in (perturbations, genes) if path is not None]
    return Panel(_read_genes(genes), listed, contexts or _contexts_beside(beside))


def _read_genes(path: Path) -> list[str]:
    if existing(path, "gene list").suffix in _MATRICES:
        file = InputFile(path, open_root(path), may_be_empty=True)
        file.close()
        return file.genes
    table = tabular.read_csv(
        path, "give one gene name per line", header=None, dtype=str, keep_default_na=False
    )
    names = pd.Index(table[0].str.strip())
    names = names[1:] if str(names[0]).lower() in _HEADERS else names
    if not len(names):
        raise UserError(f"{path}: names no gene; give one gene name per line")
    if not names.is_unique:
        raise UserError(f"{path}: names a gene twice ({listing(names[names.duplicated()].unique(), 4)})")
    return names.tolist()


def _read_perturbations(path: Path) -> dict[str | None, dict[str, int | None]]:
    table = tabular.read_csv(
        existing(path, "list of perturbations"), f"give a CSV with a column {PERTURBATION}", dtype=str,
        keep_default_na=False,
    )  # fmt: skip
    if PERTURBATION not in table:
        raise UserError(
            f"{path}: lacks the column {PERTURBATION}; give the competition's pert_counts.csv; columns: "
            f"{listing(table.columns)}"
        )
    names = table[PERTURBATION].str.strip().to_numpy(object)
    contexts = table[CONTEXT].to_numpy(object) if CONTEXT in table else np.full(len(table), None)
    numbers = np.full(len(table), np.nan)
    if NUMBER in table:
        numbers = np.asarray(pd.to_numeric(table[NUMBER], errors="coerce"), np.float64)
    lists: dict[str | None, dict[str, int | None]] = {}
    for name, context, number in zip(names, contexts, numbers, strict=True):
        if name not in ("", RULES["vcc2026"].control):
            lists.setdefault(context, {})[name] = int(number) if number >= 1 and np.isfinite(number) else None
    if not lists:
        raise UserError(f"{path}: names no perturbation; give the competition's pert_counts.csv")
    return lists


def _contexts_beside(paths: list[Path]) -> tuple[str, ...] | None:
    """Return the contexts that the ``manifest.json`` of the competition's folder names, if it is there."""
    for path in paths:
        manifest = path.parent / _MANIFEST
        if manifest.is_file() and manifest.stat().st_size <= _SMALL:
            try:
                found = json.loads(manifest.read_text()).get("contexts")
            except (ValueError, AttributeError):
                continue
            if isinstance(found, list) and found:
                return tuple(map(str, found))
    return None
