"""Genes, labels and values of Parquet files of cells with lists of gene tokens (`perturbdiff.io.token_parquet`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

from perturbdiff.io.columns import CategoricalColumn, Column, Texts
from perturbdiff.io.matrices import VALUES_PER_BLOCK, Block, checked_block
from perturbdiff.io.token_parquet import (
    COUNTS,
    GENE_TABLE,
    SAMPLE_TABLE,
    TOKENS,
    TokenParquet,
    beside,
    is_number,
)
from perturbdiff.runtime import tabular
from perturbdiff.runtime.errors import UserError, listing, nearest

_CELL, _SAMPLE, _TOKEN, _SYMBOL = "BARCODE_SUB_LIB_ID", "sample", "token_id", "gene_symbol"
_SOME_ROWS = 64


def layout_of(root: TokenParquet) -> _Layout:
    """Return how genes, labels and values are found; see `perturbdiff.io.layouts.Layout`."""
    return _Layout(root)


class _Layout:
    """Finds genes, labels and values in `TokenParquet`."""

    left_out: Mapping[str, int] = {}

    def __init__(self, root: TokenParquet) -> None:
        self._root, self._path = root, root.path
        self.n_cells = int(root.edges[-1])

    @cached_property
    def _genes(self) -> pd.DataFrame:
        """The table of genes, in the order of their tokens."""
        path = beside(self._path, GENE_TABLE)
        if path is None:
            raise UserError(
                f"{self._path}: its genes are numbers (tokens), and no {GENE_TABLE}, which names them, is beside it or "
                "in the folder 'metadata'; get it from the same data set"
            )
        table = tabular.read_parquet(path, "get it again")
        if _TOKEN not in table or not pd.api.types.is_integer_dtype(table[_TOKEN].dtype):
            raise UserError(
                f"{path}: has no column '{_TOKEN}' of whole numbers; get it from the same data set"
            )
        table = table.sort_values(_TOKEN)
        if table[_TOKEN].duplicated().any() or table[_TOKEN].min() < 0:
            raise UserError(f"{path}: '{_TOKEN}' is negative or repeated; get the table again")
        return table

    def gene_names(self, key: str | None) -> list[str]:
        names = [c for c in self._genes.columns if c != _TOKEN]
        wanted = key or (_SYMBOL if _SYMBOL in names else next(iter(names), _SYMBOL))
        if wanted not in names:
            hint = nearest(wanted, names) or f"; columns: {listing(names)}"
            raise UserError(f"{beside(self._path, GENE_TABLE)}: no column '{wanted}' (data.gene_key){hint}")
        return self._genes[wanted].astype(object).map(str).tolist()

    def unique_keys(self) -> list[str]:
        names = [str(c) for c in self._genes.columns if c != _TOKEN]
        return [
            name for name in names if not (self._genes[name].isna() | self._genes[name].duplicated()).any()
        ]

    def cell_names(self, start: int, stop: int) -> np.ndarray:
        if _CELL not in self._root.schema.names:
            return np.array([str(k) for k in range(start, stop)], object)
        return _ArrowColumn(self._root, _CELL).values(start, stop)

    def obs_columns(self) -> list[str]:
        own = [name for name in self._root.schema.names if name not in (TOKENS, COUNTS, _CELL)]
        return own + [name for name in self._samples.columns if name not in own]

    @cached_property
    def _samples(self) -> pd.DataFrame:
        """Further labels of each sample, indexed by sample; empty if there is no such table."""
        path = beside(self._path, SAMPLE_TABLE)
        if path is None or _SAMPLE not in self._root.schema.names:
            return pd.DataFrame()
        table = tabular.read_parquet(path, "get it again")
        if _SAMPLE not in table or table[_SAMPLE].duplicated().any():
            raise UserError(f"{path}: has no column '{_SAMPLE}', or a sample twice; get it again")
        return table.set_index(_SAMPLE)

    def obs_column(self, name: str) -> Column:
        if name in self._root.schema.names:
            return _ArrowColumn(self._root, name)
        return _column_of_samples(self._root, pd.Series(self._samples[name]))

    def places(self) -> list[str]:
        return ["X"]

    def matrix(self, scratch: Path) -> TokenMatrix:
        del scratch
        return TokenMatrix(self._root, self._genes[_TOKEN].to_numpy(np.int64))

    def some_values(self, place: str) -> np.ndarray:
        del place
        starts = np.unique(np.linspace(0, max(0, self.n_cells - _SOME_ROWS), 4).astype(np.int64)).tolist()
        blocks = [b for a in starts for b in self.matrix(Path()).blocks(a, min(a + _SOME_ROWS, self.n_cells))]
        return np.concatenate([block.data for block in blocks]).astype(np.float64)


class TokenMatrix:
    """The values of `TokenParquet`: each list of tokens and counts is a row.

    Parameters
    ----------
    root
        The files.
    tokens
        Token of each column, ascending, int64 [genes].
    """

    def __init__(self, root: TokenParquet, tokens: np.ndarray) -> None:
        self._root, self._tokens = root, tokens
        self.shape = (int(root.edges[-1]), len(tokens))

    @property
    def num_values(self) -> int:
        """Number of stored values, markers among them."""
        return self._root.num_values

    def prepare(self) -> None:
        """Do nothing: the files can be read as they are."""

    def blocks(
        self, start: int = 0, stop: int | None = None, limit: int = VALUES_PER_BLOCK
    ) -> Iterator[Block]:
        """Yield consecutive blocks of rows, of at most 512 cells each, columns ascending."""
        del limit
        end = self.shape[0] if stop is None else stop
        for row, batch in self._root.batches(start, end, [TOKENS, COUNTS]):
            yield self._block(row, batch.column(TOKENS), batch.column(COUNTS))

    def _block(self, row: int, tokens: pa.Array, counts: pa.Array) -> Block:
        sizes, others = (_lengths(lists) for lists in (tokens, counts))
        if not np.array_equal(sizes, others):
            cell = row + int(np.flatnonzero(sizes != others)[0])
            raise ValueError(f"row {cell} has another number of {TOKENS} than of {COUNTS}")
        ends = np.cumsum(sizes)
        of_gene, values = (c.flatten() for c in (tokens, counts))
        if of_gene.null_count or values.null_count:
            raise ValueError("a list has an entry without a value")
        data, number = values.to_numpy(), of_gene.to_numpy()
        first = (ends - sizes)[sizes > 0]
        keep = np.ones(len(data), bool)
        keep[first[data[first] < 0]] = False
        pointers = np.concatenate([[0], np.cumsum(keep)])[np.concatenate([[0], ends])]
        place = self._columns(number[keep])
        matrix = sparse.csr_matrix((data[keep], place, pointers), shape=(len(sizes), self.shape[1]))
        matrix.sort_indices()
        return checked_block(row, matrix.indptr.astype(np.int64), matrix.indices, matrix.data, self.shape[1])

    def _columns(self, tokens: np.ndarray) -> np.ndarray:
        """Return the column of each token, int32."""
        place = np.minimum(np.searchsorted(self._tokens, tokens), len(self._tokens) - 1)
        unknown = self._tokens[place] != tokens
        if unknown.any():
            raise UserError(
                f"{self._root.path}: gene token {int(tokens[unknown][0])} is not in {GENE_TABLE}; take that table from "
                "the same data set"
            )
        return place.astype(np.int32)


def _lengths(lists: pa.Array) -> np.ndarray:
    """Return the length of each list, 0 for none, int64."""
    known = pc.call_function("list_value_length", [lists])
    return pc.fill_null(known, 0).to_numpy().astype(np.int64)


class _ArrowColumn:
    """A column of labels or numbers, read in pieces."""

    def __init__(self, root: TokenParquet, name: str) -> None:
        self._root, self._name = root, name
        kind = root.schema.field(name).type
        self.dtype = np.dtype(kind.to_pandas_dtype() if is_number(kind) else object)

    def _pieces(self, start: int, stop: int) -> Iterator[pa.Array]:
        for _, batch in self._root.batches(start, stop, [self._name]):
            yield batch.column(0)

    def values(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop``; texts as str in an object array."""
        pieces = [piece.to_pandas().to_numpy() for piece in self._pieces(start, stop)]
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def codes(self, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return the number of each label in ``texts``."""
        found = [np.empty(0, np.int32)]
        for piece in self._pieces(start, stop):
            coded = piece if pa.types.is_dictionary(piece.type) else piece.dictionary_encode()
            known = texts.numbers_of(coded.dictionary.to_pylist())
            found.append(known[pc.fill_null(coded.indices, len(known) - 1).to_numpy()])
        return np.concatenate(found)


def _column_of_samples(root: TokenParquet, values: pd.Series) -> Column:
    """Return a label that follows from a cell's sample."""
    return CategoricalColumn(
        _SampleRows(root, values.index), values.astype(object).where(values.notna(), None)
    )


class _SampleRows:
    """Row of each cell's sample in the table of samples, read by slices; -1 where it has none."""

    def __init__(self, root: TokenParquet, samples: pd.Index) -> None:
        self._column = _ArrowColumn(root, _SAMPLE)
        self._texts = Texts(samples.map(str))
        self._known = len(samples)

    def __getitem__(self, span: slice) -> np.ndarray:
        codes = self._column.codes(span.start, span.stop, self._texts)
        return np.where(codes < self._known, codes, -1)
