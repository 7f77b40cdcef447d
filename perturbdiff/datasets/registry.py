"""The registry of published data sets (``registry.yaml``), the way from a name to a file that lies here, and its text.

A file is looked up in the folder that the environment variable ``PERTURBDIFF_DATA`` names, then in the user's cache.
`perturbdiff.datasets.fetching` puts it there.

``hf://datasets/OWNER/NAME@REVISION/PATH`` is a file of the Hugging Face Hub and
``gs://BUCKET/PATH`` one of Google Cloud Storage. Both can be read by plain HTTPS, so that no further library is needed.
"""

from __future__ import annotations

import functools
import os
import re
import textwrap
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, nearest
from perturbdiff.runtime.progress import byte_size, span

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


_HUB = re.compile(r"hf://(?P<kind>datasets/)?(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)/(?P<path>.+)")
_UNKNOWN = "not known"
_WIDTH = 110
SPEED = 50e6
"""Bytes per second that times are stated for."""


def table() -> str:
    """Return a line for each data set: its name, size, whether it lies here, and what it is."""
    rows = [("name", "size", "here", "what")]
    for name, dataset in registered().items():
        rows.append((name, _size(dataset), _here(dataset), dataset.title))
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = ["  ".join([*(row[k].ljust(widths[k]) for k in range(3)), row[3]]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _size(dataset: Dataset) -> str:
    size = dataset.size
    if size is None:
        return _UNKNOWN
    return byte_size(size)


def _here(dataset: Dataset) -> str:
    parts = dataset.files
    there = sum(here(part) is not None for part in parts)
    return "yes" if there == len(parts) else f"{there}/{len(parts)}" if there else "no"


def facts(dataset: Dataset) -> dict[str, Any]:
    """Return all that the registry says of a data set, and how many of its files lie here."""
    parts = dataset.files
    return {
        **asdict(dataset),
        "files": len(parts),
        "files_here": sum(here(part) is not None for part in parts),
    }


def render(dataset: Dataset) -> str:
    """Return all that the registry says of a data set, for a person."""
    counts = (dataset.cells, dataset.genes, dataset.values)
    cells, genes, values = (_UNKNOWN if number is None else f"{number:,}" for number in counts)
    sums = {"SHA-256": dataset.sha256, "MD5": dataset.md5}
    published = next((f"{kind} {digest}" for kind, digest in sums.items() if digest), _UNKNOWN)
    query = dataset.census and f"Census of {dataset.census.version}, {dataset.census.filter}"
    lines = [
        ("what", dataset.title),
        ("file", dataset.file + (" (parts {} to {})".format(*dataset.parts) if dataset.parts else "")),
        ("from", dataset.url or query or "no address; put the file into the folder PERTURBDIFF_DATA"),
        ("source", dataset.source),
        ("selection", dataset.selection or "as published"),
        ("cost", cost(dataset)),
        ("sum", published),
        ("cells", cells),
        ("genes", genes),
        ("stored values", values),
        ("scale of X", dataset.scale),
        ("preset", dataset.preset or "none"),
        ("citation", dataset.citation),
        *(("column " + name, text) for name, text in dataset.columns.items()),
        *(("odd labels", text) for text in dataset.label_errors),
        *(("note", text) for text in dataset.traps),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join([dataset.name, *(_line(name, text, width) for name, text in lines)])


def _line(name: str, text: str, width: int) -> str:
    lead = f"  {name.ljust(width)}  "
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def web_address(url: str) -> str:
    """Return the https address of a file.

    ``HF_ENDPOINT`` names another hub than huggingface.co, as for the hub's own library.
    """
    if found := _HUB.fullmatch(url):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        kind, path = found["kind"] or "", urllib.parse.quote(found["path"])
        return f"{hub}/{kind}{found['name']}/resolve/{found['revision']}/{path}"
    if url.startswith("gs://"):
        return f"https://storage.googleapis.com/{urllib.parse.quote(url[5:])}"
    return url


def host(url: str) -> str:
    """Return the name of the machine that a file is asked of."""
    return urllib.parse.urlsplit(web_address(url)).hostname or url


def cost(dataset: Dataset, share: float = 1.0) -> str:
    """Return what fetching a share of a data set's files costs, in words."""
    count = round(share * len(dataset.files))
    what = f"{count} file{'s' * (count != 1)}"
    if dataset.size is None:
        amount = f"{what} of unknown size"
    else:
        needed = dataset.size * share
        about = "" if dataset.bytes is not None else "about "
        amount = f"{what}, {about}{byte_size(needed)}, {span(needed / SPEED)} at {SPEED / 1e6:.0f} MB/s"
    place = (
        f" from {host(dataset.url)}" if dataset.url else " by a query of the Census" if dataset.census else ""
    )
    bill = ", and the bucket bills the reader" * dataset.requester_pays
    return f"{amount}{place}{bill} (licence: {dataset.licence})"
