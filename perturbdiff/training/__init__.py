"""Training: from stores and splits to a bundle. It can be interrupted anywhere, and the result is the same.

``training_stages`` holds the commands, and ``setup`` puts together what a training needs. ``fit`` is a whole training,
``loop`` takes its steps, ``module`` is the objective and ``optimizer`` changes the weights. ``run_folder`` keeps
checkpoints; ``callbacks`` validate, log and save; ``distributed`` starts processes.
"""

from typing import TYPE_CHECKING

from perturbdiff.runtime.lazy import attach

if TYPE_CHECKING:
    from perturbdiff.training.training_stages import finetune, pretrain, train

__all__ = ["finetune", "pretrain", "train"]
__getattr__, __dir__ = attach(__name__, {"training_stages": ["finetune", "pretrain", "train"]})
