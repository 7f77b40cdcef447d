"""The registry of published data sets (``registry.yaml``), and the way from a name to a file that lies here.

A file is looked up in the folder that the environment variable ``PERTURBDIFF_DATA`` names, then in the user's cache.
`perturbdiff.datasets.fetching` puts it there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, nearest

FOLDER_VARIABLE = "PERTURBDIFF_DATA"
"""Environment variable that names a folder with files of data sets."""


@dataclass(frozen=True)
class Census:
    """A query of the CellxGene Census.

    Attributes
    ----------
    version
        Release, as a date.
    filter
        Which cells, in the Census's language of filters on obs.
    """

    version: str
    filter: str


@dataclass(frozen=True)
class PaperCounts:
    """What the paper counts in a data set (Tab. data_summary, Tab. shared_genes).

    Attributes
    ----------
    train, valid, test, control
        Perturbed cells of each part of the split, and control cells.
    perturbations, cell_types, batches
        Different labels, without the control.
    shared_genes
        Genes of the prior's 12,626 that it has.
    """

    train: int
    valid: int
    test: int
    control: int
    perturbations: int
    cell_types: int
    batches: int
    shared_genes: int


@dataclass(frozen=True)
class Part:
    """One file of a data set.

    Attributes
    ----------
    file
        Name of the file below the folder of data sets.
    url
        Where it can be fetched, or None.
    bytes
        Its size, if known.
    algorithm, digest
        Its published sum in hexadecimal digits; empty if there is none.
    """

    file: str
    url: str | None
    bytes: int | None
    algorithm: Literal["sha256", "md5", ""]
    digest: str


@dataclass(frozen=True)
class Dataset:
    """What the registry says of a data set. None means that it is not known.

    Attributes
    ----------
    name
        Name in the registry, as in ``dataset:NAME`` of a samplesheet.
    title
        What it is, in a line.
    file
        Name of the file; with ``{part}`` in it where there are several.
    source
        Where the original is published.
    licence
        Licence of the data, as far as it is known.
    citation
        The publication.
    columns
        Columns of ``obs`` and what they hold.
    scale
        What the values are.
    url
        Where the file can be fetched.
    parts
        First and last number of the parts, where there are several files.
    bytes, gigabytes
        Exact size of the one file; about how much all files are, in 10⁹ bytes.
    sha256, md5
        Published sums of the one file.
    requester_pays
        Whether the reader pays for the transfer.
    census
        The query whose result the files are.
    selection
        How the file was made of the original.
    preset
        Preset that suits the data.
    cells, genes, values
        Numbers of cells, genes and stored values.
    paper
        What the paper counts in it.
    label_errors
        Labels that are odd or wrong, and what becomes of them.
    traps
        What one should know before one uses the data.
    """

    name: str
    title: str
    file: str
    source: str
    licence: str
    citation: str
    columns: dict[str, str]
    scale: Literal["counts", "log1p", "normalised"]
    url: str | None = None
    parts: tuple[int, int] | None = None
    bytes: int | None = None
    gigabytes: float | None = None
    sha256: str | None = None
    md5: str | None = None
    requester_pays: bool = False
    census: Census | None = None
    selection: str | None = None
    preset: str | None = None
    cells: int | None = None
    genes: int | None = None
    values: int | None = None
    paper: PaperCounts | None = None
    label_errors: list[str] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Part]:
        """Its files, in their order."""
        first, last = self.parts or (0, 0)
        sum_of: tuple[Literal["sha256", "md5", ""], str] = ("", "")
        if self.sha256 or self.md5:
            sum_of = ("sha256", self.sha256) if self.sha256 else ("md5", str(self.md5))
        return [
            Part(self.file.format(part=k), self.url and self.url.format(part=k), self.bytes, *sum_of)
            for k in range(first, last + 1)
        ]

    @property
    def size(self) -> float | None:
        """Bytes of all files together, exactly or about."""
        return self.bytes if self.bytes is not None else self.gigabytes and self.gigabytes * 1e9


@functools.cache
def registered() -> dict[str, Dataset]:
    """Return every data set by its name."""
    found: dict[str, dict[str, Any]] = untrusted.read(Path(__file__).with_name("registry.yaml"), "YAML")
    return {name: _dataset(name, entry) for name, entry in found.items()}


def _dataset(name: str, entry: dict[str, Any]) -> Dataset:
    parts, census, paper = (entry.get(key) for key in ("parts", "census", "paper"))
    made = {"parts": parts and tuple(parts), "census": census and Census(**census)}
    made |= {"paper": paper and PaperCounts(**paper)}
    return Dataset(name=name, **{**entry, **made})


def lookup(name: str) -> Dataset:
    """Return a data set.

    Raises
    ------
    UserError
        If the name is unknown.
    """
    known = registered()
    if name not in known:
        raise UserError(f"unknown data set '{name}'{nearest(name, known)}; known: {', '.join(known)}")
    return known[name]


def cache_folder() -> Path:
    """Return the folder in which fetched files are kept: ``perturbdiff/datasets`` in the user's cache."""
    # the workflow names the same folder (modules/plan/inputs.nf), and it has no Python to ask
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "perturbdiff" / "datasets"


def folders() -> Iterator[Path]:
    """Yield the folders in which files are looked up, in their order. The first is where they are fetched to."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        yield Path(folder)
    yield cache_folder()


def here(part: Part) -> Path | None:
    """Return where a file lies, or None if it is in none of the folders."""
    return next((path for folder in folders() if (path := folder / part.file).is_file()), None)
