"""Whether values that are declared normalised are: every cell has one total, and the values are no logarithms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from perturbdiff.io.csc_matrix import CscMatrix
from perturbdiff.io.derived_matrices import LogValues, innermost
from perturbdiff.io.input_file import InputFile

_PLACES, _ROWS = 8, 32
_SAME = 0.01
"""Largest difference of totals, as a share of their median, that rounding explains."""


class Doubts(NamedTuple):
    """What speaks against it: ``wrong`` if the values are something else, ``odd`` if totals differ; else empty."""

    wrong: str = ""
    odd: str = ""


def doubts(file: InputFile) -> Doubts:
    """Look at some rows of a file whose values are declared normalised.

    A matrix that is stored by columns is not looked at, because its rows cannot be read one by one.
    """
    matrix = file.matrix.source if isinstance(file.matrix, LogValues) else file.matrix
    if isinstance(innermost(matrix), CscMatrix):
        return Doubts()
    plain, exponential, whole = [], [], True
    starts = np.unique(np.linspace(0, max(0, file.n_cells - _ROWS), _PLACES).astype(np.int64)).tolist()
    for start in starts:
        for block in matrix.blocks(start, min(start + _ROWS, file.n_cells)):
            rows = block.as_csr(matrix.shape[1]).astype(np.float64)
            whole &= bool((rows.data == np.floor(rows.data)).all())
            plain.append(np.asarray(rows.sum(axis=1)).ravel())
            with np.errstate(over="ignore"):
                rows.data = np.expm1(rows.data)
            exponential.append(np.asarray(rows.sum(axis=1)).ravel())
    totals = np.concatenate(plain)
    totals = totals[totals > 0]
    if not len(totals):
        return Doubts()
    if whole:
        return Doubts(wrong="its values are whole numbers, as counts are; set data.input_scale=counts")
    if _one_total(totals):
        return Doubts()
    if _one_total(np.concatenate(exponential)):
        return Doubts(wrong="its values are logarithms of normalised values; set data.input_scale=log1p")
    return Doubts(
        odd=f"the totals of its cells differ ({totals.min():.4g} to {totals.max():.4g}), as if genes were left out "
        "after they were normalised"
    )


def _one_total(totals: np.ndarray) -> bool:
    positive = totals[totals > 0]
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(len(positive) and np.ptp(positive) <= _SAME * np.median(positive))
