"""Checking a store for damage: its files by their checksums, its cells by the tables beside them.

Checksums find a file that was changed. Reading the cells also finds what a faulty program wrote with right checksums,
and it is all that can be done for a store of an older version, which has none. Reading decodes every chunk, whose
CRC-32C is checked on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import zarr

from perturbdiff.conditions.condition import SORTED_BY, complete, sort_conditions
from perturbdiff.io.zarr_check import open_group
from perturbdiff.runtime.compiled import kernel
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.task_runner import TaskRunner
from perturbdiff.store import checksums
from perturbdiff.store.row_kernels import column_maximum
from perturbdiff.store.store import Store, value_factors
from perturbdiff.store.zarr_shards import ShardedReader

logger = logging.getLogger(__name__)

_ROWS = 65_536
_FACTS = ("target_sum", "scale", "input_scale", "control", "seed")
_MOST_LINES = 20  # of one part
_DAMAGE = (OSError, KeyError, ValueError, RuntimeError, TypeError, UserError)


@dataclass(frozen=True)
class _Part:
    """A part to check: rows ``start`` to ``stop`` of the store."""

    store: Path
    name: str
    start: int
    stop: int

    @property
    def path(self) -> Path:
        return self.store / self.name


@dataclass
class _Content:
    """What reading the cells of a part found."""

    problems: list[str] = field(default_factory=list)
    num_values: int = 0
    largest: np.ndarray | None = None


def check_store(path: Path, *, quick: bool = False, jobs: int = 1) -> list[str]:
    """Return a line for every fault of a store, none if it is sound; each names the file.

    Parameters
    ----------
    path
        Folder of the store.
    quick
        Check files against their checksums, tables and metadata, but do not decode the cells.
    jobs
        Worker processes.

    Raises
    ------
    UserError
        If there is no store at ``path``.
    """
    if not path.is_dir():
        raise UserError(f"store not found: {path}")
    problems: list[str] = []
    with TaskRunner(jobs) as runner:
        try:
            recorded = checksums.read_checksums(path)
            if recorded is None:
                logger.warning(
                    "%s has no checksums (it is of an older version): its files cannot be compared", path
                )
            else:
                problems += checksums.changed_files(path, recorded, runner)
        except UserError as error:
            problems.append(str(error))
        try:
            store = Store(path)
        except UserError as error:
            return [*problems, *([] if str(error) in problems else [str(error)])]
        ends = zip(store.parts, store.edges.tolist(), store.edges.tolist()[1:], strict=False)
        parts = [_Part(path, folder.name, start, stop) for folder, start, stop in ends]
        problems += _table_problems(store)
        for part in parts:
            problems += _metadata_problems(store, part, parts[0])
        if not quick:
            weights = [part.stop - part.start for part in parts]
            contents = runner.run(check_cells, parts, weights=weights, label="checking cells")
            problems += _content_problems(store, contents)
    return list(dict.fromkeys(problems))


def _table_problems(store: Store) -> list[str]:
    """Compare the tables beside the parts with each other and with the manifest."""
    problems, table = [], store.conditions
    file = store.path / "conditions.parquet"
    plain = table.drop(columns=["start", "stop", "is_control", "control", "part"])
    expected = complete(sort_conditions(plain, store.control), store.control)
    for name in ("cell_type", "batch", "perturbation", "n_cells", "start", "stop", "is_control", "control"):
        wrong = np.flatnonzero(table[name].to_numpy() != expected[name].to_numpy())
        if len(wrong):
            row = int(wrong[0])
            stored, right = (frame[name].tolist()[row] for frame in (table, expected))
            problems.append(
                f"{file}: column '{name}' is wrong from condition {row} on ({stored!r}, expected {right!r})"
            )
    if int(table["n_cells"].sum()) != store.n_cells:
        problems.append(f"{file}: has {table['n_cells'].sum()} cells, the manifest {store.n_cells}")
    part = np.searchsorted(store.edges[:-1], table["start"].to_numpy(), "right") - 1
    if (part != table["part"].to_numpy()).any() or store.edges[-1] != store.n_cells:
        problems.append(f"{file}: conditions do not lie in the parts that the manifest lists")
    if len(store.genes) != store.n_genes or len(set(store.genes)) != len(store.genes):
        problems.append(
            f"{store.path / 'genes.parquet'}: has not the {store.n_genes} genes of the manifest, each once"
        )
    missing = set(table["perturbation"]) ^ set(store.perturbations["perturbation"])
    if missing:
        problems.append(
            f"{store.path / 'perturbations.parquet'}: does not match the conditions ({listing(sorted(missing), 3)})"
        )
    return problems


def _metadata_problems(store: Store, part: _Part, first: _Part) -> list[str]:
    """Check shapes, types, genes and facts of one part, in a time that does not depend on the number of cells."""
    path, problems = part.path, []
    try:
        root: Any = open_group(path)
        shape = [part.stop - part.start, store.n_genes]
        if list(root["X"].attrs["shape"]) != shape:
            problems.append(f"{path / 'X'}: has shape {list(root['X'].attrs['shape'])}, expected {shape}")
        if root["X/data"].shape != root["X/indices"].shape or root["X/data"].dtype != store.dtype:
            problems.append(f"{path / 'X'}: values and column numbers do not match, or not the manifest")
        if root["X/indptr"].shape[0] != shape[0] + 1:
            problems.append(f"{path / 'X/indptr'}: has {root['X/indptr'].shape[0]} row pointers")
        uns: Any = anndata.io.read_elem(root["uns"])
        facts = uns["perturbdiff"]
        expected = {name: getattr(store, name) for name in _FACTS}
        different = [  # a target sum that is not known is nan, which never equals itself
            name
            for name, value in expected.items()
            if name in facts and facts[name] != value and value == value
        ]
        if different:
            problems.append(f"{path / 'uns'}: {listing(different)} differ from the manifest")
        var = pd.DataFrame(anndata.io.read_elem(root["var"]))
        if list(var.index) != store.genes:
            problems.append(f"{path / 'var'}: has other genes than genes.parquet")
        problems += _category_problems(part, first)
    except _DAMAGE as error:
        problems.append(f"{path}: cannot be opened ({_reason(error)})")
    return problems


def _category_problems(part: _Part, first: _Part) -> list[str]:
    """Compare the columns and categories of a part's obs with those of the first part."""
    problems = []
    obs: Any = open_group(part.path / "obs")
    obs_of_first: Any = open_group(first.path / "obs")
    if obs.attrs["column-order"] != obs_of_first.attrs["column-order"]:
        problems.append(f"{part.path / 'obs'}: has other columns than {first.name}")
    for name, group in obs.groups():
        categories = np.asarray(anndata.io.read_elem(group["categories"]))
        expected = np.asarray(anndata.io.read_elem(obs_of_first[f"{name}/categories"]))
        if list(categories) != list(expected):
            problems.append(f"{part.path / 'obs' / name}: has other categories than {first.name}")
    return problems


def check_cells(part: _Part) -> _Content:
    """Decode everything in a part and compare it with the table of conditions."""
    store = Store(part.store)
    content = _Content(largest=np.zeros(store.n_genes, np.float32))
    for check in (_check_labels, _check_values, _check_opens):
        try:
            check(store, part, content)
        except _DAMAGE as error:
            text = (
                str(error) if isinstance(error, UserError) else f"{part.path}: is damaged ({_reason(error)})"
            )
            content.problems.append(text)
    unique = list(dict.fromkeys(content.problems))
    more = [f"{part.path}: … {len(unique) - _MOST_LINES} more problems"] if len(unique) > _MOST_LINES else []
    content.problems = unique[:_MOST_LINES] + more
    return content


def _check_labels(store: Store, part: _Part, content: _Content) -> None:
    """Compare every cell's labels with its condition's, and read every other column once."""
    obs: Any = open_group(part.path / "obs")
    rows, table = part.stop - part.start, store.conditions
    of_part = table[(table["stop"] > part.start) & (table["start"] < part.stop)]
    for label in SORTED_BY:
        column = part.path / "obs" / label
        codes = np.asarray(obs[f"{label}/codes"][:])
        categories = pd.Index(anndata.io.read_elem(obs[f"{label}/categories"]))
        expected = np.repeat(categories.get_indexer(pd.Index(of_part[label])), of_part["n_cells"])
        if len(codes) != len(expected) or len(codes) != rows:
            content.problems.append(
                f"{column}: has {len(codes)} cells, the table of conditions {len(expected)}"
            )
        elif (wrong := np.flatnonzero(codes != expected)).size:
            row = int(wrong[0])
            content.problems.append(
                f"{column}: row {row} is {_label(categories, codes[row])}, the table of conditions has "
                f"{_label(categories, expected[row])}; {len(wrong)} such rows"
            )
    for name in ("_index", *obs.attrs["column-order"]):
        if name not in SORTED_BY:
            array: Any = obs[str(name)]
            array = array["codes"] if isinstance(array, zarr.Group) else array
            if array.shape != (rows,):
                content.problems.append(f"{part.path / 'obs' / str(name)}: has {array.shape[0]} cells")
            empty = 0
            for start in range(0, array.shape[0], _ROWS):
                values = array[start : start + _ROWS]
                empty += int((values == "").sum()) if name == "_index" else 0
            if empty:
                content.problems.append(f"{part.path / 'obs/_index'}: {empty} cells have no name")


def _check_values(store: Store, part: _Part, content: _Content) -> None:
    """Look at every stored value and column number, block by block."""
    matrix = part.path / "X"
    pointers = _whole(matrix / "indptr")
    indices, data = ShardedReader(matrix / "indices"), ShardedReader(matrix / "data")
    content.num_values = data.length
    if pointers[0] != 0 or (np.diff(pointers) < 0).any() or pointers[-1] != data.length:
        content.problems.append(f"{matrix / 'indptr'}: row pointers do not ascend from 0 to {data.length}")
        return
    depth = _whole(part.path / "obs" / "n_counts").astype(np.float32)
    for start, stop in _blocks(pointers):
        local = pointers[start : stop + 1] - pointers[start]
        columns, values = np.empty(int(local[-1]), indices.dtype), np.empty(int(local[-1]), data.dtype)
        try:
            indices.read(int(pointers[start]), int(pointers[stop]), columns)
            data.read(int(pointers[start]), int(pointers[stop]), values)
        except UserError as error:
            content.problems.append(str(error))
            continue
        content.problems += _block_problems(store, matrix, start, local, columns, values, depth[start:stop])
        if content.largest is not None and not content.problems:
            factors = value_factors(depth[start:stop], store.target_sum, store.input_scale)
            column_maximum(local, columns, values, factors, content.largest)


def _whole(path: Path) -> np.ndarray:
    array: Any = zarr.open_array(path, mode="r")
    return np.asarray(array[:])


def _blocks(pointers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of at most some 16 million values."""
    start = 0
    while start < len(pointers) - 1:
        stop = int(np.searchsorted(pointers, pointers[start] + (1 << 24), "right")) - 1
        stop = min(max(stop, start + 1), start + _ROWS, len(pointers) - 1)
        yield start, stop
        start = stop


def _block_problems(
    store: Store,
    matrix: Path,
    first: int,
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    depth: np.ndarray,
) -> list[str]:
    """Return what is wrong with the rows of a block that begins at row ``first`` of the part."""
    problems = []
    totals = np.empty(len(depth), np.float64)
    column, value = row_faults(indptr, indices, data, store.n_genes, store.input_scale == "log1p", totals)
    if column >= 0:
        problems.append(
            f"{matrix / 'indices'}: columns of row {first + column} do not ascend within 0 to {store.n_genes - 1}"
        )
    if value >= 0:
        problems.append(f"{matrix / 'data'}: row {first + value} holds a value that is not positive")
    low = np.flatnonzero(~(depth >= totals * (1 - 1e-4) - 1e-3))
    if len(low):
        problems.append(
            f"{matrix.parent / 'obs/n_counts'}: row {first + low[0]} has a depth of {depth[low[0]]:g}, below the sum "
            f"{totals[low[0]]:g} of its stored genes"
        )
    return problems


@kernel
def row_faults(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    num_genes: int,
    log1p: bool,  # noqa: FBT001
    totals: np.ndarray,
) -> tuple[int, int]:
    """Return the first rows with an unsorted or impossible column and with a value not above 0 (-1: none).

    Each row's sum is written to ``totals``, in counts.
    """
    column, value = -1, -1
    for i in range(len(indptr) - 1):
        total, before = 0.0, -1
        for k in range(indptr[i], indptr[i + 1]):
            j = np.int64(indices[k])
            if (j <= before or j >= num_genes) and column < 0:
                column = i
            before = j
            x = np.float64(data[k])
            if not (x > 0 and np.isfinite(x)) and value < 0:
                value = i
            total += np.expm1(x) if log1p else x
        totals[i] = total
    return column, value


def _check_opens(store: Store, part: _Part, content: _Content) -> None:
    """Open the part as any AnnData reader would, without loading its matrix."""
    root: Any = open_group(part.path)
    if anndata.io.sparse_dataset(root["X"]).shape[1] != store.n_genes:
        content.problems.append(f"{part.path / 'X'}: is not read by anndata as {store.n_genes} genes")
    for name in ("var", "uns", "layers", "obsm", "obsp", "varm", "varp"):
        anndata.io.read_elem(root[name])


def _content_problems(store: Store, contents: list[_Content]) -> list[str]:
    """Join what the parts show and compare it with what the manifest and the table of genes say of all cells."""
    problems = [line for content in contents for line in content.problems]
    if problems:
        return problems
    if (values := sum(content.num_values for content in contents)) != store.n_values:
        problems.append(f"{store.path}: holds {values} values, the manifest says {store.n_values}")
    largest = np.max([content.largest for content in contents if content.largest is not None], axis=0)
    maximum = np.asarray(largest) if store.input_scale == "log1p" else np.log1p(largest)
    wrong = np.flatnonzero(~np.isclose(maximum, store.max_value(), rtol=1e-5, atol=1e-7))
    if len(wrong):
        gene = store.genes[wrong[0]]
        problems.append(
            f"{store.path / 'genes.parquet'}: max_log1p of '{gene}' is {store.max_value()[wrong[0]]:g}, its largest "
            f"value {maximum[wrong[0]]:g}; {len(wrong)} such genes"
        )
    return problems


def _label(categories: pd.Index, code: int) -> str:
    return repr(str(categories[code])) if 0 <= code < len(categories) else "no label"


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
