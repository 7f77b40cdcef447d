"""From the name of a data set to its files here: found and checked, else fetched after a word on what that costs."""

from __future__ import annotations

import logging
from pathlib import Path

from perturbdiff.datasets import sums
from perturbdiff.datasets.addresses import host
from perturbdiff.datasets.download import check_room, download
from perturbdiff.datasets.registry import FOLDER_VARIABLE, Dataset, Part, folders, here, lookup
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import byte_size, span

logger = logging.getLogger(__name__)

LARGE = 10e9
"""Bytes above which the cost must be accepted first."""
SPEED = 50e6
"""Bytes per second that times are stated for."""


def find(name: str) -> Path:
    """Return the file of a data set of one file, and fetch it if that is needed, small and possible.

    Raises
    ------
    UserError
        As `get`.
    """
    dataset = lookup(name)
    part, *others = dataset.files
    if others:
        raise UserError(
            f"data set '{name}' has {len(others) + 1} files; fetch them with perturbdiff data get {name}"
        )
    if path := here(part):
        sums.check(path, part)
        return path
    return get(name)[0]


def get(name: str, out: Path | None = None, *, yes: bool = False) -> list[Path]:
    """Return the checked files of a data set. Those that are not here are fetched; complete ones need no network.

    Parameters
    ----------
    name
        Name in the registry.
    out
        Folder; by default that of ``PERTURBDIFF_DATA``, else the user's cache.
    yes
        Whether what the fetching costs is accepted. It must be where it is large, unknown or to be paid for.

    Raises
    ------
    UserError
        If the name is unknown, nobody offers the file, the cost is not accepted, the disk is too full, the network or
        the server refuses, or a file is not the registered one.
    """
    dataset = lookup(name)
    folder = out if out is not None else next(folders())
    missing = [part for part in dataset.files if not _is_there(folder, part)]
    if missing:
        _agree(dataset, missing, folder, yes=yes)
        if dataset.census:
            from perturbdiff.datasets.census_query import write_parts

            write_parts(dataset, folder)
        for part in missing:
            path = folder / part.file
            version = ""
            if part.url:
                version = download(
                    part.url, path, lambda data, p=part, q=path: _check(data, p, q), size=part.bytes
                ).mark
            sums.keep(path, part, version)
    return [folder / part.file for part in dataset.files]


def _check(data: Path, part: Part, path: Path) -> None:
    sums.check(data, part, place=path)


def _is_there(folder: Path, part: Part) -> bool:
    """Return whether a file lies in a folder, after it was checked and its sum recorded."""
    path = folder / part.file
    if not path.is_file():
        return False
    sums.check(path, part)
    sums.keep(path, part)
    return True


def _agree(dataset: Dataset, missing: list[Part], folder: Path, *, yes: bool) -> None:
    """Say what fetching costs; raise a `UserError` if it was not accepted or cannot be done."""
    if not dataset.url and not dataset.census:
        raise UserError(
            f"data set '{dataset.name}': no address is known for {missing[0].file}; put the file into a folder and "
            f"name the folder in {FOLDER_VARIABLE} (original: {dataset.source})"
        )
    share = len(missing) / len(dataset.files)
    needed = dataset.size and dataset.size * share
    said = cost(dataset, share)
    if not yes and (needed is None or needed > LARGE or dataset.requester_pays):
        raise UserError(f"data set '{dataset.name}' costs: {said}; add --yes to fetch it to {folder}")
    logger.info("%s: %s", dataset.name, said)
    if needed:
        check_room(folder, needed)


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
