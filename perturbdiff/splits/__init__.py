"""Splits assign conditions to training, validation and test.

``splits`` makes and reads them, and leaves cells out of training. ``split_rules`` holds the rules. ``store_export``
copies the cells of a part into an AnnData file.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.splits.splits import make_split, read_split
    from perturbdiff.splits.store_export import export

__all__ = ["export", "make_split", "read_split"]
__getattr__, __dir__ = attach(__name__, {"splits": ["make_split", "read_split"], "store_export": ["export"]})
