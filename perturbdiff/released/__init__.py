"""Checkpoints of the authors' released code, read without running anything in them."""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.released.checkpoint_import import import_checkpoint, load_released

__all__ = ["import_checkpoint", "load_released"]
__getattr__, __dir__ = attach(__name__, {"checkpoint_import": ["import_checkpoint", "load_released"]})
