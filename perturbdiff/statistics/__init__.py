"""What a store holds, in tables: cells, genes, depth, and distances between groups of cells."""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.statistics.statistics_stage import write_statistics

__all__ = ["write_statistics"]
__getattr__, __dir__ = attach(__name__, {"statistics_stage": ["write_statistics"]})
