"""Which cells are kept: a short expression over obs columns, such as ``pass_filter == 'full' and n_genes > 200``.

The expression is parsed, never run. It can compare columns with texts, numbers and truth values, and join comparisons
by ``and``, ``or`` and ``not``; there are no calls, attributes or names of anything but columns.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbdiff.io.columns import Texts, as_text
from perturbdiff.runtime.errors import UserError, listing, nearest

_LONGEST = 2000
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`([^`]+)`")
_COLUMN = "_column_{}_"
_HOW = "write e.g. pass_filter == 'full', n_genes > 200, phase in ['G1', 'S'], joined by and, or, not"
_EQUAL: dict[type[ast.cmpop], bool] = {ast.Eq: True, ast.NotEq: False, ast.In: True, ast.NotIn: False}
_ORDER: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

Codes = Callable[[str, int, int, Texts], np.ndarray]
"""Returns the number of each cell's label in a column, for some rows; see `perturbdiff.io.columns.Column`."""


@dataclass(frozen=True)
class _Comparison:
    """A column compared with values: whether its text is one of them, or its number above or below one."""

    column: str
    values: tuple[str, ...]
    equal: bool
    order: Callable[[float, float], bool] | None = None

    def of(self, text: str) -> bool:
        """Return what is true of a cell with this label; one without a label (empty) equals and exceeds nothing."""
        if self.order is None:
            return (text in self.values) == self.equal
        return bool(text) and self.order(float(text), float(self.values[0]))


class CellFilter:
    """A parsed expression.

    Parameters
    ----------
    text
        The expression. A column whose name is no word stands in backticks.

    Attributes
    ----------
    columns
        Names of the columns that it asks for.

    Raises
    ------
    UserError
        If it is something else than comparisons of columns with values.
    """

    def __init__(self, text: str) -> None:
        self._text, self._names = text, dict[str, str]()
        self.comparisons: list[_Comparison] = []
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"it is longer than {_LONGEST} characters")
            self._tree = ast.parse(_QUOTED.sub(self._placeholder, text).strip(), mode="eval").body
            self._meaning = self._read(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = "" if isinstance(error, SyntaxError | MemoryError | RecursionError) else f" ({error})"
            raise UserError(f"data.keep: {text!r} cannot be read{why}; {_HOW}") from None
        self.columns = tuple(dict.fromkeys(one.column for one in self.comparisons))

    def _placeholder(self, found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        name = _COLUMN.format(len(self._names))
        self._names[name] = found[1]
        return name

    def _read(self, node: ast.expr) -> Any:
        """Return a part of the expression as a function of the truth of the comparisons."""
        if isinstance(node, ast.BoolOp):
            parts = [self._read(value) for value in node.values]
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return lambda truth: join.reduce([part(truth) for part in parts])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = self._read(node.operand)
            return lambda truth: ~part(truth)
        if not isinstance(node, ast.Compare):
            raise ValueError(f"'{ast.unparse(node)}' is no comparison")
        if len(node.ops) > 1:
            raise ValueError(f"'{ast.unparse(node)}' compares twice; join two comparisons by and")
        number = len(self.comparisons)
        self.comparisons.append(self._comparison(node.left, node.ops[0], node.comparators[0]))
        return lambda truth: truth[number]

    def _comparison(self, left: ast.expr, how: ast.cmpop, right: ast.expr) -> _Comparison:
        if not isinstance(left, ast.Name):
            raise ValueError(f"'{ast.unparse(left)}' stands where the name of a column belongs")
        column = self._names.get(left.id, left.id)
        if type(how) in _ORDER:
            value = _value(right)
            if isinstance(value, str | bool):
                raise ValueError(f"'{ast.unparse(right)}' is no number")
            return _Comparison(column, (str(value),), True, _ORDER[type(how)])
        if type(how) not in _EQUAL:
            raise ValueError("comparisons are ==, !=, <, <=, >, >=, in and not in")
        if not isinstance(how, ast.In | ast.NotIn):
            return _Comparison(column, (as_text(_value(right)),), _EQUAL[type(how)])
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise ValueError(f"a list belongs after in, as in {column} in ['a', 'b']")
        values = tuple(as_text(_value(value)) for value in right.elts)
        return _Comparison(column, values, _EQUAL[type(how)])

    def truth(self, of_comparisons: Sequence[np.ndarray]) -> np.ndarray:
        """Return what is true of each cell, from the truth of each of ``comparisons`` (bool [n] each)."""
        return self._meaning(of_comparisons)


def _value(node: ast.expr) -> str | int | float | bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if not isinstance(value, str | bool):
            return -value
    elif isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool):
        return node.value
    raise ValueError(f"'{ast.unparse(node)}' is no text in quotes and no number")


class KeptCells:
    """A filter on the cells of one file.

    Parameters
    ----------
    chosen
        The expression.
    shown
        Name of the file, for messages.
    columns
        Names of its obs columns.
    codes
        Reads the labels of a column.

    Raises
    ------
    UserError
        If the file lacks a column; all of them are named.
    """

    def __init__(self, chosen: CellFilter, shown: str, columns: Sequence[str], codes: Codes) -> None:
        lacking = [name for name in chosen.columns if name not in columns]
        if lacking:
            hints = [f"'{name}'{nearest(name, columns)}" for name in lacking]
            raise UserError(
                f"{shown}: no obs column {' and no '.join(hints)} (data.keep); columns: {listing(columns, 20)}"
            )
        self._filter, self._shown, self._codes = chosen, shown, codes
        self.texts = {name: Texts() for name in chosen.columns}

    @property
    def comparisons(self) -> list[_Comparison]:
        """The comparisons of the expression."""
        return self._filter.comparisons

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return whether each cell of rows ``start`` to ``stop`` is kept, bool.

        Raises
        ------
        UserError
            If a label is compared as a number and is none.
        """
        codes = {name: self._codes(name, start, stop, texts) for name, texts in self.texts.items()}
        return self._filter.truth([self._true_of(one)[codes[one.column]] for one in self.comparisons])

    def _true_of(self, one: _Comparison) -> np.ndarray:
        """Return the truth of a comparison for each label of its column, and for a missing label at the end."""
        names = self.texts[one.column].names
        try:
            return np.array([*(one.of(name) for name in names), one.of("")], bool)
        except ValueError:
            wrong = next(name for name in names if not _is_number(name))
            raise UserError(
                f"{self._shown}: obs column '{one.column}' holds '{wrong}', which is no number; data.keep can compare "
                "it by ==, != and in"
            ) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def unknown_values(files: Iterable[KeptCells]) -> list[str]:
    """Return a sentence for each value that data.keep asks for and no file has, once all cells were read."""
    files = list(files)
    found = []
    for number, one in enumerate(files[0].comparisons):
        if one.order is not None:
            continue
        known = {name: None for file in files for name in file.texts[file.comparisons[number].column].names}
        found += [
            f"no cell has '{value}' in obs column '{one.column}' (data.keep)"
            f"{nearest(value, known) or f'; its labels are {listing(known)}'}"
            for value in one.values
            if value not in known
        ]
    return found
