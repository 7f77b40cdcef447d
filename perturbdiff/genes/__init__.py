"""Lists of genes: how they are read, chosen from data, and matched with the genes of a file.

``selection`` chooses highly variable genes from streamed sums (``gene_sums``, ``highly_variable``); ``alignment``
writes cells with the genes of a list.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.genes.alignment import align_genes
    from perturbdiff.genes.gene_lists import GeneSet, read_names
    from perturbdiff.genes.selection import choose_genes

__all__ = ["GeneSet", "align_genes", "choose_genes", "read_names"]
__getattr__, __dir__ = attach(
    __name__,
    {"alignment": ["align_genes"], "gene_lists": ["GeneSet", "read_names"], "selection": ["choose_genes"]},
)
