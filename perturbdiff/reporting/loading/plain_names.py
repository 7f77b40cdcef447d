"""Names of columns in words, for headings and axes."""

from __future__ import annotations

_PLAIN = {
    "total": "loss",
    "loss": "loss at fixed noise levels",
    "mmd": "loss between cell sets (MMD)",
    "mse": "loss of single cells (squared error)",
    "energy": "energy distance of sampled cells",
    "r2": "R² of sampled mean profiles",
    "pdcorr": "PDCorr of sampled mean changes",
    "learning_rate": "learning rate",
    "grad_norm": "length of the gradient",
}


def plain(name: str) -> str:
    """Return a column's name in words: known ones as a reader would say them, others without underscores."""
    return _PLAIN.get(name, name.replace("_", " "))
