"""Pretrained embeddings: frozen vectors of perturbations, cell types or genes, and where they come from."""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.embeddings.embedding_stage import embed
    from perturbdiff.embeddings.embedding_tables import EmbeddingTable, semantic_rows

__all__ = ["EmbeddingTable", "embed", "semantic_rows"]
__getattr__, __dir__ = attach(
    __name__, {"embedding_stage": ["embed"], "embedding_tables": ["EmbeddingTable", "semantic_rows"]}
)
