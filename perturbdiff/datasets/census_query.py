"""Files of the CellxGene Census, written by its own package (``cellxgene-census``), which is not installed with ours.

The data sets that a filter meets are spread over the files by their numbers of cells, the largest first, each into the
file that is smallest so far. The result follows from the release and the filter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perturbdiff.datasets.registry import Dataset
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
    groups, sums = [[] for _ in range(count)], [0] * count
    for name, size in sorted(sizes, key=lambda one: (-one[1], one[0])):
        smallest = sums.index(min(sums))
        groups[smallest].append(str(name))
        sums[smallest] += size
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
