"""Conditions (perturbation, cell type and batch) and the control cells that belong to them.

``condition`` defines the type, makes the table that every store holds, and reads the doses in labels.
``control_matching`` chooses control cells. ``vocabulary`` numbers the labels and genes of a model.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.conditions.control_matching import ControlPools, Rows
    from perturbdiff.conditions.vocabulary import GeneMap, Vocabulary

__all__ = ["ControlPools", "GeneMap", "Rows", "Vocabulary"]
__getattr__, __dir__ = attach(
    __name__, {"control_matching": ["ControlPools", "Rows"], "vocabulary": ["GeneMap", "Vocabulary"]}
)
