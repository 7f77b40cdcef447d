"""Folders of Cell Ranger's text files: ``matrix.mtx``, ``barcodes.tsv`` and ``features.tsv`` (or ``genes.tsv``).

Such a folder holds one sample. It is presented in the form of Cell Ranger's h5 file, so that one layout reads both. The
matrix is read into memory when its values are first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from perturbdiff.io.damage import explain_damage
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.untrusted import open_bytes

_ENDINGS = {
    "matrix": ("matrix.mtx", "matrix.mtx.gz"),
    "barcodes": ("barcodes.tsv", "barcodes.tsv.gz"),
    "features": ("features.tsv", "features.tsv.gz", "genes.tsv", "genes.tsv.gz"),
}
_GENES = "Gene Expression"
_MOST_TIMES_PACKED = 200  # gzip packs a matrix to a fifth or so
_BYTES_PER_LINE = 6


def is_tenx_folder(path: Path) -> bool:
    """Return whether a folder holds a matrix as Cell Ranger writes it in text files."""
    return path.is_dir() and bool(_found(path, "matrix"))


def _found(path: Path, kind: str) -> list[Path]:
    """Return the files of a kind; their names may have a prefix, as files of GEO do."""
    with explain_damage(path):
        return sorted(file for file in path.iterdir() if file.name.endswith(_ENDINGS[kind]))


def open_tenx_folder(path: Path) -> dict[str, Any]:
    """Return a 10x folder in the form of Cell Ranger's h5 file.

    Raises
    ------
    UserError
        If a file is missing, there are several of a kind, or the files do not belong together.
    """
    names = {}
    for kind, endings in _ENDINGS.items():
        found = _found(path, kind)
        if len(found) != 1:
            have = listing([file.name for file in found], 3)
            what = (
                f"has several files of one kind ({have}); keep one sample"
                if found
                else f"has no {endings[0]}"
            )
            raise UserError(f"{path}: {what}; a 10x folder holds matrix.mtx, barcodes.tsv and features.tsv")
        names[kind] = found[0]
    return {"matrix": _Group(path, names)}


class _Group:
    """The group ``matrix`` of Cell Ranger's h5 file, with values that are read on first use."""

    _VALUES = ("data", "indices", "indptr")

    def __init__(self, path: Path, names: dict[str, Path]) -> None:
        self._matrix = names["matrix"]
        with explain_damage(path):
            barcodes = [row[0] for row in _table(names["barcodes"])]
            features = _table(names["features"])
            shape = _shape(self._matrix)
        if shape != (len(features), len(barcodes)):
            raise UserError(
                f"{path}: {self._matrix.name} has {shape[0]} features and {shape[1]} cells, but "
                f"{names['features'].name} has {len(features)} and {names['barcodes'].name} has {len(barcodes)}; take "
                "the three files from one folder"
            )
        columns = {
            "id": [row[0] for row in features],
            "name": [row[1] if len(row) > 1 else row[0] for row in features],
            "feature_type": [row[2] if len(row) > 2 else _GENES for row in features],
        }
        self._small = {
            "barcodes": np.array(barcodes, object),
            "shape": np.array(shape, np.int64),
            "features": {name: np.array(texts, object) for name, texts in columns.items()},
        }

    def keys(self) -> list[str]:
        """Return the names of the arrays."""
        return [*self._small, *self._VALUES]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, name: str) -> Any:
        if name in self._small:
            return self._small[name]
        return getattr(_read(self._matrix, files.signature(self._matrix)), name)


def _table(path: Path) -> list[list[str]]:
    with open_bytes(path) as handle:
        return [line.decode().rstrip("\r\n").split("\t") for line in handle]


def _shape(path: Path) -> tuple[int, int]:
    """Return the numbers of features and cells that the matrix declares."""
    with open_bytes(path) as handle:
        for line in handle:
            if not line.startswith(b"%"):
                features, cells, values = (int(number) for number in line.split())
                if values * _BYTES_PER_LINE > path.stat().st_size * _MOST_TIMES_PACKED:
                    raise ValueError(f"{path.name} declares {values} values, far more than it holds")
                return features, cells
    raise ValueError(f"{path.name} has no line with its size")


@functools.lru_cache(maxsize=1)
def _read(path: Path, signature: tuple[int, int]) -> csr_matrix:
    """Return cells x features; ``signature`` tells a changed file from the one that was read."""
    del signature
    from scipy.io import mmread  # loads what no other input needs

    return csr_matrix(mmread(path).T)
