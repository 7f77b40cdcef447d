"""Diffusion over cell distributions: from raw single-cell counts to predicted perturbation responses."""

__version__ = "0.1.0"
