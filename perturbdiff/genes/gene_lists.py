"""Lists of gene names from text files, folders of a vocabulary and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from perturbdiff.config.settings import DataConfig
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing

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
        pickled = path.read_bytes()[:1] == b"\x80"
        what = "is a pickle, which is not read here" if pickled else "is not a text file"
        raise UserError(f"{path}: {what}; give a text file with one gene name per line") from None
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
