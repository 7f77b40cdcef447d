"""Reads any rows of a store as log1p values, from disk or from memory.

A store is a folder of partitions, which are AnnData Zarr folders that other tools can open (docs/store.md).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zarr
from scipy import sparse

from perturbdiff.conditions.condition import SET, condition_table
from perturbdiff.io.columns import num_entries, whole_column
from perturbdiff.io.damage import explain_damage
from perturbdiff.io.zarr_check import check_part, open_group
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.large_arrays import Node, long_array
from perturbdiff.store import checksums, row_kernels, stored_rows
from perturbdiff.store.row_blocks import RowBlocks
from perturbdiff.store.store_head import StoreHead
from perturbdiff.store.stored_rows import Pieces, RowPointers, RowsOnDisk
from perturbdiff.store.zarr_shards import ShardedReader

__all__ = ["MemoryStore", "Store", "condition_table", "dataset_of", "value_factors"]

_VALUES_PER_READ = 1 << 24
_ROWS_PER_PIECE = 65_536  # of obs: a chunk of a store
_ALIGNED = 64
_KEY = re.compile(r"(?<=.)-[0-9a-f]{8}$")

Rows = np.ndarray | slice | Sequence[int]


def value_factors(n_counts: np.ndarray, target_sum: float, input_scale: str) -> np.ndarray:
    """Return the factor of a cell's stored values before log1p, float32: target_sum / n_counts.

    It is 0 for cells without counts, and 1 if log1p values are stored.
    """
    if input_scale == "log1p":
        return np.ones(len(n_counts), np.float32)
    depth = n_counts.astype(np.float64)
    return np.divide(target_sum, depth, out=np.zeros_like(depth), where=depth > 0).astype(np.float32)


def dataset_of(store: Path) -> str:
    """Return the name of the data set in a store: the name of its folder, without the key that the workflow adds.

    Stores of one data set with different genes have different keys (``pbmc-1a2b3c4d``). A model has one input layer
    for each data set.
    """
    return _KEY.sub("", store.resolve().name)


def reading(part: Path) -> contextlib.AbstractContextManager[None]:
    """Turn the errors that a missing or damaged file of a partition raises into a `UserError`."""
    return explain_damage(part, "run preprocess again with --force")


class Store(StoreHead):
    """A finished store, read from disk. It has the attributes of `StoreHead`, and these.

    Attributes
    ----------
    genes
        Names of the columns.
    conditions
        Table of conditions by id: ``cell_type, batch, perturbation, n_cells, start, stop, is_control,
        control, part``. ``start`` and ``stop`` are rows of the store, and ``control`` is an id or -1.
    perturbations
        Table ``perturbation, agent, dose`` (nan without a dose).
    var
        Gene statistics over the cells that were used to select genes, indexed by gene.

    cache_bytes
        Bytes of decoded chunks that are kept; it can be set until the first value is read.

    Raises
    ------
    UserError
        If ``path`` is not a finished store of this version.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.cache_bytes = stored_rows.CACHE_BYTES
        self.conditions = self._table("conditions")
        self.perturbations = self._table("perturbations")
        self.var = self._table("genes")
        self.genes = [str(g) for g in self.var.index]
        size = sum(check_part(path) for path in self.parts)
        if not 0 <= self.n_cells <= size or self.edges[-1] != self.n_cells or (np.diff(self.edges) < 0).any():
            raise UserError(
                f"{self.path}: the manifest tells of {self.n_cells} cells, which its parts do not hold; "
                "run preprocess again with --force"
            )

    def _table(self, name: str) -> pd.DataFrame:
        with self._reading_table(name) as path:
            return tabular.read_parquet(path, "run preprocess again with --force")

    def max_value(self) -> np.ndarray:
        """Return the largest log1p value of each gene in the whole store, float32 [G]."""
        return self.var["max_log1p"].to_numpy(np.float32)

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return obs in store order.

        Parameters
        ----------
        columns
            Names among ``cell`` (the cell's name in the input), ``cell_type, batch, perturbation, n_counts`` (depth
            over all genes of the input), ``n_genes``, ``source_row, source_file``, ``dose``, ``set`` and the further
            columns that were kept. None for all.

        Raises
        ------
        UserError
            If a column does not exist.
        """
        frames = []
        for path in self.parts:
            with reading(path):
                frames.append(self._part_obs(path, columns))
        return pd.concat(frames, ignore_index=True)

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the names of the cells ``start`` to ``stop``, object array of str. Only these are read."""
        pieces = [np.empty(0, object)]
        for path, low, high in zip(self.parts, self.edges[:-1], self.edges[1:], strict=True):
            if start < high and stop > low:
                with reading(path):
                    group = open_group(path)["obs"]
                    index = str(group.attrs["_index"])
                    self.require(f"{path.name}/obs/{index}/")
                    names: Any = group[index]
                    pieces.append(np.asarray(names[max(start - low, 0) : min(stop, high) - low], object))
        return np.concatenate(pieces)

    def _part_obs(self, path: Path, columns: Sequence[str] | None) -> pd.DataFrame:
        from anndata.io import read_elem  # imported here: it imports dask.array, and few commands read obs

        return pd.DataFrame({n: read_elem(stored) for n, stored in self._obs_of(path, columns).items()})

    def _obs_of(self, path: Path, columns: Sequence[str] | None) -> dict[str, Any]:
        """Return columns of a partition's obs as they are stored, after checking their lengths."""
        group: Any = open_group(path)["obs"]
        have = ["cell", *group.attrs["column-order"]]
        unknown = [c for c in columns or () if c not in have]
        if unknown:
            hint = nearest(unknown[0], have) or ";"
            raise UserError(f"{self.path}: no obs column '{unknown[0]}'{hint} columns: {listing(have, 20)}")
        names = have if columns is None else columns
        stored = {n: str(group.attrs["_index"]) if n == "cell" else n for n in names}
        for name in stored.values():
            self.require(f"{path.name}/obs/{name}/")
        cells = int(np.diff(self.edges)[self.parts.index(path)])
        for n, name in stored.items():
            if (length := num_entries(group[name])) != cells:
                raise ValueError(f"obs column '{n}' has {length} entries for {cells} cells")
        return {n: group[name] for n, name in stored.items()}

    def obs_pieces(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pd.DataFrame]]:
        """Yield `obs` some cells at a time: the first row, and the columns of at most 65,536 cells of one partition."""
        for path, first, last in zip(self.parts, self.edges.tolist(), self.edges.tolist()[1:], strict=False):
            with reading(path):
                stored = self._obs_of(path, columns)
                known = {n: whole_column(c["categories"]) for n, c in stored.items() if hasattr(c, "keys")}
                for start in range(0, last - first, _ROWS_PER_PIECE):
                    cut = slice(start, start + _ROWS_PER_PIECE)
                    piece = {
                        n: pd.Categorical.from_codes(c["codes"][cut], known[n]) if n in known else c[cut]
                        for n, c in stored.items()
                    }
                    yield first + start, pd.DataFrame(piece)

    def require(self, prefix: str) -> None:
        """Raise `UserError` if a file of the store whose name begins with ``prefix`` is missing."""
        checksums.require(self.path, self._recorded, prefix)

    @property
    def n_counts(self) -> np.ndarray:
        """Depth of every cell over all genes of the input, float32 [N].

        Raises
        ------
        UserError
            If a cell has counts but no depth. Zarr reads a chunk whose file is missing as zeros.
        """
        return self._depths.every

    def depths(self, rows: np.ndarray) -> np.ndarray:
        """Return `n_counts` of ``rows`` (int64 [n]), float32 [n]. No others are read."""
        return self._depths.at(rows)

    @cached_property
    def _depths(self) -> RowBlocks:
        return RowBlocks(self.n_cells, np.dtype(np.float32), self._read_depths)

    def _read_depths(self, start: int, stop: int, out: np.ndarray) -> None:
        """Read the depths of the cells ``start`` to ``stop``."""
        for path, low, high in zip(
            self.parts, self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True
        ):
            first, last = max(start, low), min(stop, high)
            if first >= last:
                continue
            with reading(path):
                stored: Any = zarr.open_array(path / "obs" / "n_counts", mode="r")
                if stored.shape != (high - low,):
                    raise ValueError(f"{stored.shape} depths for {high - low} cells")
                depth = out[first - start : last - start]
                depth[:] = stored[first - low : last - low]
                if (depth[self._pointers.occupied(first, last)] <= 0).any():
                    raise UserError(
                        f"{self.path}: cells with counts have depth 0; run preprocess again with --force"
                    )

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of stored values of each of ``rows`` (int64 [n]), int64 [n]."""
        return self._pointers.flat(rows)[1]

    @cached_property
    def sets(self) -> list[str] | None:
        """Labels of the sets (wells, guides, replicates), or None if the store does not know which cells were a set."""
        return None if self._sets is None else self._sets[0]

    def set_of(self, rows: Rows) -> np.ndarray:
        """Return the number of the set of each of ``rows`` in `sets`, int [n]. The store must know sets."""
        if self._sets is None:
            raise ValueError(f"{self.path}: does not know sets")
        codes = self._sets[1]
        return codes[rows] if isinstance(rows, slice) else codes[self.row_numbers(rows)]

    @cached_property
    def _sets(self) -> tuple[list[str], np.ndarray] | None:
        """The labels of the sets, and the number of each cell's, in the smallest type."""
        if self.set_key is None:
            return None
        labels: list[str] = []
        codes = np.empty(0, np.int8)
        for first, piece in self.obs_pieces([SET]):
            column = piece[SET]
            if not isinstance(column.dtype, pd.CategoricalDtype) or column.isna().to_numpy().any():
                raise UserError(f"{self.path}: cells without a set; run preprocess again with --force")
            if not labels:
                labels = [str(label) for label in column.cat.categories]
                codes = long_array(self.n_cells, column.cat.codes.dtype)
            codes[first : first + len(piece)] = column.cat.codes
        return labels, codes

    def factors(self, rows: np.ndarray) -> np.ndarray:
        """Return the factors of the stored values of ``rows`` before log1p, float32 [n]."""
        return value_factors(self.depths(rows), self.target_sum, self.input_scale)

    @cached_property
    def _pointers(self) -> RowPointers:
        with reading(self.path):
            return RowPointers(self.parts, self.edges, self.n_values)

    @cached_property
    def _on_disk(self) -> RowsOnDisk:
        with reading(self.path):
            return RowsOnDisk(self.parts, self._pointers, self.n_genes, self.cache_bytes)

    def pieces(self, rows: np.ndarray) -> Iterator[Pieces]:
        """Yield the positions in memory of the values of ``rows`` (int64 [n]). Each is valid until the next one."""
        return self._on_disk.pieces(rows)

    def expression(self, rows: Rows) -> sparse.csr_matrix:
        """Return log1p values of ``rows``, in this order. Rows may repeat.

        Parameters
        ----------
        rows
            Row numbers of the store, int [n], or a slice.

        Returns
        -------
        scipy.sparse.csr_matrix
            float32 [n, G]: log1p(count * target_sum / depth), natural logarithm, not divided by ``scale``.
        """
        return self._matrix(self.row_numbers(rows), as_stored=False)

    def counts(self, rows: Rows) -> sparse.csr_matrix:
        """Return the stored values of ``rows`` [n, G]: uint16 or uint32 counts, or float32 log1p values."""
        return self._matrix(self.row_numbers(rows), as_stored=True)

    def dense(
        self,
        rows: Rows,
        out: np.ndarray | None = None,
        *,
        place: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return `expression` as a dense float32 array [n, G].

        Parameters
        ----------
        out
            Array to write to, [at least n, columns].
        place
            int64 [n]: the row of ``out`` for each row. By default, the first n rows in order.
        columns
            int32 [G]: the column of ``out`` for each gene, or -1 for none (`GeneMap.columns`). It needs ``out``. The
            other columns become zero.
        """
        numbers = self.row_numbers(rows)
        if out is None:
            out = np.empty((len(numbers), self.n_genes), np.float32)
        place = np.arange(len(numbers)) if place is None else place
        columns = np.empty(0, np.int32) if columns is None else columns
        if self.input_scale == "log1p":
            for pieces in self.pieces(numbers):
                row_kernels.dense_values(*pieces, columns, place, out)
            return out
        factors = self.factors(numbers)
        for pieces in self.pieces(numbers):
            row_kernels.dense_log1p(*pieces, factors, columns, place, out)
        return out

    def blocks(self, rows_per_block: int = 4096) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield blocks of all cells in order: the first row, and log1p CSR [at most rows_per_block, G]."""
        for start in range(0, self.n_cells, rows_per_block):
            yield start, self.expression(slice(start, start + rows_per_block))

    def in_memory(self, node: Node | None = None) -> MemoryStore:
        """Return the store in memory (`nbytes_in_memory` bytes). All processes of ``node`` share one copy."""
        return MemoryStore(self, node)

    def row_numbers(self, rows: Rows) -> np.ndarray:
        """Return row numbers, int64 [n]. Raises IndexError if a row is not in the store."""
        if isinstance(rows, slice):
            return np.arange(*rows.indices(self.n_cells), dtype=np.int64)
        numbers = np.ascontiguousarray(rows, np.int64)
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.n_cells):
            raise IndexError(f"rows must lie in 0..{self.n_cells - 1}")
        return numbers

    def sparse(
        self, rows: np.ndarray, columns: np.ndarray | None = None, *, as_stored: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows (int64 [n]) as starts [n + 1], column numbers (int32) and values (as stored, or log1p).

        ``columns`` (int32 [G], `GeneMap.columns`) renumbers the columns, and -1 leaves a column out. The values of a
        row may then not ascend by column.
        """
        starts = np.concatenate([[0], np.cumsum(self._pointers.flat(rows)[1])])
        as_stored = as_stored or self.input_scale == "log1p"
        indices = np.empty(int(starts[-1]), np.int32)
        data = np.empty(int(starts[-1]), self.dtype if as_stored else np.float32)
        if as_stored:
            for pieces in self.pieces(rows):
                row_kernels.take_values(*pieces, starts, indices, data)
        else:
            factors = self.factors(rows)
            for pieces in self.pieces(rows):
                row_kernels.take_log1p(*pieces, factors, starts, indices, data)
        if columns is not None:
            new_starts = np.empty_like(starts)
            end = row_kernels.drop_columns(starts, columns, indices, data, new_starts)
            return new_starts, indices[:end], data[:end]
        return starts, indices, data

    def _matrix(self, rows: np.ndarray, *, as_stored: bool) -> sparse.csr_matrix:
        starts, indices, data = self.sparse(rows, as_stored=as_stored)
        indptr = starts.astype(np.int32) if starts[-1] <= np.iinfo(np.int32).max else starts
        matrix = sparse.csr_matrix((data, indices, indptr), shape=(len(rows), self.n_genes), copy=False)
        matrix.has_sorted_indices = True
        matrix.has_canonical_format = True
        return matrix


class MemoryStore(Store):
    """A `Store` whose column numbers and values are in memory.

    Parameters
    ----------
    store
        The store on disk.
    node
        Share one copy with the other processes of a node. All of them must do so.
    """

    def __init__(self, store: Store, node: Node | None = None) -> None:
        super().__init__(store.path)
        if node is None:
            pointers, depths = store._pointers, store._depths
            self._indices = np.empty(self.n_values, self.index_dtype)
            self._data = np.empty(self.n_values, self.dtype)
            self._read_values(pointers)
        else:
            pointers, depths = self._share(node, store)
        self._pointers, self._depths = pointers, depths

    def in_memory(self, node: Node | None = None) -> MemoryStore:
        """Return itself."""
        return self

    def pieces(self, rows: np.ndarray) -> Iterator[Pieces]:
        """Yield the positions in memory of the values of ``rows`` (int64 [n])."""
        begin, size = self._pointers.flat(rows)
        yield Pieces(begin, size, np.arange(len(rows)), self._indices, self._data)

    def _share(self, node: Node, store: Store) -> tuple[RowPointers, RowBlocks]:
        """Put all arrays into one shared block. Return its row pointers and depths."""
        pointer = RowPointers.dtype_for(self.n_values)
        kinds = [
            (self.n_values, self.index_dtype),
            (self.n_values, self.dtype),
            (self.n_cells + len(self.parts), pointer),
            (self.n_cells, np.dtype(np.float32)),
        ]
        places = np.cumsum([0, *(-(-n * dtype.itemsize // _ALIGNED) * _ALIGNED for n, dtype in kinds)])

        def cut(block: np.ndarray) -> list[np.ndarray]:
            return [
                block[a : a + n * dtype.itemsize].view(dtype)
                for a, (n, dtype) in zip(places, kinds, strict=False)
            ]

        def fill(block: np.ndarray) -> None:
            self._indices, self._data, rows, depth = cut(block)
            rows[:], depth[:] = store._pointers.places, store.n_counts
            self._read_values(store._pointers)

        key = str(Path(self.path).resolve())
        self._indices, self._data, rows, depth = cut(node.share(key, int(places[-1]), fill))
        return RowPointers(self.parts, self.edges, self.n_values, rows), RowBlocks.held(depth)

    def _read_values(self, pointers: RowPointers) -> None:
        for path, base in zip(self.parts, pointers.base, strict=False):
            for name, values in (("indices", self._indices), ("data", self._data)):
                _fill(ShardedReader(path / "X" / name), values[base:])


def _fill(reader: ShardedReader, values: np.ndarray) -> None:
    """Read a complete array into the beginning of ``values``, some whole chunks at a time."""
    step = max(_VALUES_PER_READ // reader.chunk, 1) * reader.chunk
    for start in range(0, reader.length, step):
        stop = min(start + step, reader.length)
        reader.read(start, stop, values[start:stop])
