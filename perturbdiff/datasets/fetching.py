"""From the name of a data set to its files here: found and checked, else fetched after a word on what that costs.

Files of the CellxGene Census are written by its own package (``cellxgene-census``), which is not installed with ours.
The data sets that a filter meets are spread over the files by their numbers of cells, the largest first, each into the
file that is smallest so far. The result follows from the release and the filter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perturbdiff.datasets import sums
from perturbdiff.datasets.download import check_room, download
from perturbdiff.datasets.registry import FOLDER_VARIABLE, Dataset, Part, cost, folders, here, lookup
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

_ORGANISM = "homo_sapiens"
_COLUMNS = ["soma_joinid", "cell_type", "donor_id", "dataset_id"]


def write_parts(dataset: Dataset, folder: Path) -> None:
    """Write the files of a data set that are not there. One file is in memory at a time.

    Parameters
    ----------
    dataset
        A data set with a query.
    folder
        Folder of the files.

    Raises
    ------
    UserError
        If the Census's package is not installed or the Census cannot be read.
    """
    if dataset.census is None:
        raise ValueError("not a query of the Census")
    package = _package(dataset.name)
    try:
        with package.open_soma(census_version=dataset.census.version) as census:
            table = census["census_info"]["datasets"].read().concat().to_pandas()
            groups = spread(
                zip(table["dataset_id"], table["dataset_total_cell_count"], strict=True), len(dataset.files)
            )
            with track(f"asking the Census for {dataset.name}", len(groups), "files") as work:
                for part, names in zip(dataset.files, groups, strict=True):
                    if not (folder / part.file).is_file():
                        _write(
                            package,
                            census,
                            f"{dataset.census.filter} and dataset_id in {names}",
                            folder / part.file,
                        )
                    work.advance()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"data set '{dataset.name}': the Census cannot be read ({type(error).__name__}: {error}); compute nodes "
            "often have no network: run the same command on a login node, which keeps the files that are complete"
        ) from None


def spread(sizes: Iterable[tuple[str, int]], count: int) -> list[list[str]]:
    """Return names in ``count`` groups of about the same sum: the largest first, into the smallest group so far."""
    groups, totals = [[] for _ in range(count)], [0] * count
    for name, size in sorted(sizes, key=lambda one: (-one[1], one[0])):
        smallest = totals.index(min(totals))
        groups[smallest].append(str(name))
        totals[smallest] += size
    return groups


def _package(name: str) -> Any:
    try:
        import cellxgene_census  # pyright: ignore[reportMissingImports] # installed by who needs it
    except ModuleNotFoundError:
        raise UserError(
            f"data set '{name}' is a query of the CellxGene Census, whose package is not installed: pip install "
            "cellxgene-census (in an environment of its own, if it asks for other versions)"
        ) from None
    return cellxgene_census


def _write(package: Any, census: Any, condition: str, path: Path) -> None:
    cells = package.get_anndata(census, _ORGANISM, obs_column_names=_COLUMNS, obs_value_filter=condition)
    # names of cells tell which cells were held out
    cells.obs_names = [f"census{number}" for number in cells.obs["soma_joinid"]]
    cells.var_names = cells.var["feature_id"].to_numpy()
    with files.writing(path) as partial:
        cells.write_h5ad(partial, compression="gzip")


LARGE = 10e9
"""Bytes above which the cost must be accepted first."""


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
