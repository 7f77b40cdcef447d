"""Compiled loops over rows of CSR matrices. They hold neither the interpreter lock nor any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile ``function`` on first use; keep the machine code where a cache folder can be written."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no writable place for the cache, e.g. in a read-only container
        return cast(F, numba.njit(nogil=True)(function))


@kernel
def take_rows(
    starts: np.ndarray,
    lengths: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """Copy the rows that begin at ``starts``, in that order, one after another."""
    end = 0
    for i in range(len(starts)):
        for k in range(starts[i], starts[i] + lengths[i]):
            out_indices[end] = indices[k]
            out_data[end] = data[k]
            end += 1


@kernel
def take_log1p(
    starts: np.ndarray,
    lengths: np.ndarray,
    factors: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out_indices: np.ndarray,
    out_data: np.ndarray,
) -> None:
    """`take_rows` with each value replaced by log1p(value * factor of its row), in float32."""
    end = 0
    for i in range(len(starts)):
        factor = np.float32(factors[i])
        for k in range(starts[i], starts[i] + lengths[i]):
            out_indices[end] = indices[k]
            out_data[end] = np.log1p(np.float32(data[k]) * factor)
            end += 1


@kernel
def dense_log1p(
    starts: np.ndarray,
    lengths: np.ndarray,
    factors: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write rows densely into ``out``, which is zeroed here, as log1p(value * factor of the row)."""
    for i in range(len(starts)):
        factor = np.float32(factors[i])
        for j in range(out.shape[1]):
            out[i, j] = 0.0
        for k in range(starts[i], starts[i] + lengths[i]):
            out[i, indices[k]] = np.log1p(np.float32(data[k]) * factor)


@kernel
def dense_values(
    starts: np.ndarray, lengths: np.ndarray, indices: np.ndarray, data: np.ndarray, out: np.ndarray
) -> None:
    """Write rows densely into ``out``, which is zeroed here."""
    for i in range(len(starts)):
        for j in range(out.shape[1]):
            out[i, j] = 0.0
        for k in range(starts[i], starts[i] + lengths[i]):
            out[i, indices[k]] = data[k]
