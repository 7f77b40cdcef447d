"""How the genes of a store or a file match a list: a report, and the cells with just the list's genes."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import anndata
import h5py
import numpy as np
import pandas as pd

from perturbdiff.conditions.vocabulary import GeneMap
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_lists import KINDS, kinds_of, main_kind, read_names
from perturbdiff.io import h5_output
from perturbdiff.io.counts import CountsFile
from perturbdiff.io.h5_output import append, growing, recast
from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block
from perturbdiff.io.zarr_check import open_group
from perturbdiff.runtime import provenance, tabular
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import track
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

DEPTH = "depth_before_alignment"
"""obs column: sum of a cell's values over all genes of the source. Genes that are dropped cannot be summed later."""
_CHUNK = 1 << 18
_NAMES_PER_WRITE = 1 << 16
_INT32_MAX = np.iinfo(np.int32).max
FORMAT = 1
SETTINGS = ("layer", "gene_key", "input_scale")
"""Keys of `data` that an alignment depends on."""
_MOST_HINTS = 3
_ROWS = "rows"
"""Folder in which a matrix that is stored by columns is put in row order."""


class CellSource(Protocol):
    """What a store and a file of counts (`CountsFile`) can do.

    Attributes
    ----------
    path
        Where it is.
    genes
        Names of the columns of blocks.
    n_cells
        Number of rows.
    """

    path: Path
    genes: list[str]
    n_cells: int

    @property
    def unit(self) -> str:
        """Return what the values are: ``counts`` or ``log1p``."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Yield all rows in consecutive blocks."""
        ...

    @property
    def columns(self) -> list[str]:
        """Return the names of the obs columns."""
        ...

    def column(self, name: str) -> pd.Series:
        """Return an obs column."""
        ...

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the names of rows ``start`` to ``stop``, object array of str."""
        ...


class _StoreCells:
    def __init__(self, store: Store) -> None:
        self._store, self.path = store, store.path
        self.genes, self.n_cells, self.unit = list(store.genes), store.n_cells, store.input_scale

    def blocks(self) -> Iterator[Block]:
        store = self._store
        rows = max(1, int(VALUES_PER_BLOCK * store.n_cells / max(1, store.n_values)))
        for start in range(0, self.n_cells, rows):
            stop = min(start + rows, self.n_cells)
            part = store.counts(slice(start, stop))
            indptr, indices = np.asarray(part.indptr, np.int64), np.asarray(part.indices, np.int32)
            exact = np.float64 if store.dtype == np.uint32 else np.float32
            yield Block(start, stop, indptr, indices, np.asarray(part.data, exact))

    @property
    def columns(self) -> list[str]:
        first = sorted(self.path.glob("part-*.zarr"))[0]
        group: Any = open_group(first)["obs"]
        return [str(name) for name in group.attrs["column-order"]]

    def column(self, name: str) -> pd.Series:
        return pd.Series(self._store.obs([name])[name])

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        return self._store.cell_names(start, stop)


@contextlib.contextmanager
def open_cells(path: Path, config: DataConfig, scratch: Path) -> Iterator[CellSource]:
    """Open a store or a file of counts; ``scratch`` takes what must be put in row order.

    Raises
    ------
    UserError
        If it is neither, or is damaged.
    """
    if (path / "conditions.parquet").is_file():
        yield _StoreCells(Store(path))
        return
    with contextlib.closing(CountsFile(path, config, scratch)) as file:
        file.prepare()
        yield file


def write_aligned(cells: CellSource, match: GeneMap, path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``cells`` with the genes of ``match`` to an h5ad file.

    ``X`` is CSR with the values as stored, float32 if all are exact in it, otherwise float64; a gene that the source
    lacks has no value. ``obs`` is copied, with `DEPTH` added; ``var`` tells whether the source has a gene. Layers,
    obsm and the like are not copied.

    Returns
    -------
    dict
        Cells, genes and values written, and their type.
    """
    with h5_output.writing(path) as root:
        root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = root.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        matrix.attrs["shape"] = [cells.n_cells, len(match.target)]
        writer = _Matrix(matrix, match)
        with track("writing", cells.n_cells) as progress:
            for block in cells.blocks():
                writer.append(block)
                progress.advance(block.stop - block.start)
        writer.finish()
        _write_obs(root, cells, np.concatenate(writer.depth))
        shared = ~np.isin(np.array(match.target, object), np.array(match.missing, object))
        var = pd.DataFrame({"in_source": shared}, index=pd.Index(match.target, dtype=object))
        anndata.io.write_elem(root, "var", var)
        anndata.io.write_elem(root, "uns", {"perturbdiff": {**facts, "unit": cells.unit}})
        for name in ("layers", "obsm", "varm", "obsp", "varp"):
            anndata.io.write_elem(root, name, {})
    return {
        "cells": cells.n_cells,
        "genes": len(match.target),
        "values": writer.num_values,
        "dtype": writer.dtype.name,
    }


class _Matrix:
    """Appends row blocks to a CSR group; float64 from the first value on that float32 cannot hold."""

    def __init__(self, group: Any, match: GeneMap) -> None:
        self._group, self._match = group, match
        self.dtype, self.num_values = np.dtype(np.float32), 0
        self.depth: list[np.ndarray] = [np.empty(0)]
        for name, dtype in (("data", self.dtype), ("indices", np.int32), ("indptr", np.int64)):
            growing(group, name, np.dtype(dtype), _CHUNK)
        append(group["indptr"], np.zeros(1, np.int64))

    def append(self, block: Block) -> None:
        whole = block.as_csr(len(self._match.source))
        self.depth.append(np.asarray(whole.sum(axis=1, dtype=np.float64)).ravel())
        part = self._match.apply(whole)
        data = np.asarray(part.data)
        if self.dtype == np.float32 and (data.astype(np.float32) != data).any():
            self.dtype = np.dtype(np.float64)
            recast(self._group, "data", self.dtype, _CHUNK)
        append(self._group["data"], data.astype(self.dtype))
        append(self._group["indices"], np.asarray(part.indices, np.int32))
        append(self._group["indptr"], np.asarray(part.indptr[1:], np.int64) + self.num_values)
        self.num_values += len(data)

    def finish(self) -> None:
        """Make row pointers and column numbers of one type, which scikit-learn and with it scanpy wants."""
        name, dtype = ("indptr", np.int32) if self.num_values <= _INT32_MAX else ("indices", np.int64)
        recast(self._group, name, dtype, _CHUNK)


def _write_obs(root: Any, cells: CellSource, depth: np.ndarray) -> None:
    obs = root.create_group("obs")
    names = obs.create_dataset(
        "_index", (cells.n_cells,), h5py.string_dtype(), chunks=(min(4096, cells.n_cells),)
    )
    names.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    for start in range(0, cells.n_cells, _NAMES_PER_WRITE):
        stop = min(start + _NAMES_PER_WRITE, cells.n_cells)
        names[start:stop] = cells.cell_names(start, stop)
    columns = [name for name in cells.columns if name not in ("_index", DEPTH)]
    for name in columns:
        anndata.io.write_elem(obs, name, _storable(cells.column(name)))
    anndata.io.write_elem(obs, DEPTH, depth)
    obs.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"})
    obs.attrs["column-order"] = [*columns, DEPTH]


def _storable(values: pd.Series) -> Any:
    """Return an obs column as anndata can write it: text as categories, an empty text as missing."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        found = pd.Categorical(values)
        return found.remove_categories([""]) if "" in found.categories else found
    if pd.api.types.is_extension_array_dtype(values.dtype):
        return values.array
    return values.to_numpy()


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
                found, summary = _report(cells, wanted)
            tabular.write_csv(found, run.path / "alignment.csv")
            (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            run.results |= summary
    if write is not None:
        with provenance.stage("align-write", write, config=settings, inputs=roles, force=force) as run:
            if not run.skip:
                with open_cells(source, config, run.scratch / _ROWS) as cells:
                    run.results |= write_aligned(cells, _map(cells, wanted), run.path, _facts(source, genes))
    return out


def _facts(source: Path, genes: Path) -> dict[str, str]:
    return {"kind": "aligned", "source": source.name, "genes": genes.name}


def _map(cells: CellSource, wanted: Sequence[str]) -> GeneMap:
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


def _report(cells: CellSource, wanted: Sequence[str]) -> tuple[pd.DataFrame, dict[str, Any]]:
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
    cells: CellSource, match: GeneMap, total: np.ndarray, detected: np.ndarray, hints: dict[str, str]
) -> pd.DataFrame:
    """Return one row per gene: those of the list in its order, then the data's others."""
    column = pd.Index(match.source).get_indexer(pd.Index([*match.target, *match.extra]))
    here = column >= 0
    num = len(match.target)
    place = np.where(np.arange(len(column)) < num, np.arange(len(column)), -1)
    status = np.where(here, np.where(place >= 0, "shared", "extra"), "missing")
    names = [*match.target, *match.extra]
    return pd.DataFrame(
        {
            "gene": names,
            "status": status,
            "place": place,
            "column": column,
            "total": np.where(here, total[column], 0.0),
            "cells": np.where(here, detected[column], 0),
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
    found: dict[str, str] = {}
    for what, form in FORMS.items():
        same: dict[str, list[str]] = {}
        for name in extra:
            same.setdefault(form(name), []).append(name)
        for name in missing:
            if name not in found and form(name) in same:
                found[name] = f"{' or '.join(same[form(name)][:_MOST_HINTS])} ({what})"
    return {name: found[name] for name in missing if name in found}
