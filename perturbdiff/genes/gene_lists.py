"""Lists of genes: read from text files, folders of a vocabulary and data, and how the genes of cells match a list."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.conditions.gene_names import synonyms
from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.aligned_file import Cells, open_cells, write_aligned
from perturbdiff.runtime import files, provenance, tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

FILE_NAME = "genes.txt"
"""The list in a vocabulary's folder."""

_COUNTS = (".h5ad", ".h5", ".zarr")


def read_names(path: Path) -> list[str]:
    """Return the genes that a text file names, one per line, in its order; lines that begin with # do not count.

    A vocabulary's folder stands for the list in it.

    Raises
    ------
    UserError
        If there is no such file, it is empty, no text, or names a gene twice.
    """
    if (path / FILE_NAME).is_file():
        path = path / FILE_NAME
    if not path.is_file():
        folder = f" (a folder without {FILE_NAME})" if path.is_dir() else ""
        raise UserError(f"gene list not found: {path}{folder}")
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not a text file; give one gene name per line") from None
    names = pd.Index([line for line in lines if line and not line.startswith("#")], dtype=object)
    if not len(names):
        raise UserError(f"{path}: names no gene; give one gene name per line")
    if not names.is_unique:
        raise UserError(f"{path}: names a gene twice ({listing(names[names.duplicated()].unique(), 4)})")
    return names.tolist()


def short_paths(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each path: the file name, after as many of its folders as make all names differ."""
    parts = [Path(path).absolute().parts for path in paths]
    length = 1
    while True:
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names) or length > max(map(len, parts), default=0):
            return names
        length += 1


@dataclass(frozen=True)
class GeneSet:
    """The genes of a store, a list or a file, and what they are called."""

    name: str
    path: Path
    genes: list[str]


def read_gene_set(path: Path, name: str, config: DataConfig | None, scratch: Path) -> GeneSet:
    """Return the genes of a store, a vocabulary, a text file or, with ``config``, a file of counts.

    Raises
    ------
    UserError
        If there is no such thing, or it is a file of counts and none may be given.
    """
    from perturbdiff.io.counts import CountsFile
    from perturbdiff.store.store import Store

    files.existing(path, "genes to add or to cover")
    if (path / "conditions.parquet").is_file():
        return GeneSet(name, path, Store(path).genes)
    counts = path.suffix in _COUNTS or (path.is_dir() and not (path / FILE_NAME).is_file())
    if not counts:
        return GeneSet(name, path, read_names(path))
    if config is None:
        raise UserError(
            f"{path}: has all genes that were measured; give the store that preprocess made of it, or a list "
            "of genes"
        )
    file = CountsFile(path, config, scratch / "covered")
    file.close()
    return GeneSet(name, path, file.genes)


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
