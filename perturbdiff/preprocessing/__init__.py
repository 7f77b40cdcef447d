"""From counts to a store, in streaming passes whose memory does not grow with the number of cells.

``preprocessing_stage`` runs the passes. ``scan`` checks and counts cells, ``knockdown`` drops cells whose target gene
was not knocked down, and ``reordering`` writes the store. ``shared_genes`` chooses one gene list for many studies.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.preprocessing.preprocessing_stage import preprocess
    from perturbdiff.preprocessing.shared_genes import build_vocabulary

__all__ = ["build_vocabulary", "preprocess"]
__getattr__, __dir__ = attach(
    __name__, {"preprocessing_stage": ["preprocess"], "shared_genes": ["build_vocabulary"]}
)
