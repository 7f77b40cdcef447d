"""Files of other programs: checkpoints of the authors' released code."""

from perturbdiff.released.released_checkpoint import load_released

__all__ = ["load_released"]
