"""What a condition is: perturbation with its doses, cell type and batch; and which control cells belong to it.

``condition_table`` defines the table that every store holds, ``doses`` reads labels of drugs, ``control_matching`` and
``balanced_controls`` choose control cells, ``vocabulary`` gives labels and genes their numbers in a model.
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
