"""Columns of obs, read in pieces.

Labels become small numbers at once: there is never a Python object for each cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from perturbdiff.io.damage import explain_damage
from perturbdiff.runtime.large_arrays import long_array

ROWS_PER_READ = 1 << 17
"""Cells whose labels are read at once."""
MISSING = -1


def row_ranges(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows that labels are read in."""
    for start in range(0, num_rows, ROWS_PER_READ):
        yield start, min(start + ROWS_PER_READ, num_rows)


def small_dtype(count: int) -> np.dtype:
    """Return the smallest signed integer type for ``count`` numbers from 0 and for `MISSING`."""
    return np.dtype(np.min_scalar_type(-max(1, count)))


class Texts:
    """Distinct texts, numbered as they come.

    Attributes
    ----------
    names
        The texts by number.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        for name in names:
            self.number(name)

    def number(self, text: str) -> int:
        """Return the number of ``text``, the next free one if it is new; `MISSING` for an empty text."""
        if not text:
            return MISSING
        number = self._numbers.setdefault(text, len(self.names))
        if number == len(self.names):
            self.names.append(text)
        return number

    def numbers_of(self, values: Iterable[Any]) -> np.ndarray:
        """Return the number of each value's text and `MISSING` at the end, int32: a table to look codes up in."""
        return np.array([*(self.number(as_text(v)) for v in values), MISSING], np.int32)


def as_text(value: Any) -> str:
    """Return a label as text; a whole number stored as a float loses its '.0', a missing value is empty."""
    if isinstance(value, bytes):
        return value.decode()
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value is pd.NA or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class Column(Protocol):
    """One obs column of one file."""

    @property
    def dtype(self) -> Any:
        """Type of the values."""
        ...

    def codes(self, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return for rows ``start`` to ``stop`` the number of each label in ``texts``, int32, `MISSING` if none."""
        ...

    def values(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop`` as they are."""
        ...


class PlainColumn:
    """A column of texts, numbers or truth values; those of ``mask`` (an array like it) are missing."""

    def __init__(self, array: Any, mask: Any = None) -> None:
        self._array, self._mask = array, mask
        self.dtype = array.dtype
        if mask is not None:  # a missing number is NaN
            self.dtype = np.dtype(np.float64 if array.dtype.kind in "iuf" else object)

    def values(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop``; texts as str in an object array, NaN where masked."""
        return _decoded(self._read(start, stop))

    def _read(self, start: int, stop: int) -> np.ndarray:
        values = np.asarray(self._array[start:stop])
        values = values if values.dtype.kind in "biuf" else values.astype(object)
        if self._mask is not None:
            values = values.astype(self.dtype)
            values[np.asarray(self._mask[start:stop], bool)] = np.nan
        return values

    def codes(self, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return the number of each label in ``texts``."""
        return codes_of(self._read(start, stop), texts)


class CategoricalColumn:
    """A categorical column: codes on disk, and its categories."""

    dtype = np.dtype(object)

    def __init__(self, codes: Any, categories: Iterable[Any]) -> None:
        self._codes, self._categories = codes, list(categories)
        self._known: tuple[Texts, np.ndarray] | None = None

    def values(self, start: int, stop: int) -> np.ndarray:
        """Return the labels of rows ``start`` to ``stop`` as an object array, None where missing."""
        return np.array([*self._categories, None], object)[self._read(start, stop)]

    def codes(self, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return the number of each label in ``texts``."""
        if self._known is None or self._known[0] is not texts:
            self._known = texts, texts.numbers_of(self._categories)
        return self._known[1][self._read(start, stop)]

    def _read(self, start: int, stop: int) -> np.ndarray:
        codes = np.asarray(self._codes[start:stop])
        if codes.dtype.kind not in "iu":
            raise ValueError(f"the codes of a categorical column are of type {codes.dtype}")
        if len(codes) and (codes.min() < MISSING or codes.max() >= len(self._categories)):
            raise ValueError("a categorical column has a code without a category")
        return codes


class CheckedColumn:
    """A column of a file; damage found while reading it is a `UserError`."""

    def __init__(self, path: Path, column: Column) -> None:
        self._path, self._column = path, column

    @property
    def dtype(self) -> Any:
        """Type of the labels."""
        return self._column.dtype

    def codes(self, start: int, stop: int, texts: Texts) -> np.ndarray:
        """Return the number of each label in ``texts``."""
        with explain_damage(self._path):
            return self._column.codes(start, stop, texts)

    def values(self, start: int, stop: int) -> np.ndarray:
        """Return the labels of rows ``start`` to ``stop``."""
        with explain_damage(self._path):
            return self._column.values(start, stop)


def codes_of(values: np.ndarray | pd.Series, texts: Texts) -> np.ndarray:
    """Return the number of each of ``values`` in ``texts``, int32, `MISSING` for a missing value."""
    codes, distinct = pd.factorize(values)
    return texts.numbers_of(distinct)[codes]


def open_column(element: Any) -> Column:
    """Return the column stored as ``element``, an array or a group of AnnData's obs."""
    if hasattr(element, "keys"):
        if "codes" in element:
            return CategoricalColumn(element["codes"], whole_column(element["categories"]))
        if "mask" in element:
            return PlainColumn(element["values"], element["mask"])
        raise ValueError(f"a column of an unknown kind ({element.attrs.get('encoding-type')})")
    if "categories" in element.attrs:  # anndata before 0.8: a reference to the categories
        categories = element.file[element.attrs["categories"]]
        return CategoricalColumn(element, whole_column(categories))
    return PlainColumn(element)


def num_entries(element: Any) -> int:
    """Return the length of the column stored as ``element``."""
    if hasattr(element, "keys"):
        names = [name for name in ("codes", "values") if name in element]
        if not names:
            raise ValueError("a column has neither codes nor values")
        element = element[names[0]]
    return int(element.shape[0])


def whole_column(element: Any) -> np.ndarray:
    """Return all values stored as ``element``, texts as str in an object array, NaN where missing."""
    return _decoded(open_column(element).values(0, num_entries(element)))


def _decoded(values: np.ndarray) -> np.ndarray:
    """Return values with texts as str; HDF5 gives them as bytes."""
    if values.dtype != object:
        return values
    return np.array([v.decode() if isinstance(v, bytes) else v for v in values.tolist()], object)


def joined(columns: Sequence[Column], lengths: Sequence[int]) -> pd.Series:
    """Return columns of several files one after another in as few bytes as hold them exactly.

    Numbers stay numbers if all columns have them; anything else is a sorted categorical of texts, in which a
    missing label is the empty text.
    """
    ends = np.cumsum([0, *lengths])
    ranges = [(c, a, b, slice(e + a, e + b)) for c, n, e in zip(columns, lengths, ends, strict=False)
              for a, b in row_ranges(n)]  # fmt: skip
    kinds = {np.dtype(c.dtype).kind for c in columns}
    if kinds <= set("iuf"):
        numbers = long_array(int(ends[-1]), np.result_type(*(c.dtype for c in columns)))
        for column, a, b, place in ranges:
            numbers[place] = column.values(a, b)
        return pd.Series(_narrow(numbers))
    texts, pieces = Texts(), []
    for column, a, b, _ in ranges:
        codes = column.codes(a, b, texts)
        pieces.append(codes.astype(small_dtype(len(texts.names))))
    categories = sorted([*texts.names, ""])
    rank = pd.Index(categories).get_indexer(pd.Index([*texts.names, ""])).astype(small_dtype(len(categories)))
    every = long_array(int(ends[-1]), rank.dtype)
    for (_, _, _, place), codes in zip(ranges, pieces, strict=True):
        every[place] = rank[codes]
    return pd.Series(pd.Categorical.from_codes(every, categories))  # type: ignore[arg-type]


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """Return numbers in the smallest type that holds them exactly."""
    if not len(numbers):
        return numbers
    if numbers.dtype.kind in "iu":
        low, high = numbers.min(), numbers.max()
        return numbers.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)), copy=False)
    for start, stop in row_ranges(len(numbers)):
        with np.errstate(over="ignore"):
            small = numbers[start:stop].astype(np.float32)
        if not np.array_equal(small, numbers[start:stop], equal_nan=True):
            return numbers
    return numbers.astype(np.float32, copy=False)


class Numbering:
    """Numbers pairs of non-negative numbers as they come, so that labels combine to conditions."""

    def __init__(self) -> None:
        self._keys, self._numbers = np.empty(0, np.int64), np.empty(0, np.int32)

    def __call__(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the number of each pair, int32; `MISSING` where either is."""
        keys = (first.astype(np.int64) << 32) | second
        known = (first >= 0) & (second >= 0)
        asked = keys if known.all() else keys[known]
        place = np.searchsorted(self._keys, asked)
        new = np.ones(len(asked), bool)
        inside = place < len(self._keys)
        new[inside] = self._keys[place[inside]] != asked[inside]
        if new.any():
            self._add(np.unique(asked[new]))
            place = np.searchsorted(self._keys, asked)
        if asked is keys:
            return self._numbers[place]
        numbers = np.full(len(keys), MISSING, np.int32)
        numbers[known] = self._numbers[place]
        return numbers

    def _add(self, keys: np.ndarray) -> None:
        numbers = np.arange(len(self._keys), len(self._keys) + len(keys), dtype=np.int32)
        every = np.concatenate([self._keys, keys])
        order = np.argsort(every)
        self._keys, self._numbers = every[order], np.concatenate([self._numbers, numbers])[order]

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and the second of each pair by number, int64."""
        keys = np.empty_like(self._keys)
        keys[self._numbers] = self._keys
        return keys >> 32, keys & 0xFFFFFFFF
