"""Semantic tables from pretrained encoders: protein sequences, SMILES or texts → one vector per name."""

from perturbdiff.embeddings.embedding_stage import embed

__all__ = ["embed"]
