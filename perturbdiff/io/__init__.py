"""Raw inputs: files of counts and their labels, checked before a value is used.

``opening`` is the one door for files that others made. ``counts`` opens h5ad, Zarr and 10x files, ``matrices`` reads
their values by blocks of rows, ``columns`` and ``cell_labels`` turn obs into numbers.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.io.cell_labels import Labels, read_labels
    from perturbdiff.io.counts import CountsFile, Inputs

__all__ = ["CountsFile", "Inputs", "Labels", "read_labels"]
__getattr__, __dir__ = attach(
    __name__, {"cell_labels": ["Labels", "read_labels"], "counts": ["CountsFile", "Inputs"]}
)
