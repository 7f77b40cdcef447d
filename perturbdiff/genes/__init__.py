"""Lists of genes: how they are read, chosen from data, and matched with the genes of a file.

``selection`` chooses highly variable genes from streamed sums (``gene_sums``, ``highly_variable``); ``gene_lists``
reads lists and tells how cells match them, and ``aligned_file`` writes cells with the genes of a list.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.genes.gene_lists import GeneSet, align_genes, read_names
    from perturbdiff.genes.selection import choose_genes

__all__ = ["GeneSet", "align_genes", "choose_genes", "read_names"]
__getattr__, __dir__ = attach(
    __name__,
    {"gene_lists": ["GeneSet", "read_names", "align_genes"], "selection": ["choose_genes"]},
)
