"""From the name of a data set to its files here: found and checked, else fetched after a word on what that costs.

Files of the CellxGene Census are written by its own package (``cellxgene-census``), which is not installed with ours.
The data sets that a filter meets are spread over the files by their numbers of cells, the largest first, each into the
file that is smallest so far. The result follows from the release and the filter.

A published sum is compared; where none is, the first look records it for all later ones. The record ``FILE.sum.json``
lies beside a file. It also has the size and time of change, so that a file of hundreds of gigabytes is not read again
while neither has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perturbdiff.datasets.download import check_room, download
from perturbdiff.datasets.registry import FOLDER_VARIABLE, Dataset, Part, cost, folders, here, lookup
from perturbdiff.runtime import files, untrusted
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.progress import track

logger = logging.getLogger(__name__)

_BLOCK = 1 << 22
_SHOWN = 100_000_000  # bytes
_BEGINS = {".h5ad": b"\x89HDF\r\n\x1a\n", ".parquet": b"PAR1"}
"""First bytes of files by their ending."""


def record_of(path: Path) -> Path:
    """Return where the record of a file lies."""
    return path.with_name(f"{path.name}.sum.json")


def check(path: Path, part: Part, *, place: Path | None = None) -> None:
    """Compare a file with its published sum, else with its record.

    Parameters
    ----------
    path
        The file.
    part
        What the registry says of it.
    place
        Where it will lie, and its record lies; by default where it is.

    Raises
    ------
    UserError
        If it is another file.
    """
    place = place or path
    if part.bytes is not None and path.stat().st_size != part.bytes:
        raise _other(path, part, f"it has {path.stat().st_size:,} bytes instead of {part.bytes:,}")
    record = _read(place)
    algorithm, wanted = part.algorithm, part.digest
    if not algorithm:
        if record is None:
            _look_at_begin(path, part)
            return
        algorithm, wanted = record["algorithm"], record["digest"]
    elif record and record["digest"] != wanted:
        record = None
    if record and [path.stat().st_size, path.stat().st_mtime_ns] == record["signature"]:
        return
    found = digest(path, algorithm)
    if found != wanted:
        since = f", as recorded in {record_of(place).name}" if record and not part.digest else ""
        raise _other(path, part, f"its {algorithm.upper()} is {found} instead of {wanted}{since}")


def keep(path: Path, part: Part, version: str = "") -> None:
    """Record the sum of a checked file, unless that is done. ``version`` is what the server called it.

    Without a published sum, this is the first look, which all later ones trust. In a folder that others keep, nothing
    is recorded.
    """
    if not os.access(path.parent, os.W_OK):
        return
    signature = [path.stat().st_size, path.stat().st_mtime_ns]
    known = _read(path)
    if known and known["signature"] == signature:
        return
    algorithm = part.algorithm or "sha256"
    found = part.digest or digest(path, algorithm)
    record: dict[str, Any] = {
        "file": part.file,
        "algorithm": algorithm,
        "digest": found,
        "signature": signature,
    }
    record |= {"published": bool(part.digest), "url": part.url, "version": version}
    files.write_text(record_of(path), json.dumps(record, indent=2) + "\n")
    if not part.digest:
        logger.warning(
            "%s: nobody publishes its sum, so that this first look had to be trusted; its SHA-256 %s is in %s, and "
            "later looks compare with it",
            path,
            found,
            record_of(path).name,
        )


def digest(path: Path, algorithm: str) -> str:
    """Return a file's sum in hexadecimal digits, and show the progress of a file that takes seconds."""
    state = hashlib.new(algorithm, usedforsecurity=False)
    size = path.stat().st_size
    if size < _SHOWN:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, lambda: state).hexdigest()
    with path.open("rb") as handle, track(f"checking {path.name}", size // 1000, "kB") as work:
        while block := handle.read(_BLOCK):
            state.update(block)
            work.advance(len(block) // 1000)
    return state.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """Return the record of a file, or None if there is none that can be read."""
    place = record_of(path)
    if not place.is_file():
        return None
    record = untrusted.read(place, "JSON")
    if not isinstance(record, dict) or not {"algorithm", "digest", "signature"} <= record.keys():
        raise UserError(f"{place}: is not a record of a sum; move it away")
    if record["algorithm"] not in ("sha256", "md5"):
        raise UserError(f"{place}: names a sum that is not known here; move it away")
    return record


def _look_at_begin(path: Path, part: Part) -> None:
    """Raise a `UserError` if a file of which no sum is known is of another kind, such as a page of a website."""
    wanted = _BEGINS.get(Path(part.file).suffix, b"")
    with path.open("rb") as handle:
        found = handle.read(len(wanted))
    if found != wanted:
        raise _other(path, part, "it does not begin as such a file does, and may be a page of a website")


def _other(path: Path, part: Part, why: str) -> UserError:
    return UserError(
        f"{path}: is not the file {part.file} of the registry ({why}); move it away and fetch it again, or set another "
        "folder"
    )


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
        check(path, part)
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
            keep(path, part, version)
    return [folder / part.file for part in dataset.files]


def _check(data: Path, part: Part, path: Path) -> None:
    check(data, part, place=path)


def _is_there(folder: Path, part: Part) -> bool:
    """Return whether a file lies in a folder, after it was checked and its sum recorded."""
    path = folder / part.file
    if not path.is_file():
        return False
    check(path, part)
    keep(path, part)
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
