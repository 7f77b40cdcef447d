"""Reading a store: any rows as log1p values, from disk or from memory.

A store is a folder of AnnData Zarr parts that need none of this to be opened; see docs/store.md for the layout.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import zarr
from scipy import sparse

from perturbdiff.data import kernels
from perturbdiff.data.schema import FORMAT, condition_table
from perturbdiff.data.shards import ShardedReader
from perturbdiff.errors import UserError, listing, nearest

__all__ = ["MemoryStore", "Store", "condition_table", "value_factors"]

_GAP_ROWS = 64
"""Runs of rows closer than this are read as one: a chunk holds as many rows."""

_ROWS_PER_READ = 65_536

Rows = np.ndarray | slice | Sequence[int]


def value_factors(n_counts: np.ndarray, target_sum: float, input_scale: str) -> np.ndarray:
    """Return what a cell's stored values are multiplied by before log1p, float32: target_sum / n_counts.

    0 for cells without counts, 1 where log1p values are stored.
    """
    if input_scale == "log1p":
        return np.ones(len(n_counts), np.float32)
    depth = n_counts.astype(np.float64)
    return np.divide(target_sum, depth, out=np.zeros_like(depth), where=depth > 0).astype(np.float32)


@contextlib.contextmanager
def _reading(part: Path) -> Iterator[None]:
    """Turn what a missing or damaged file of a part raises into a `UserError`."""
    try:
        yield
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{part}: is damaged ({reason}); run preprocess again with --force") from error


class Store:
    """A finished store, read from disk.

    Attributes
    ----------
    path
        Its folder.
    genes
        Names of the columns.
    n_cells, n_genes
        Its shape.
    target_sum
        Depth that counts are scaled to before the logarithm; nan if the input was log1p of unknown target.
    scale
        Divisor of log1p values in model units.
    input_scale
        ``counts``: integers are stored and log1p is computed here; ``log1p``: stored as given.
    control
        Label of the control perturbation.
    conditions
        Table of conditions by id: ``cell_type, batch, perturbation, n_cells, start, stop, is_control,
        control, part``; ``start`` and ``stop`` are rows of the store, ``control`` an id or -1.
    perturbations
        Table ``perturbation, agent, dose`` (nan without a dose).
    var
        Gene statistics over the cells that gene selection looked at, indexed by gene.

    Raises
    ------
    UserError
        If ``path`` is not a finished store of this version.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        facts = self._facts()
        self.n_cells, self.n_genes = int(facts["n_cells"]), int(facts["n_genes"])
        self.n_values = int(facts["n_values"])
        self.dtype = np.dtype(facts["dtype"])
        self.target_sum = float("nan") if facts["target_sum"] is None else float(facts["target_sum"])
        self.scale, self.control = float(facts["scale"]), str(facts["control"])
        self.input_scale, self.seed = str(facts["input_scale"]), int(facts["seed"])
        self.conditions = self._table("conditions")
        self.perturbations = self._table("perturbations")
        self.var = self._table("genes")
        self.genes = [str(g) for g in self.var.index]
        self._parts = [self.path / str(part["name"]) for part in facts["parts"]]
        self._edges = np.cumsum([0, *(int(part["n_cells"]) for part in facts["parts"])])
        missing = [p.name for p in self._parts if not p.is_dir()]
        if missing:
            raise UserError(f"{self.path}: parts are missing ({listing(missing, 3)}); run preprocess again")

    def _facts(self) -> dict[str, Any]:
        if not self.path.exists():
            raise UserError(f"store not found: {self.path}")
        try:
            facts = json.loads((self.path / "manifest.json").read_text())["results"]["store"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path}: is not a finished store; make one with perturbdiff preprocess"
            ) from None
        if facts["format"] != FORMAT:
            raise UserError(
                f"{self.path}: has store format {facts['format']}, this version reads {FORMAT}; "
                "run preprocess again"
            )
        return facts

    def _table(self, name: str) -> pd.DataFrame:
        try:
            return pd.read_parquet(self.path / f"{name}.parquet")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path}: {name}.parquet cannot be read ({error}); run preprocess again"
            ) from error

    def max_value(self) -> np.ndarray:
        """Return the largest log1p value of each gene in the whole store, float32 [G]."""
        return self.var["max_log1p"].to_numpy(np.float32)

    @property
    def nbytes_in_memory(self) -> int:
        """Bytes that `in_memory` needs: values, column numbers, row pointers, depths."""
        return self.n_values * (self.dtype.itemsize + self._index_dtype.itemsize) + 12 * self.n_cells

    @property
    def _index_dtype(self) -> np.dtype:
        return np.dtype(np.int16 if self.n_genes <= 1 << 15 else np.int32)

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return obs in store order.

        Parameters
        ----------
        columns
            Names among ``cell`` (the input's obs name), ``cell_type, batch, perturbation, n_counts`` (depth
            over all genes of the input), ``n_genes``, ``source_row, source_file``, ``dose`` and the extra
            columns kept; None for all.

        Raises
        ------
        UserError
            If a column does not exist.
        """
        frames = []
        for path in self._parts:
            with _reading(path):
                frames.append(self._part_obs(zarr.open_group(path, mode="r")["obs"], columns))
        return pd.concat(frames, ignore_index=True)

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        """Return the input's obs names of rows ``start`` to ``stop``, object array of str, reading these only."""
        pieces = [np.empty(0, object)]
        for path, low, high in zip(self._parts, self._edges[:-1], self._edges[1:], strict=True):
            if start < high and stop > low:
                group = zarr.open_group(path, mode="r")["obs"]
                names: Any = group[str(group.attrs["_index"])]  # type: ignore[index]
                pieces.append(np.asarray(names[max(start - low, 0) : min(stop, high) - low], object))
        return np.concatenate(pieces)

    def _part_obs(self, group: Any, columns: Sequence[str] | None) -> pd.DataFrame:
        have = ["cell", *group.attrs["column-order"]]
        unknown = [c for c in columns or () if c not in have]
        if unknown:
            raise UserError(
                f"{self.path}: no obs column '{unknown[0]}'{nearest(unknown[0], have)} columns: {listing(have, 20)}"
            )
        names = have if columns is None else columns
        index = group.attrs["_index"]
        return pd.DataFrame({n: anndata.io.read_elem(group[index if n == "cell" else n]) for n in names})

    @cached_property
    def n_counts(self) -> np.ndarray:
        """Depth of every cell over all genes of the input, float32 [N]."""
        return self.obs(["n_counts"])["n_counts"].to_numpy(np.float32)

    @cached_property
    def _factors(self) -> np.ndarray:
        """What a stored value is multiplied by before log1p, float32 [N]."""
        # zarr reads a chunk whose file is gone as zeros
        if (self.n_counts[np.diff(self._pointers) > 0] <= 0).any():
            raise UserError(f"{self.path}: cells with counts have depth 0; run preprocess again with --force")
        return value_factors(self.n_counts, self.target_sum, self.input_scale)

    @cached_property
    def _matrices(self) -> list[tuple[ShardedReader, ShardedReader]]:
        pairs = []
        for path in self._parts:
            with _reading(path):
                pairs.append((ShardedReader(path / "X" / "indices"), ShardedReader(path / "X" / "data")))
        return pairs

    @cached_property
    def _pointers(self) -> np.ndarray:
        """Place of every row's first value, counted over all parts, int64 [N + 1]."""
        pieces, base = [np.zeros(1, np.int64)], 0
        for path in self._parts:
            with _reading(path):
                own = np.asarray(zarr.open_array(path / "X" / "indptr", mode="r")[1:])
            pieces.append(own + base)
            base += int(own[-1]) if len(own) else 0
        pointers = np.concatenate(pieces)
        if pointers[-1] != self.n_values or (np.diff(pointers) < 0).any():
            raise UserError(f"{self.path}: row pointers are damaged; run preprocess again with --force")
        return pointers

    def expression(self, rows: Rows) -> sparse.csr_matrix:
        """Return log1p values of ``rows`` in the order given, repeats allowed.

        Parameters
        ----------
        rows
            Row numbers of the store, int [n], or a slice.

        Returns
        -------
        scipy.sparse.csr_matrix
            float32 log1p [n, G]: log1p(count * target_sum / depth), natural logarithm, not divided by
            ``scale``.
        """
        wanted = self._row_numbers(rows)
        starts, lengths, indices, data = self._fetch(wanted)
        out_indices, out_data = (
            np.empty(int(lengths.sum()), np.int32),
            np.empty(int(lengths.sum()), np.float32),
        )
        if self.input_scale == "log1p":
            kernels.take_rows(starts, lengths, indices, data, out_indices, out_data)
        else:
            factors = self._factors[wanted]
            kernels.take_log1p(starts, lengths, factors, indices, data, out_indices, out_data)
        return self._csr(out_data, out_indices, lengths)

    def counts(self, rows: Rows) -> sparse.csr_matrix:
        """Return what is stored of ``rows``: uint16 or uint32 counts, or float32 log1p values, [n, G]."""
        starts, lengths, indices, data = self._fetch(self._row_numbers(rows))
        out_indices, out_data = (
            np.empty(int(lengths.sum()), np.int32),
            np.empty(int(lengths.sum()), self.dtype),
        )
        kernels.take_rows(starts, lengths, indices, data, out_indices, out_data)
        return self._csr(out_data, out_indices, lengths)

    def dense(self, rows: Rows, out: np.ndarray | None = None) -> np.ndarray:
        """Return `expression` as a dense float32 array [n, G], written into ``out`` if given."""
        wanted = self._row_numbers(rows)
        starts, lengths, indices, data = self._fetch(wanted)
        if out is None:
            out = np.empty((len(wanted), self.n_genes), np.float32)
        if self.input_scale == "log1p":
            kernels.dense_values(starts, lengths, indices, data, out)
        else:
            kernels.dense_log1p(starts, lengths, self._factors[wanted], indices, data, out)
        return out

    def blocks(self, rows_per_block: int = 4096) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield (first row, log1p CSR [at most rows_per_block, G]) from the first cell to the last."""
        for start in range(0, self.n_cells, rows_per_block):
            yield start, self.expression(slice(start, start + rows_per_block))

    def in_memory(self) -> MemoryStore:
        """Return the same store with its values held in memory (`nbytes_in_memory`)."""
        return MemoryStore(self)

    def _row_numbers(self, rows: Rows) -> np.ndarray:
        if isinstance(rows, slice):
            return np.arange(*rows.indices(self.n_cells), dtype=np.int64)
        numbers = np.asarray(rows, np.int64)
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.n_cells):
            raise IndexError(f"rows must lie in 0..{self.n_cells - 1}")
        return numbers

    def _csr(self, data: np.ndarray, indices: np.ndarray, lengths: np.ndarray) -> sparse.csr_matrix:
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        if indptr[-1] <= np.iinfo(np.int32).max:
            indptr = indptr.astype(np.int32)
        matrix = sparse.csr_matrix((data, indices, indptr), shape=(len(lengths), self.n_genes), copy=False)
        matrix.has_sorted_indices = True
        matrix.has_canonical_format = True
        return matrix

    def _fetch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return starts and lengths of ``rows`` within flat column numbers and values, which follow."""
        pointers = self._pointers
        lengths = pointers[rows + 1] - pointers[rows]
        ordered = np.unique(rows)
        if not len(ordered):
            return lengths, lengths, np.empty(0, self._index_dtype), np.empty(0, self.dtype)
        part = np.searchsorted(self._edges, ordered, "right") - 1
        apart = (np.diff(ordered) > _GAP_ROWS) | (np.diff(part) > 0)
        first = ordered[np.concatenate([[0], np.flatnonzero(apart) + 1])]
        last = ordered[np.concatenate([np.flatnonzero(apart), [len(ordered) - 1]])]
        sizes = pointers[last + 1] - pointers[first]
        place = np.cumsum(sizes) - sizes
        indices, data = np.empty(int(sizes.sum()), self._index_dtype), np.empty(int(sizes.sum()), self.dtype)
        for a, b, at in zip(first, last, place, strict=True):
            self._read(int(a), int(b) + 1, int(at), indices, data)
        run = np.searchsorted(first, rows, "right") - 1
        return place[run] + pointers[rows] - pointers[first[run]], lengths, indices, data

    def _read(self, start: int, stop: int, at: int, indices: np.ndarray, data: np.ndarray) -> None:
        """Read the values of rows of one part into ``indices`` and ``data`` from place ``at`` on."""
        part = int(np.searchsorted(self._edges, start, "right")) - 1
        base = self._pointers[self._edges[part]]
        a, b = int(self._pointers[start] - base), int(self._pointers[stop] - base)
        if b > a:
            stored_indices, stored_data = self._matrices[part]
            stored_indices.read(a, b, indices[at : at + b - a])
            stored_data.read(a, b, data[at : at + b - a])


class MemoryStore(Store):
    """A store whose column numbers and values are held in memory; see `Store`."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.path)
        pointers = self._pointers
        self._indices = np.empty(self.n_values, self._index_dtype)
        self._data = np.empty(self.n_values, self.dtype)
        for low, high in zip(self._edges[:-1], self._edges[1:], strict=True):
            for start in range(int(low), int(high), _ROWS_PER_READ):
                stop = min(int(high), start + _ROWS_PER_READ)
                self._read(start, stop, int(pointers[start]), self._indices, self._data)

    def in_memory(self) -> MemoryStore:
        """Return itself."""
        return self

    def _fetch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        starts = self._pointers[rows]
        return starts, self._pointers[rows + 1] - starts, self._indices, self._data
