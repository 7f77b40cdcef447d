"""Semantic tables from pretrained encoders: protein sequences, SMILES or texts → one vector per name."""

from perturbdiff.embed.run import embed

__all__ = ["embed"]
