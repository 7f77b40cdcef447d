"""The definitions of the metrics that two releases of cell-eval give, as data: all in which they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

INFINITY = float("inf")


@dataclass(frozen=True)
class Definition:
    """In what one release differs from the other; `perturbdiff.evaluation.metrics.catalogue` has what they share.

    Attributes
    ----------
    name
        Name in tables and settings.
    bh_family
        Tests that Benjamini–Hochberg adjusts together: ``all`` perturbations and genes of a scope, or those of
        one ``perturbation``. With ``all``, what a perturbation scores depends on which others are scored.
    exact_below
        Where no two of a gene's values are equal and one group has fewer cells, p is exact (scipy's "auto").
        0: the normal approximation always.
    fold_limit
        Fold change reported where only the control's mean is zero; its inverse where only the perturbation's is.
    ranks
        What LFCSpear ranks: fold changes or their logarithms. The order is the same; which are equal in float32
        is not.
    score_floor
        Which q are raised to 1e-10 before AUROC and AUPRC rank by −log10 q: those that are ``zero``, so that
        1e-11 counts as stronger than 0, or all ``below`` it.
    """

    name: str
    bh_family: Literal["all", "perturbation"]
    exact_below: int
    fold_limit: float
    ranks: Literal["fold", "log2_fold"]
    score_floor: Literal["zero", "below"]


DEFAULT = "cell-eval-0.6.6"
DEFINITIONS: dict[str, Definition] = {
    definition.name: definition
    for definition in (
        Definition(DEFAULT, "all", 9, 20.0, "fold", "zero"),  # with pdex 0.1.28 and scipy 1.16
        Definition("cell-eval-0.8.2", "perturbation", 0, INFINITY, "log2_fold", "below"),  # with pdex 0.3.0
    )
}
