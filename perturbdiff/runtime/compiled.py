"""Compiling loops over rows of CSR matrices, which hold neither the interpreter lock nor any state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F, *, fastmath: bool | set[str] = False) -> F:
    """Compile ``function`` on first use; keep the machine code where a cache folder can be written.

    Parameters
    ----------
    function
        A loop that numba understands.
    fastmath
        What the compiler may do to sums, as `numba.njit` names it.
    """
    compiled: Any = numba.njit(nogil=True, fastmath=fastmath)(function)
    with contextlib.suppress(RuntimeError):  # no writable place for the cache, e.g. in a read-only container
        compiled._cache = _Cache(function)  # as numba's own enable_caching does
    return cast(F, compiled)


class _Cache(FunctionCache):
    """Machine code of earlier runs: what cannot be read is compiled anew, and what cannot be kept is not."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what an earlier run compiled, None if there is nothing of use."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - a damaged file may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, if there is room for it."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
