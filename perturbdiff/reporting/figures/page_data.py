"""What the scripts of the page read: names of points, the numbers of figures, and the cards of perturbations."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from perturbdiff.reporting.figures.perturbation_table import PerturbationTable
from perturbdiff.reporting.figures.svg import Look, Plot, page_color
from perturbdiff.runtime.errors import visible

_DIGITS = 7  # of a number in a download: the files beside the page hold all digits
_MOST_FIELDS = 400_000
"""Fields of a table that the page holds. Of a larger one it holds the first rows and says so."""


class _Pool:
    """Texts that the page holds once, by number."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def code(self, text: str) -> int:
        return self.texts.setdefault(visible(text), len(self.texts))


def page_data(
    plots: Iterable[Plot], look: Mapping[str, Look], tables: Sequence[PerturbationTable] = ()
) -> str:
    """Return a record for a script element of the page: JSON, packed with gzip, as base64.

    Parameters
    ----------
    plots
        Every figure on the page.
    look
        The methods that can be switched off, with their colours and markers.
    tables
        The tables of perturbations, for their cards.

    Returns
    -------
    str
        ``texts`` are pooled and meant by their numbers, ``methods`` hold colours and markers, ``figures`` named points
        and columns of numbers by figure, ``cards`` what a row of a table of perturbations opens. Texts hold no
        character that hides or reorders others.
    """
    pool = _Pool()
    figures = {plot.name: _figure(plot, pool) for plot in plots}
    cards = {one.table.name: _rounded(one.cards) for one in tables}
    methods = {visible(name): [page_color(one.color), one.marker] for name, one in look.items()}
    record = {"texts": list(pool.texts), "methods": methods, "figures": figures, "cards": cards}
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _figure(plot: Plot, pool: _Pool) -> dict[str, Any]:
    points = plot.points
    record: dict[str, Any] = {"title": pool.code(plot.title)}
    if len(points.x):
        record["x"], record["y"] = (_short(v) for v in (points.x, points.y))
        record["m"] = [pool.code(text) for text in points.methods]
        record["n"] = [pool.code(text) for text in points.names]
        record["v"] = [visible(text) for text in points.values]
    shown = max(1, _MOST_FIELDS // max(1, len(plot.data.columns)))
    record["columns"] = [_column(name, plot.data[name].iloc[:shown], pool) for name in plot.data.columns]
    if shown < len(plot.data):
        record["rows"] = len(plot.data)
    return record


def _column(name: object, values: pd.Series, pool: _Pool) -> list[Any]:
    """Return a column as its name, whether it holds texts, and its values: codes of texts, or numbers."""
    if isinstance(values.dtype, pd.CategoricalDtype) or not pd.api.types.is_numeric_dtype(values):
        return [visible(str(name)), 1, [pool.code("" if _missing(v) else str(v)) for v in values]]
    if pd.api.types.is_bool_dtype(values):
        return [visible(str(name)), 1, [pool.code(str(v)) for v in values]]
    return [visible(str(name)), 0, _numbers(values.to_numpy())]


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _numbers(values: np.ndarray) -> list[Any]:
    """Return numbers as JSON has them. NaN is null, infinities are texts."""
    if values.dtype.kind in "iu":
        return values.tolist()
    return [number(float(value), _DIGITS) for value in values]


def number(value: float, digits: int) -> Any:
    """Return a number of so many digits for JSON: whole ones without a point, NaN as null, infinities as texts."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _short(values: np.ndarray) -> list[Any]:
    return [number(float(value), 6) for value in values]


def _rounded(value: Any) -> Any:
    """Return cards with numbers as JSON has them, of four digits."""
    if isinstance(value, Mapping):
        return {visible(str(key)): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, str):
        return visible(value)
    return number(value, 4) if isinstance(value, float) else value
