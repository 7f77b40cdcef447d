"""Raw inputs: files of counts and their labels, checked before a value is used.

``opening`` checks and opens files that others made, and ``layouts`` finds what they hold. ``input_file`` is one such
file, read in pieces: ``counts`` is one of raw counts, ``row_file`` one whose rows are read by their numbers.
``matrices`` reads values by blocks of rows, ``columns`` and ``cell_labels`` turn obs into numbers.
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
