"""How the genes of a store or a file match a list: the report, and the stage that writes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.gene_names import synonyms
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.aligned_file import Cells, open_cells, write_aligned
from perturbdiff.genes.gene_lists import read_names
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

FORMAT = 1
SETTINGS = ("layer", "gene_key", "duplicate_genes", "input_scale")
"""Keys of `data` that an alignment depends on."""
_ROWS = "rows"  # folder in which a matrix that is stored by columns is put in row order


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
    settings = {name: value for name, value in config.recorded().items() if name in SETTINGS}
    settings["format"] = FORMAT
    roles = {"data": source, "genes": genes, **config.files}
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
    """Return the map from the data's genes to the list."""
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
