"""Compiling loops over rows of CSR matrices, which hold neither the interpreter lock nor any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile ``function`` on first use; keep the machine code where a cache folder can be written."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no writable place for the cache, e.g. in a read-only container
        return cast(F, numba.njit(nogil=True)(function))
