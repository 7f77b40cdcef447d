"""Compile loops over rows of CSR matrices. The loops hold no state and release the interpreter lock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F, *, fastmath: bool | set[str] = False) -> F:
    """Compile ``function`` on first use, and cache the machine code if a cache folder can be written.

    Parameters
    ----------
    function
        A loop that numba understands.
    fastmath
        Freedom of the compiler to reorder sums, as in `numba.njit`.
    """
    compiled: Any = numba.njit(nogil=True, fastmath=fastmath)(function)
    with contextlib.suppress(RuntimeError):  # no writable place for the cache, e.g. in a read-only container
        compiled._cache = _Cache(function)  # what numba's own enable_caching does
    return cast(F, compiled)


class _Cache(FunctionCache):
    """Cache for machine code. Unreadable entries are compiled again, and failures to write are ignored."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code that an earlier run compiled, or None if there is none."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - a damaged file may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store the compiled code if the disk allows it."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
