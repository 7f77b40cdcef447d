"""How the genes of a store or a file match a list: the report, and the stage that writes it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.aligned_file import Cells, open_cells, write_aligned
from perturbdiff.genes.gene_lists import KINDS, kinds_of, main_kind, read_names
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

FORMAT = 1
SETTINGS = ("layer", "gene_key", "input_scale")
"""Keys of `data` that an alignment depends on."""
_MOST_HINTS = 3
_ROWS = "rows"  # folder in which a matrix that is stored by columns is put in row order


def _version(name: str) -> str:
    return re.sub(r"\.\d+$", "", name)


def _punctuation(name: str) -> str:
    return re.sub(r"[._\s]", "-", name)


FORMS: dict[str, Callable[[str], str]] = {
    "case": str.lower,
    "version": _version,
    "punctuation": _punctuation,
    "spelling": lambda name: _punctuation(_version(name)).lower(),
}
"""Ways in which two spellings of a name differ, and what makes them equal; the last is all of them."""


def align_genes(
    source: Path,
    genes: Path,
    out: Path,
    config: DataConfig,
    *,
    write: Path | None = None,
    force: bool = False,
) -> Path:
    """Report how a data set's genes match a list, and write the data with the list's genes if asked.

    Parameters
    ----------
    source
        Store, or file of counts.
    genes
        Text file, or folder of a vocabulary.
    out
        Folder of the report: ``alignment.csv`` and ``summary.json``; docs/vocabulary.md describes them.
    config
        Where values and gene names of a file are.
    write
        An h5ad file to write: all cells, the list's genes in its order, values as they are stored.
    force
        Run even if an equal output is there.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If something cannot be read, or no gene is shared.
    """
    if write is not None and write.suffix != ".h5ad":
        raise UserError(
            f"--write {write}: the aligned data are written as h5ad; give a file that ends in .h5ad"
        )
    settings = {name: getattr(config, name) for name in SETTINGS} | {"format": FORMAT}
    roles = {"data": source, "genes": genes}
    wanted = read_names(genes)
    with provenance.stage("align", out, config=settings, inputs=roles, folder=True, force=force) as run:
        if not run.skip:
            with open_cells(source, config, run.scratch / _ROWS) as cells:
                table, summary = _report(cells, wanted)
            tabular.write_csv(table, run.path / "alignment.csv")
            (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            run.results |= summary
    if write is not None:
        with provenance.stage("align-write", write, config=settings, inputs=roles, force=force) as run:
            if not run.skip:
                facts = {"kind": "aligned", "source": source.name, "genes": genes.name}
                with open_cells(source, config, run.scratch / _ROWS) as cells:
                    run.results |= write_aligned(cells, _map(cells, wanted), run.path, facts)
    return out


def _map(cells: Cells, wanted: Sequence[str]) -> GeneMap:
    """Return the map from the data's genes to the list; say what to do if they are spelled in different ways."""
    if not set(wanted).intersection(cells.genes):
        kinds = [main_kind(kinds_of(names)) for names in (cells.genes, wanted)]
        alike = synonyms(wanted, cells.genes)
        if alike:
            first = next(iter(alike))
            raise UserError(
                f"{cells.path}: has no gene of the list, but {len(alike)} that differ in spelling (list '{first}', "
                f"here {alike[first]}); rename the genes of either"
            )
        if kinds[0] != kinds[1]:
            raise UserError(
                f"{cells.path}: has {KINDS[kinds[0]]} ({listing(cells.genes[:2])}), the list {KINDS[kinds[1]]} "
                f"({listing(wanted[:2])}); set data.gene_key to the var column that has {KINDS[kinds[1]]}"
            )
    return GeneMap(cells.genes, wanted, name=str(cells.path), target_name="list")


def _report(cells: Cells, wanted: Sequence[str]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read all values once; return the table of genes and the summary."""
    match = _map(cells, wanted)
    total = np.zeros(len(cells.genes))
    detected = np.zeros(len(cells.genes), np.int64)
    with track("counting", cells.n_cells) as progress:
        for block in cells.blocks():
            total += np.bincount(block.indices, block.data, len(total))
            detected += np.bincount(block.indices[block.data != 0], minlength=len(total))
            progress.advance(block.stop - block.start)
    hints = synonyms(match.missing, match.extra)
    table = _table(cells, match, total, detected, hints)
    kept, everything = float(total[match.columns >= 0].sum()), float(total.sum())
    shared = len(wanted) - len(match.missing)
    summary = {
        "cells": cells.n_cells,
        "genes_of_data": len(cells.genes),
        "genes_of_list": len(wanted),
        "shared": shared,
        "missing": len(match.missing),
        "extra": len(match.extra),
        "share_of_list": round(shared / len(wanted), 6),
        "share_of_data": round(shared / len(cells.genes), 6),
        "unit": cells.unit,
        "total": everything,
        "kept": kept,
        "share_kept": round(kept / everything, 6) if everything else None,
        "possible_synonyms": len(hints),
    }
    logger.info("%s", match.report())
    if hints:
        logger.warning(
            "%d missing genes may be there under another spelling (e.g. '%s': %s); see alignment.csv",
            len(hints), *next(iter(hints.items())),
        )  # fmt: skip
    return table, summary


def _table(
    cells: Cells, match: GeneMap, total: np.ndarray, detected: np.ndarray, hints: dict[str, str]
) -> pd.DataFrame:
    """Return one row per gene: those of the list in its order, then the data's others."""
    names = [*match.target, *match.extra]
    column = pd.Index(match.source).get_indexer(pd.Index(names))
    in_data, number = column >= 0, np.arange(len(names))
    place = np.where(number < len(match.target), number, -1)
    status = np.where(in_data, np.where(place >= 0, "shared", "extra"), "missing")
    return pd.DataFrame(
        {
            "gene": names,
            "status": status,
            "place": place,
            "column": column,
            "total": np.where(in_data, total[column], 0.0),
            "cells": np.where(in_data, detected[column], 0),
            "possible_synonym": [hints.get(name, "") for name in names],
        }
    )


def synonyms(missing: Sequence[str], extra: Sequence[str]) -> dict[str, str]:
    """Return for ``missing`` names those of ``extra`` that differ only in case, version or punctuation.

    Returns
    -------
    dict
        ``"TP53" → "tp53 (case)"``; several candidates are joined by ``" or "``.
    """
    hints: dict[str, str] = {}
    for difference, form in FORMS.items():
        spellings: dict[str, list[str]] = {}
        for name in extra:
            spellings.setdefault(form(name), []).append(name)
        for name in missing:
            if name not in hints and form(name) in spellings:
                hints[name] = f"{' or '.join(spellings[form(name)][:_MOST_HINTS])} ({difference})"
    return {name: hints[name] for name in missing if name in hints}
