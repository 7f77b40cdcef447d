"""What a condition is: perturbation, cell type and batch; and which control cells belong to it.

``condition`` is the type, ``condition_table`` the table that every store holds and the doses that labels name.
``control_matching`` chooses control cells, ``vocabulary`` gives labels and genes their numbers in a model.
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
