"""The bundle: a folder that holds all that sampling needs, and can be shared."""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.checkpoint.bundle import Bundle

__all__ = ["Bundle"]
__getattr__, __dir__ = attach(__name__, {"bundle": ["Bundle"]})
