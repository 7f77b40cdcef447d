"""The registry of published data sets (``registry.yaml``), and the way from a name to a file.

A file is looked up in the folder that the environment variable ``PERTURBDIFF_DATA`` names, then in the user's cache.
If it is in neither, it is fetched into the cache, where the registry knows an address for it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbdiff.runtime import untrusted
from perturbdiff.runtime.errors import UserError, nearest
from perturbdiff.runtime.progress import Track, track

FOLDER_VARIABLE = "PERTURBDIFF_DATA"
"""Environment variable that names a folder with files of data sets."""


@dataclass(frozen=True)
class Dataset:
    """What the registry says of a data set.

    Attributes
    ----------
    name
        Name in the registry, as in ``dataset:NAME`` of a samplesheet.
    title
        What it is, in a line.
    file
        Name of the file.
    sha256
        SHA-256 of the file, in hexadecimal digits.
    bytes
        Size of the file.
    url
        Where the file can be fetched, or None.
    source
        Where the original is published.
    selection
        How the file was made of the original.
    licence
        Licence of the data, as far as it is known.
    citation
        The publication.
    preset
        Preset that suits the data.
    columns
        Columns of ``obs`` and what they hold.
    traps
        What one should know before one uses the data.
    """

    name: str
    title: str
    file: str
    sha256: str
    bytes: int
    url: str | None
    source: str
    selection: str
    licence: str
    citation: str
    preset: str
    columns: dict[str, str] = field(default_factory=dict)
    traps: list[str] = field(default_factory=list)


@functools.cache
def registered() -> dict[str, Dataset]:
    """Return every data set by its name."""
    found: dict[str, dict[str, Any]] = untrusted.read(Path(__file__).with_name("registry.yaml"), "YAML")
    return {name: Dataset(name=name, **entry) for name, entry in found.items()}


def cache_folder() -> Path:
    """Return the folder in which fetched files are kept: ``perturbdiff/datasets`` in the user's cache."""
    # the workflow names the same folder (modules/plan/inputs.nf), and it has no Python to ask
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "perturbdiff" / "datasets"


def find(name: str) -> Path:
    """Return the file of a data set, and fetch it if that is needed and possible.

    Parameters
    ----------
    name
        Name in the registry.

    Raises
    ------
    UserError
        The name is unknown, the file is nowhere and cannot be fetched, or it is not the registered one.
    """
    if name not in registered():
        raise UserError(
            f"unknown data set '{name}'{nearest(name, registered())}; known: {', '.join(registered())}"
        )
    dataset = registered()[name]
    for folder in (os.environ.get(FOLDER_VARIABLE), cache_folder()):
        if folder and (path := Path(folder) / dataset.file).is_file():
            _check(path, dataset)
            return path
    return _fetch(dataset)


def _check(path: Path, dataset: Dataset) -> None:
    if path.stat().st_size == dataset.bytes:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == dataset.sha256:
                return
    raise UserError(
        f"{path}: is not the file of data set '{dataset.name}', whose SHA-256 is {dataset.sha256}; "
        "move it away, or set another folder"
    )


def _fetch(dataset: Dataset) -> Path:
    if dataset.url is None:
        raise UserError(
            f"data set '{dataset.name}': no address is known for {dataset.file}; put the file into a folder and name "
            f"the folder in {FOLDER_VARIABLE} (original: {dataset.source})"
        )
    import pooch

    try:
        with track(f"fetching {dataset.file}", dataset.bytes, "bytes") as work:
            found = pooch.retrieve(
                dataset.url,
                f"sha256:{dataset.sha256}",
                dataset.file,
                cache_folder(),
                progressbar=_Download(work),  # pyright: ignore[reportArgumentType] # any object with these methods
            )
    except (OSError, ValueError) as error:
        raise UserError(f"data set '{dataset.name}': {dataset.url} cannot be fetched ({error})") from None
    return Path(found)


class _Download:
    """The methods that pooch asks of a bar. ``total`` is set by it."""

    def __init__(self, work: Track) -> None:
        self._work, self.total = work, 0

    def update(self, amount: int) -> None:
        """Count bytes. Pooch counts whole blocks, and so more than there are."""
        self._work.advance(min(amount, self._work.total - self._work.done))

    def reset(self) -> None:
        """Begin anew, as pooch does before it counts everything at once at the end."""
        self._work.done = 0

    def close(self) -> None:
        """Do nothing: the progress ends with its block."""
